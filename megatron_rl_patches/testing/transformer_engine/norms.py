"""``LayerNorm`` and ``RMSNorm``, with statistics in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def normalized(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """Return the norm in the type of ``x``: of the root mean square where there is no bias."""
    y = x.float()
    if bias is not None:
        y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + float(zero_centered))
    return (y if bias is None else y + bias.float()).to(x.dtype)


class _Norm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        hidden_size: int | None = None,  # as the first one was called
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma, self.sequence_parallel = (
            eps,
            zero_centered_gamma,
            sequence_parallel,
        )
        size = hidden_size if normalized_shape is None else normalized_shape
        if size is None:
            raise TypeError("normalized_shape is missing")
        self.weight = Parameter(torch.empty(size, dtype=params_dtype, device=device))
        if isinstance(self, LayerNorm):
            self.bias = Parameter(torch.empty_like(self.weight))
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0 - float(self.zero_centered_gamma))
            if isinstance(self, LayerNorm):
                self.bias.zero_()
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def get_extra_state(self) -> Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return normalized(x, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """Normalize by mean and variance; there is a bias."""


class RMSNorm(_Norm):
    """Normalize by the root mean square; there is no bias."""
