"""Megatron-LM's ``load_checkpoint`` for a model that only scores: weights, and no trace in global state."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CheckpointError
from .checkpoint import read_iteration
from .global_state import preserved_rng
from .roles import is_built

# Up to megatron-core 0.14 the loader asserts that these are zero, which a first load leaves them not.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def load_checkpoint(
    load: Callable[..., Any], arguments: inspect.BoundArguments, args: Any
) -> tuple[int, int | float]:
    """``load_checkpoint``; of the weights alone while a model that only scores is being built.

    The loader runs as for fine-tuning (``--finetune --no-load-optim --no-load-rng``), which in every release
    keeps it from the optimizer, the generators and the rerun state machine, and from refusing another TP or
    PP size on account of an optimizer that nobody asked for. As it then says 0 for the iteration, that is
    read from the checkpoint.

    Args:
        load: Megatron's.
        arguments: what it is called with, defaults applied.
        args: Megatron's global arguments; as before at the end, and likewise every other global that the
            loader touches, also when it raises.

    Returns:
        The iteration of the checkpoint, and the number of floating-point operations that the loader gives.
    """
    if not is_built():
        loaded: tuple[int, int | float] = load(*arguments.args, **arguments.kwargs)
        return loaded
    arguments.arguments |= {"optimizer": None, "opt_param_scheduler": None}
    with preserved_rng(), preserved_globals(args):
        args.finetune = args.no_load_optim = args.no_load_rng = True
        for name in _CONSUMED:
            setattr(args, name, 0)
        iteration, *rest = load(*arguments.args, **arguments.kwargs)
    return _true_iteration(args, arguments.arguments["load_arg"]) or iteration, *rest


def _true_iteration(args: Any, load_arg: str) -> int:
    """0 where the loader has sources that :func:`read_iteration` does not know: a local checkpoint, say."""
    for path in (getattr(args, load_arg), getattr(args, "pretrained_checkpoint", None)):
        try:
            if path is not None:
                return read_iteration(path, getattr(args, "ckpt_step", None))
        except CheckpointError:
            continue
    return 0


@contextmanager
def preserved_globals(args: Any) -> Iterator[None]:
    """Leave arguments, microbatch calculator and checkpoint version as they are, also when the body raises.

    Inside, no checkpoint version is known yet: the loader asserts that all that it loads have the same.
    """
    checkpointing: Any = sys.modules.get("megatron.training.checkpointing")
    calculator = getattr(
        sys.modules.get("megatron.core.num_microbatches_calculator"),
        "_GLOBAL_NUM_MICROBATCHES_CALCULATOR",
        None,
    )
    with _preserved(args), _preserved(calculator), _preserved(checkpointing, only="_CHECKPOINT_VERSION"):
        if hasattr(checkpointing, "_CHECKPOINT_VERSION"):
            checkpointing._CHECKPOINT_VERSION = None
        yield


@contextmanager
def _preserved(owner: Any, only: str | None = None) -> Iterator[None]:
    """Leave the attributes of an object (or one of them) as they are; ``None`` has none."""
    if owner is None:
        yield
        return
    before = {name: value for name, value in vars(owner).items() if only in (None, name)}
    try:
        yield
    finally:
        for name in [name for name in vars(owner) if only in (None, name) and name not in before]:
            delattr(owner, name)
        for name, value in before.items():
            if vars(owner).get(name, before) is not value:
                setattr(owner, name, value)
