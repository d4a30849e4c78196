"""Models that refuse to train, with an error that gives the reason."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...common.chunks import as_chunks
from ...errors import InferenceOnlyError

#: Attribute of an inference-only chunk: its role, and the setting because of which it is one.
INFERENCE_ROLE_ATTRIBUTE = "inference_only_role"
# Methods of a DDP chunk that training loops call.
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
    """Make the chunks raise ``InferenceOnlyError`` in every method that a training loop calls on a DDP chunk.

    Errors name the ``role`` of the model, and the ``setting`` or function because of which it only scores.
    """
    for chunk in model:
        setattr(chunk, INFERENCE_ROLE_ATTRIBUTE, (role, setting))
        for name in _TRAINING_METHODS:
            setattr(chunk, name, partial(_refuse, role, setting, name))
        chunk.requires_grad_ = partial(_stay_frozen, role, setting, chunk)  # type: ignore[method-assign]


def refuse_to_train(model: Any, action: str) -> None:
    """Raise ``InferenceOnlyError`` if a chunk of the model is inference-only."""
    for chunk in as_chunks(model):
        if (reason := getattr(chunk, INFERENCE_ROLE_ATTRIBUTE, None)) is not None:
            _refuse(*reason, action)


def _refuse(role: str, setting: str, action: str, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"{action}: the model of role {role!r} only scores. Because of {setting} it was built without DDP, "
        "gradient buffers and optimizer; if it is to train, change that and build it again."
    )


def _stay_frozen(
    role: str, setting: str, chunk: torch.nn.Module, requires_grad: bool = True
) -> torch.nn.Module:
    if requires_grad:
        _refuse(role, setting, "requires_grad_(True)")
    return torch.nn.Module.requires_grad_(chunk, False)
