"""Megatron-LM's ``load_checkpoint`` for a model that only scores: the weights, and no change of globals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..common.scopes import replaced
from ..engine.call import Call
from ..errors import CheckpointError
from ..inference.checkpoints.load import read_iteration
from ..inference.models.isolation import preserved_rng
from .inference_roles import ddp_skipped

# Up to megatron-core 0.14 the loader asserts that these are zero; the policy's checkpoint has set them.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def load_checkpoint(call: Call) -> Any:
    """Run Megatron's ``load_checkpoint``; only the weights are loaded into a model that only scores."""
    if not ddp_skipped():
        return call()
    from megatron.training.global_vars import get_args

    return load_weights(call, get_args())


def load_weights(call: Call, args: Any) -> tuple[int, int | float]:
    """Run Megatron's ``load_checkpoint`` for a model that only scores.

    The loader runs as for fine-tuning (``--finetune --no-load-optim --no-load-rng``), which in every release
    keeps it from the optimizer, the generators and the rerun state machine, and from refusing another TP or
    PP size because of the optimizer. It then returns 0 for the iteration, which is read from the checkpoint.

    Megatron's loader unpickles the checkpoint's files, which may run code that they name, unlike
    ``load_inference_checkpoint``.

    Args:
        args: Megatron's global arguments. They, and every other global that the loader touches, are at the
            end as they were before, also when it raises.

    Returns:
        The iteration of the checkpoint, and the number of floating-point operations that the loader gives.
    """
    with preserved_rng(), preserved_globals(args):
        args.finetune = args.no_load_optim = args.no_load_rng = True
        for name in _CONSUMED:
            setattr(args, name, 0)
        iteration, num_operations = call(optimizer=None, opt_param_scheduler=None)
    return _stored_iteration(args, call["load_arg"]) or iteration, num_operations


def _stored_iteration(args: Any, load_arg: str) -> int:
    """Return the iteration in the checkpoint; 0 for sources that :func:`read_iteration` does not know."""
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

    Inside, the checkpoint version is unset, as the loader asserts that all checkpoints have the same one.
    """
    checkpointing = sys.modules.get("megatron.training.checkpointing")
    microbatches = sys.modules.get("megatron.core.num_microbatches_calculator")
    calculator = getattr(microbatches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)
    unknown = {"_CHECKPOINT_VERSION": None} if hasattr(checkpointing, "_CHECKPOINT_VERSION") else {}
    with _preserved(args), _preserved(calculator), replaced(checkpointing, **unknown):
        yield


@contextmanager
def _preserved(owner: Any) -> Iterator[None]:
    """Leave all attributes of an object as they are."""
    before = {} if owner is None else dict(vars(owner))
    try:
        yield
    finally:
        if owner is not None:
            vars(owner).clear()
            vars(owner).update(before)
