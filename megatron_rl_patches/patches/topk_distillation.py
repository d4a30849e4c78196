"""``--loss-type topk_opd_loss``: the student learns from teachers on the ids that it finds most probable.

Selected by name only, as it is meant to change what is trained. Not patched: hosts whose rollouts bring a
teacher's top-k along (OpenClaw-RL), where the loss can be named as a custom one without any patch, and miles.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..engine.arguments import bind, call
from ..engine.spec import Patch
from ..errors import InvalidInputError

if TYPE_CHECKING:
    from ..settings import Settings

LOSS_TYPE = "topk_opd_loss"
LOSS_PATH = f"megatron_rl_patches.losses.host_distillation.{LOSS_TYPE}"
_UTILS = "slime.backends.megatron_utils"

patch = Patch(
    name="topk-distillation",
    summary="--loss-type topk_opd_loss: top-k on-policy distillation from one or several teachers",
    upstream=("THUDM/slime#2033",),
    explicit=True,
)


# --- arguments, in the driver; the workers get them with `args`


@patch.wrap("slime.utils.arguments", "get_slime_extra_args_provider", mentions=("add_slime_arguments",))
def arguments_provider(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    provider: Callable[[Any], Any] = wrapped(*args, **kwargs)

    def with_loss_type(parser: Any) -> Any:
        parser = provider(parser)
        for action in parser._actions:
            if "--loss-type" in action.option_strings and LOSS_TYPE not in action.choices:
                action.choices = [*action.choices, LOSS_TYPE]
        return parser

    return with_loss_type


@patch.wrap("slime.utils.arguments", "slime_validate_args", uses=("args",), with_settings=True)
def validate(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, settings: Settings
) -> Any:
    """From here on the loss is a custom one to the host; a file of its own may override our settings."""
    host_args = bind(wrapped, args, kwargs).arguments["args"]
    if host_args.loss_type != LOSS_TYPE:
        return wrapped(*args, **kwargs)
    host_args.loss_type, host_args.custom_loss_function_path = "custom_loss", LOSS_PATH
    host_args.opd_top_k, host_args.opd_divergence = settings.opd_top_k, settings.opd_divergence
    host_args.opd_teachers = dict(settings.opd_teachers)
    host_args.opd_teacher_weights = settings.opd_teacher_weights
    result = wrapped(*args, **kwargs)
    _check(host_args)
    return result


def _check(args: Any) -> None:
    """Everything that would go wrong later, after hours in a queue."""
    from ..settings import OPD_TEACHERS_VARIABLE, Settings

    for option, why in (
        ("allgather_cp", "teachers are scored in the zigzag layout of context parallelism"),
        ("use_routing_replay", "scoring is not part of the replay"),
        ("entropy_coef", "the loss has no entropy bonus"),
    ):
        if getattr(args, option, None):
            raise InvalidInputError(
                f"--{option.replace('_', '-')} does not go with --loss-type {LOSS_TYPE}: {why}; leave it out"
            )
    if getattr(args, "train_backend", "megatron") != "megatron":
        raise InvalidInputError(f"--loss-type {LOSS_TYPE} is for --train-backend megatron")
    if not getattr(args, "enable_weights_backuper", True):
        raise InvalidInputError(
            f"--disable-weights-backuper does not go with --loss-type {LOSS_TYPE}: teachers take turns with "
            "the actor in one model; leave it out"
        )
    if not args.opd_teachers:
        raise InvalidInputError(
            f"--loss-type {LOSS_TYPE} without a teacher: {OPD_TEACHERS_VARIABLE}=name=path,... or "
            "Settings(opd_teachers={name: path})"
        )
    Settings(
        opd_top_k=args.opd_top_k,
        opd_divergence=args.opd_divergence,
        opd_teachers=tuple(args.opd_teachers.items()),
        opd_teacher_weights=tuple(args.opd_teacher_weights),
    )
    for name, path in args.opd_teachers.items():
        if not os.path.isdir(path):
            raise InvalidInputError(
                f"teacher {name!r}: there is no folder {path}; give a checkpoint that all nodes can read"
            )
    if getattr(args, "hf_checkpoint", None):
        from ..inference.host_vocabulary import check_vocabularies

        check_vocabularies(args.opd_teachers, args.hf_checkpoint)


# --- the actor, on every worker


@patch.wrap(f"{_UTILS}.actor", "MegatronTrainRayActor.train_actor", mentions=("train", "weights_backuper"))
def train_actor(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    host_args = instance.args
    # A teacher that comes with the rollout needs no scoring.
    if getattr(host_args, "custom_loss_function_path", None) != LOSS_PATH or not getattr(
        host_args, "opd_teachers", None
    ):
        return wrapped(*args, **kwargs)
    from ..inference.host_topk import training

    with training(instance):
        return wrapped(*args, **kwargs)


@patch.wrap(
    f"{_UTILS}.model",
    "train",
    uses=("model", "data_iterator", "num_microbatches"),
    mentions=("train_one_step",),
)
def train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By now advantages are computed and figures logged, so none of it sees our keys."""
    from ..inference.host_topk import current_trainer

    trainer = current_trainer()
    if trainer is None:
        return wrapped(*args, **kwargs)
    given = bind(wrapped, args, kwargs).arguments
    iterators = given["data_iterator"]
    forward_only = inspect.unwrap(wrapped).__globals__["forward_only"]

    def forward(of_logits: Callable[..., Any]) -> Any:
        return forward_only(
            of_logits, trainer.actor.args, given["model"], iterators, given["num_microbatches"]
        )

    with trainer.scored(forward, iterators[0].rollout_data):
        return wrapped(*args, **kwargs)


@patch.wrap(f"{_UTILS}.data", "get_batch", uses=("data_iterator", "keys"), mentions=("get_next",))
def get_batch(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What was scored reaches the loss with the rest of its microbatch."""
    from ..inference.host_topk import current_trainer

    trainer = current_trainer()
    if trainer is None:
        return wrapped(*args, **kwargs)
    from ..losses.host_distillation import KEYS

    bound = bind(wrapped, args, kwargs)
    given = bound.arguments
    have = [key for key in KEYS if key in given["data_iterator"].rollout_data]
    trainer.batch = call(wrapped, bound, keys=[*given["keys"], *have])
    return trainer.batch
