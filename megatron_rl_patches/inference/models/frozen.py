"""Models that only score stay frozen, and refuse what training loops call on them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.nn import Module

from ...common.chunks import as_chunks
from ...errors import InferenceOnlyError
from ...reentry import router_replay

# Attribute of a chunk that only scores: its role, and the setting because of which it is one.
_ROLE = "inference_only_role"
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


def freeze(model: Sequence[Module], role: str, setting: str) -> None:
    """Put the chunks in eval mode, freeze them, and have methods of training raise ``InferenceOnlyError``.

    Errors name the ``role`` of the model, and the ``setting`` or function because of which it only scores.
    Its routers are taken off the list of routers of the process, which the policy's code reads.
    """
    router_replay.leave_out(model)
    for chunk in model:
        chunk.eval()
        chunk.requires_grad_(False)
        setattr(chunk, _ROLE, (role, setting))
        for name in _TRAINING_METHODS:
            setattr(chunk, name, partial(_refuse, role, setting, name))
        chunk.requires_grad_ = _StayFrozen(role, setting, chunk)  # type: ignore[method-assign, assignment]


def refuse_to_train(model: Any, action: str) -> None:
    """Raise ``InferenceOnlyError`` if a chunk of the model only scores."""
    for chunk in as_chunks(model):
        if (reason := getattr(chunk, _ROLE, None)) is not None:
            _refuse(*reason, action)


def _refuse(role: str, setting: str, action: str, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"{action}: the model of role {role!r} only scores. Because of {setting} it was built without DDP, "
        "gradient buffers and optimizer; if it is to train, change that and build it again."
    )


class _StayFrozen:
    """``requires_grad_`` of a chunk that only scores.

    It holds the chunk weakly: in a cycle, a deleted teacher would keep its memory until gc collects it.
    """

    def __init__(self, role: str, setting: str, chunk: Module) -> None:
        self._role, self._setting, self._chunk = role, setting, weakref.ref(chunk)

    def __call__(self, requires_grad: bool = True) -> Module | None:
        if requires_grad:
            _refuse(self._role, self._setting, "requires_grad_(True)")
        chunk = self._chunk()
        return None if chunk is None else Module.requires_grad_(chunk, False)

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles of the chunk refer to themselves
        return _StayFrozen, (self._role, self._setting, self._chunk())
