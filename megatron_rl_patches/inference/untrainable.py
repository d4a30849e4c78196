"""Models that refuse to train, and say why, before Megatron fails on what they lack."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..errors import InferenceOnlyError

#: The attribute of a chunk that only scores: its role, and the setting that made it so.
MARK = "inference_only_role"
# What loops call on a DDP chunk in order to train it.
_TRAINING_METHODS = (
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "finish_grad_sync",
    "no_sync",
    "scale_gradients",
    "start_grad_sync",
    "start_param_sync",
    "zero_grad_buffer",
)


def refuse_training(model: Sequence[torch.nn.Module], role: str, setting: str) -> None:
    """From now on the chunks refuse what a loop calls in order to train them.

    Args:
        model: frozen chunks without DDP.
        role: what errors call the model.
        setting: what errors say made it so.
    """
    for chunk in model:
        setattr(chunk, MARK, (role, setting))
        for name in _TRAINING_METHODS:
            setattr(chunk, name, partial(_refuse, role, setting, name))
        chunk.requires_grad_ = partial(_stay_frozen, role, setting, chunk)  # type: ignore[method-assign]


def refuse_to_train(model: Any, what: str) -> None:
    """Refuse ``what`` for a model with such a chunk.

    Raises:
        InferenceOnlyError: names the role and the setting that made it so.
    """
    for chunk in model if isinstance(model, Sequence | torch.nn.ModuleList) else [model]:
        if (mark := getattr(chunk, MARK, None)) is not None:
            _refuse(*mark, what)


def _refuse(role: str, setting: str, what: str, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"{what}: the model of role {role!r} only scores. Because of {setting} it was built without DDP, "
        "gradient buffers and optimizer; if it is to train, change that and build it again."
    )


def _stay_frozen(
    role: str, setting: str, chunk: torch.nn.Module, requires_grad: bool = True
) -> torch.nn.Module:
    if requires_grad:
        _refuse(role, setting, "requires_grad_(True)")
    return torch.nn.Module.requires_grad_(chunk, False)
