"""``--loss-type opd_loss``: the student learns from teachers, on its top-k or on the whole vocabulary.

======================================  ======================================================================
function                                what is around it
======================================  ======================================================================
``get_slime_extra_args_provider``       ``--loss-type`` has one more choice
``slime_validate_args``                 the loss becomes a custom one, its options are checked
``MegatronTrainRayActor.train_actor``   names the actor for the next two
``train``                               the student and the teachers are forwarded before
``get_batch``                           their distributions come with each microbatch
======================================  ======================================================================

slime, vime and miles have these functions, the first two under their own names. In verl:

=======================================  =====================================================================
``get_distillation_loss_settings``       further names are in verl's registry
``get_distillation_loss_fn``             the same, and losses are not clamped at zero
``compute_forward_kl_topk`` (Megatron)   the top-k has a tail; the objective is the one that is named
``TrainingWorker.train_mini_batch``      what the teachers said is checked
=======================================  =====================================================================

The patch changes what is trained, so it is selected by name only. No patch is needed where rollouts bring a
teacher's top-k along (OpenClaw-RL): there the loss can be named as a custom one.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Literal

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..errors import PatchError
from ..frameworks import WITH_MEGATRON_UTILS

Combination = Literal["mixture", "average", "route"]
_OPTIONS, _TEACHERS = ".frameworks.distillation_arguments", ".frameworks.distillation_teachers"
_ACTOR = "MegatronTrainRayActor.train_actor"
_DATA_OF_MILES = [f"miles.backends.training_utils.{name}" for name in ("data", "data.rollout")]


@dataclass(frozen=True)
class OpdOptions:
    """Options of the patch.

    Attributes:
        opd_top_k: number of the student's most probable tokens that are compared one by one; ``"full"``: all.
        opd_divergence: a divergence of ``DistillationOptions``; ``generalized_kl`` needs a top-k.
        opd_teachers: name and checkpoint folder of each teacher.
        opd_teacher_weights: one number per teacher, for the mixture or average; empty: equal weights.
        opd_combine: with several teachers, ``"mixture"`` mixes their distributions, ``"average"`` averages
            their divergences, and ``"route"`` uses the teacher that a sample's metadata names.

    Raises:
        PatchError: a value is out of its range.
    """

    opd_top_k: int | Literal["full"] = 64
    opd_divergence: str = "reverse_kl"
    opd_teachers: tuple[tuple[str, str], ...] = ()
    opd_teacher_weights: tuple[float, ...] = ()
    opd_combine: Combination = "mixture"

    def __post_init__(self) -> None:
        if self.opd_top_k != "full" and self.opd_top_k < 1:
            raise PatchError(f"opd_top_k={self.opd_top_k}: expected at least 1, or full")
        names = [name for name, _ in self.opd_teachers]
        if len(set(names)) < len(names) or not all(name and path for name, path in self.opd_teachers):
            raise PatchError(f"opd_teachers={self.opd_teachers}: expected distinct names, each with a path")
        weights = self.opd_teacher_weights
        if weights and (len(weights) != len(names) or min(weights) < 0 or not 0 < sum(weights) < math.inf):
            raise PatchError(
                f"opd_teacher_weights={weights} of the teachers {names}: expected one each, not negative, "
                "not all zero"
            )
        if weights and self.opd_combine == "route":
            raise PatchError("opd_teacher_weights are for a mixture or an average, not for opd_combine=route")


patch = Patch(
    name="distillation",
    summary="on-policy distillation from one or several teachers, over the top-k or the whole vocabulary",
    upstream=("THUDM/slime#2033", "verl-project/verl#7855", "verl-project/verl#7856"),
    options=OpdOptions,
    selected_by="by name",
)


# --- sites: two in the driver, whose arguments the workers get, and three on every worker

for _framework in WITH_MEGATRON_UTILS:
    _arguments = f"{_framework}.utils.arguments"
    _utils = f"{_framework}.backends.megatron_utils"
    _data = _DATA_OF_MILES if _framework == "miles" else f"{_utils}.data"
    _provider, _adds = f"get_{_framework}_extra_args_provider", f"add_{_framework}_arguments"
    _inputs = ("model", "data_iterator", "num_microbatches")
    for _module, _function, _adapter, _parameters, _names in (
        (_arguments, _provider, f"{_OPTIONS}:with_loss_type", (), (_adds,)),
        (_arguments, f"{_framework}_validate_args", f"{_OPTIONS}:validate", ("args",), ()),
        (f"{_utils}.actor", _ACTOR, f"{_TEACHERS}:train_actor", (), ("train", "weights_backuper")),
        (f"{_utils}.model", "train", f"{_TEACHERS}:train", _inputs, ("train_one_step",)),
        (_data, "get_batch", f"{_TEACHERS}:get_batch", ("data_iterator", "keys"), ("get_next",)),
    ):
        patch.wrap(_module, _function, _adapter, parameters=_parameters, requires_names=_names)


# --- verl: its registry in every process that has a configuration, the rest on Megatron workers


def _counts_the_tail(target: TargetSource) -> str | None:
    passed = [node for call in target.calls("apply") for node in ast.walk(call.node)]
    counts = any(isinstance(node, ast.Name) and "tail" in node.id for node in passed)
    return "verl counts the tail itself" if counts else None


def _distills_nothing(target: TargetSource) -> str | None:
    distills = target.mentions("distillation_ppo_loss", in_module=True)
    return None if distills else "its workers have no distillation"


_REGISTRY = (("get_distillation_loss_settings", "settings_of"), ("get_distillation_loss_fn", "loss_of"))
for _function, _adapter in _REGISTRY:
    patch.wrap(
        "verl.trainer.distillation.losses",
        _function,
        f".frameworks.verl_distillation:{_adapter}",
        parameters=("loss_name",),
        optional_module=True,
        helps=("compute_forward_kl_topk",),
    )
patch.wrap(
    "verl.trainer.distillation.megatron.losses",
    "compute_forward_kl_topk",
    ".frameworks.verl_distillation:token_losses",
    parameters=("student_logits", "teacher_topk_log_probs", "teacher_topk_ids", "config", "data_format"),
    requires_names=("preprocess_thd_engine", "preprocess_bshd_engine", "_VocabParallelKLDivergence"),
    skip_if=_counts_the_tail,
    optional_module=True,
)
patch.wrap(
    "verl.workers.engine_workers",
    "TrainingWorker.train_mini_batch",
    ".frameworks.verl_distillation:train",
    parameters=("data",),
    requires_names=("train_batch",),
    skip_if=_distills_nothing,
    optional_module=True,
    helps=("compute_forward_kl_topk",),
)
