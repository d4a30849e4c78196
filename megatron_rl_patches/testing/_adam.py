"""``torch.optim.Adam`` in the place of the fused ones of TransformerEngine and apex."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ._cuda_redirect import Replacements


class _State(dict[str, Any]):
    """State of a parameter to which Megatron gives moments before the first step, but no count of steps."""

    def __missing__(self, key: str) -> Any:
        if key != "step":
            raise KeyError(key)
        self["step"] = torch.tensor(0.0)
        return self["step"]


def _loaded(values: dict[str, Any]) -> _State:
    state = _State(values)
    if isinstance(state.get("step"), torch.Tensor):
        # Megatron gives all parameters the same tensor, to which each of them would add.
        state["step"] = state["step"].clone()
    return state


def _as_fused(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def on_cpu(self: Any, params: Any, lr: Any = 1e-3, *args: Any, **kwargs: Any) -> None:
        # Megatron sets the rate before the first step, and fused ones need none until then.
        init(self, params, 0.0 if lr is None else lr, *args, **kwargs)
        self.state = defaultdict(_State)

    return on_cpu


def _keeping_states(set_state: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(set_state)
    def on_cpu(self: Any, state: dict[str, Any]) -> None:
        if "state" in state:
            states = {parameter: _loaded(values) for parameter, values in state["state"].items()}
            state = {**state, "state": defaultdict(_State, states)}
        set_state(self, state)

    return on_cpu


def replacements() -> list[Replacements]:
    """Return what of ``torch.optim`` is replaced while the redirect is on."""
    # In torch 2.6 AdamW, which Megatron uses, does not derive from Adam.
    adam, adam_w = torch.optim.Adam, torch.optim.AdamW
    owners: list[Any] = [adam] if issubclass(adam_w, adam) else [adam, adam_w]
    # torch's load_state_dict() calls __setstate__.
    return [
        (owner, {"__init__": _as_fused(owner.__init__), "__setstate__": _keeping_states(owner.__setstate__)})
        for owner in owners
    ]
