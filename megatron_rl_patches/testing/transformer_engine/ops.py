"""Activations (``use_te_activation_func``). What fuses operations is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from .base import activation_dtype
from .refusals import refuse


class FusibleOperation(torch.nn.Module):
    """Base of operations."""


class Sequential(torch.nn.Module):
    """Fuses operations in the real one."""

    def __init__(self, *operations: Any, **named: Any) -> None:
        refuse("fused operations (use_transformer_engine_op_fuser)")


class _Activation(FusibleOperation):
    function: Callable[[Tensor], Tensor]
    gated: bool

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(activation_dtype(x.dtype))
        if not self.gated:
            return self.function(x)
        first, second = x.chunk(2, -1)
        return self.function(first) * second


_PLAIN: dict[str, Any] = {"ReLU": relu, "GELU": partial(gelu, approximate="tanh"), "SiLU": silu}
_GATED = {"ReGLU": relu, "GEGLU": _PLAIN["GELU"], "SwiGLU": silu}
ACTIVATIONS = {
    name: type(name, (_Activation,), {"function": staticmethod(function), "gated": name in _GATED})
    for name, function in {**_PLAIN, **_GATED}.items()
}
