"""The command line of slime, vime and miles with ``--loss-type opd_loss``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..engine.call import Call
from ..engine.settings import build
from ..errors import CheckpointError, InvalidInputError
from ..losses.vocab.divergences import divergence_named

LOSS_TYPE = "opd_loss"
LOSS_PATH = f"megatron_rl_patches.frameworks.distillation_loss.{LOSS_TYPE}"

_ADAPTERS = ("lora_rank", "lora_adapter_path", "multi_lora_n_adapters")
#: Options that do not go with the loss, and why.
_CONFLICTS = {
    "allgather_cp": "teachers are scored in the zigzag layout of context parallelism",
    "use_routing_replay": "scoring is not part of the replay",
    "use_indexer_replay": "scoring is not part of the replay",
    **dict.fromkeys(_ADAPTERS, "a teacher would be scored with the student's adapter"),
    "entropy_coef": "the loss has no entropy bonus",
}


def with_loss_type(call: Call) -> Callable[[Any], Any]:
    """Return the framework's function that adds its arguments, with one more choice of ``--loss-type``."""
    provider = call()

    def add_arguments(parser: Any) -> Any:
        parser = provider(parser)
        for action in parser._actions:
            if "--loss-type" in action.option_strings and LOSS_TYPE not in action.choices:
                action.choices = [*action.choices, LOSS_TYPE]
        return parser

    return add_arguments


def validate(call: Call) -> Any:
    """Validate the framework's arguments, and with ``--loss-type opd_loss`` those of the loss.

    The loss becomes the framework's custom loss, and the options of the patch become its arguments.
    """
    args = call["args"]
    if args.loss_type != LOSS_TYPE:
        return call()
    args.loss_type, args.custom_loss_function_path = "custom_loss", LOSS_PATH
    _set_options(args, call.options)
    result = call()  # may read a file that overrides the options
    names = [field.name for field in fields(call.options)]
    _set_options(args, build(type(call.options), {name: getattr(args, name) for name in names}))
    check_arguments(args)
    return result


def _set_options(args: Any, options: Any) -> None:
    vars(args).update(asdict(options), opd_teachers=dict(options.opd_teachers))  # path by name


def refuse_conflicts(args: Any, *options: str) -> None:
    """Refuse options, by default all, that do not go with the loss."""
    for option in options or _CONFLICTS:
        if getattr(args, option, None):
            name, reason = option.replace("_", "-"), _CONFLICTS[option]
            raise InvalidInputError(f"--{name} does not go with {LOSS_TYPE}: {reason}; leave it out")


def check_arguments(args: Any) -> None:
    """Refuse, before anything starts, what would fail only after hours in a queue."""
    refuse_conflicts(args)
    divergence = divergence_named(args.opd_divergence, getattr(args, "opd_beta", 0.5))
    if args.opd_top_k == "full" and not divergence.counts_tail:
        raise InvalidInputError(
            f"opd_divergence={args.opd_divergence!r} is over k ids: use reverse_kl with opd_top_k=full"
        )
    if not (temperature := getattr(args, "rollout_temperature", 1.0)) > 0:
        raise InvalidInputError(
            f"--rollout-temperature is {temperature}, expected a positive number: --loss-type {LOSS_TYPE} "
            "divides logits by it"
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
            f"--loss-type {LOSS_TYPE} without a teacher: MEGATRON_RL_PATCHES_OPD_TEACHERS=name=path,... or "
            "Settings(opd_teachers={name: path})"
        )
    for name, path in args.opd_teachers.items():
        if not os.path.isdir(path):
            raise InvalidInputError(
                f"teacher {name!r}: there is no folder {path}; pass a checkpoint that all nodes can read"
            )
    if getattr(args, "hf_checkpoint", None):
        check_vocabularies(args.opd_teachers, args.hf_checkpoint)


def check_vocabularies(teachers: Mapping[str, str], student: str | os.PathLike[str]) -> None:
    """Refuse teachers whose vocabulary is not the student's, as their checkpoints say.

    Megatron pads vocabularies for tensor parallelism, and so loads an embedding of another size without an
    error: such a teacher would score, and its scores would mean nothing. ``teachers`` are checkpoints by
    name, of Megatron (``torch_dist``) or Hugging Face; those of other formats are not checked. ``student`` is
    the Hugging Face checkpoint of its tokenizer. A damaged checkpoint raises :class:`CheckpointError`.
    """
    # Imported here and below, since this brings Megatron along, which the driver does not need otherwise.
    from ..inference.weights import MAX_PADDING

    expected = _huggingface_vocabulary(Path(student))
    if expected is None:
        return
    for name, path in teachers.items():
        size, sizes = _huggingface_vocabulary(Path(path)), range(expected, expected + 1)
        if size is None:
            size, sizes = _embedding_rows(path), range(expected, expected + MAX_PADDING)
        if size is not None and size not in sizes:
            raise InvalidInputError(
                f"teacher {name!r} ({path}) has a vocabulary of {size}, the student ({student}) one of "
                f"{expected}: token ids would not mean the same; distill from a teacher of the same "
                "vocabulary"
            )


def _huggingface_vocabulary(folder: Path) -> int | None:
    """Return the size in ``config.json``, or ``None`` where there is no such file, or no size in it."""
    from ..inference.checkpoints.pickles import reading

    file = folder / "config.json"
    if not file.is_file():
        return None
    with reading(file, "is damaged, expected a JSON object with vocab_size:"):
        config = json.loads(file.read_text())
        size = config.get("text_config", config).get("vocab_size")
        if size is not None and not isinstance(size, int):
            raise TypeError(f"vocab_size is {size!r}")
        return size


def _embedding_rows(path: str) -> int | None:
    """Return the rows of the embedding in a ``torch_dist`` checkpoint, or ``None`` for the legacy format."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ..inference.checkpoints.load import check_format, locate
    from ..inference.checkpoints.pickles import read_metadata

    try:
        folder = locate(path)
        if any(folder.glob("mp_rank_*")):  # the legacy format, which the framework may load
            return None
        check_format(folder)
    except CheckpointError as error:
        raise InvalidInputError(f"a teacher cannot be loaded: {error}") from error
    for name, tensor in read_metadata(folder).state_dict_metadata.items():
        if name.endswith("embedding.word_embeddings.weight") and isinstance(tensor, TensorStorageMetadata):
            if len(tensor.size) == 0:
                raise CheckpointError(f"{folder / '.metadata'} is damaged: {name} has no dimension")
            return tensor.size[0]
    return None
