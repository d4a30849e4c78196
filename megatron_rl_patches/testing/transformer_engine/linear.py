"""``Linear``, ``LayerNormLinear`` and ``GroupedLinear``, with tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import version
from .base import LinearBase
from .norms import normalized, scale_init
from .refusals import refuse

#: From this release on, weights of grouped experts carry no mark of tensor parallelism: it sets marks only if
#: they lie in one tensor (read in TransformerEngine's source, tags v2.12 to v2.18).
GROUPED_UNMARKED_SINCE = "2.13"


class Linear(LinearBase):
    """A column or row parallel product, or a product on each rank by itself."""

    def __init__(
        self, in_features: int, out_features: int, save_original_input: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.save_original_input = save_original_input
        self._add_product()
        self._initialize()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        y = self._product(inp, mode=self.parallel_mode)
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(LinearBase):
    """A norm, and then a product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.normalization, self.return_layernorm_output = normalization, return_layernorm_output
        self._add_parameter("layer_norm_weight", scale_init(zero_centered_gamma), in_features)
        if normalization == "LayerNorm":
            self._add_parameter("layer_norm_bias", torch.nn.init.zeros_, in_features)
        else:
            self.layer_norm_bias = None
        self._add_product()
        self._initialize()

    def _mark(self, suffix: str = "") -> None:
        super()._mark()
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight: Any = self.layer_norm_weight
        normed = normalized(inp, weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        results = [self._product(normed, mode=self.parallel_mode)]
        results += [self.bias] if self.return_bias else []  # type: ignore[list-item]
        results += [normed] if self.return_layernorm_output else []
        return results[0] if len(results) == 1 else tuple(results)


class GroupedLinear(LinearBase):
    """One product per group of rows. The layer does not communicate: the dispatcher of tokens does."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        save_original_input: bool = False,
        # Megatron passes them only if it sees their names here.
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **options: Any,
    ) -> None:
        if single_grouped_weight or single_grouped_bias:
            refuse("single_grouped_weight or single_grouped_bias")
        super().__init__(in_features, out_features, **options)
        self.num_gemms, self.save_original_input = num_gemms, save_original_input
        for index in range(num_gemms):
            self._add_product(str(index))
        self._initialize()

    def _mark(self, suffix: str = "") -> None:
        if not version.is_at_least(GROUPED_UNMARKED_SINCE):
            for index in range(self.num_gemms):
                super()._mark(str(index))

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        """Multiply ``m_splits[i]`` rows with weight ``i``."""
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        rows = torch.split(inp.reshape(-1, inp.shape[-1]), sizes)
        by_expert = zip(rows, range(self.num_gemms), strict=True)
        y = torch.cat([self._product(part, str(index)) for part, index in by_expert])
        y = y.view(*inp.shape[:-1], self.out_features)
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)]
        return (y, biases) if self.return_bias else y
