"""``LayerNorm`` and ``RMSNorm``, with statistics in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import ResettableModule


def normalized(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Return the norm in the type of ``weight``: of the root mean square where there is no bias."""
    y = x.to(weight.dtype).float()
    if bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + float(zero_centered))
    return (y if bias is None else y + bias.float()).to(weight.dtype)


def scale_init(zero_centered: bool) -> Any:
    """Return how the weight of a norm is initialized."""
    return torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_


class _Norm(ResettableModule):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        hidden_size: int | None = None,  # as the first one was called
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params_dtype or dtype, device)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        size: Any = hidden_size if normalized_shape is None else normalized_shape
        self._add_parameter("weight", scale_init(zero_centered_gamma), size)
        if isinstance(self, LayerNorm):
            self._add_parameter("bias", torch.nn.init.zeros_, size)
        self._initialize()

    def _mark(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return normalized(x, weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """Normalize by mean and variance; there is a bias."""


class RMSNorm(_Norm):
    """Normalize by the root mean square; there is no bias."""
