"""Linear layers with tensor and sequence parallelism, and norms with statistics in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .base import LinearBase, ResettableModule, activation_dtype
from .refusals import check_options, is_at_least, refuse, require


def normalized(x: Tensor, weight: Any, bias: Any, eps: float, zero_centered: bool) -> Tensor:
    """Return the norm in the type of the weight or of autocast. It has no mean where there is no bias."""
    dtype = activation_dtype(weight.dtype)
    y, scale = x.to(dtype).float(), weight.to(dtype).float() + float(zero_centered)
    if bias is None:
        return functional.rms_norm(y, scale.shape, scale, eps).to(dtype)
    return functional.layer_norm(y, scale.shape, scale, bias.to(dtype).float(), eps).to(dtype)


class Linear(LinearBase):
    """A column or row parallel product, or a product on each rank by itself."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__("Linear", in_features, out_features, **options)
        self._add_product()
        self._initialize()

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        y, bias = self._product(self._prepared(inp), is_first_microbatch, mode=self.parallel_mode)
        return (y, bias) if self.return_bias else y


class LayerNormLinear(LinearBase):
    """A norm, and then a product."""

    return_layernorm_output = False  # adapters such as LoRA's set it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__("LayerNormLinear", in_features, out_features, **options)
        require((normalization in ("LayerNorm", "RMSNorm"), f"normalization is {normalization!r}"))
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.normalization = normalization
        self.layer_norm_bias: Any = None  # that of an RMSNorm
        self._add_norm("layer_norm_", in_features, normalization == "LayerNorm", zero_centered_gamma)
        self._add_product()
        self._initialize()

    def _mark(self, suffix: str = "") -> None:
        super()._mark()
        for name, parameter in self.named_parameters():
            if name.startswith("layer_norm"):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.return_layernorm_output:
            refuse("return_layernorm_output of LayerNormLinear")
        inp, weight = self._prepared(inp), self.layer_norm_weight
        normed = normalized(inp, weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        y, bias = self._product(normed, is_first_microbatch, mode=self.parallel_mode)
        return (y, bias) if self.return_bias else y


class GroupedLinear(LinearBase):
    """One product per group of rows. The layer does not communicate: the dispatcher of tokens does."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        # Megatron passes them only if it sees their names here.
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **options: Any,
    ) -> None:
        if single_grouped_weight or single_grouped_bias:
            refuse("single_grouped_weight or single_grouped_bias")
        super().__init__("GroupedLinear", in_features, out_features, **options)
        require((self.tp_size == 1 or not self.use_bias, "biases of groups need tp_size 1"))
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            self._add_product(str(index))
        self._initialize()

    def _mark(self, suffix: str = "") -> None:
        # Later releases set marks only if weights lie in one tensor (in the sources of v2.12 to v2.18).
        if not is_at_least("2.13"):
            for index in range(self.num_gemms):
                super()._mark(str(index))

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        """Multiply ``m_splits[i]`` rows with weight ``i``."""
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        require((len(sizes) == self.num_gemms, f"there are {len(sizes)} sizes for {self.num_gemms} weights"))
        rows = torch.split(self._prepared(inp).reshape(-1, inp.shape[-1]), sizes)
        by_expert = [self._product(part, is_first_microbatch, str(i)) for i, part in enumerate(rows)]
        y = torch.cat([part for part, _ in by_expert]).view(*inp.shape[:-1], self.out_features)
        return (y, [bias for _, bias in by_expert]) if self.return_bias else y


class _Norm(ResettableModule):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,  # as the first one was called
        **others: Any,
    ) -> None:
        check_options("Norm", others)
        require(
            ((normalized_shape is None) != (hidden_size is None), "pass normalized_shape or hidden_size"),
            (params_dtype is None or "dtype" not in others, "pass params_dtype or dtype"),
        )
        super().__init__(params_dtype or others.get("dtype"), others.get("device") or "cuda")
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        size: Any = hidden_size if normalized_shape is None else normalized_shape
        self._add_norm("", size, isinstance(self, LayerNorm), zero_centered_gamma)
        self._initialize()

    def _mark(self) -> None:
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        require((x.shape[-1:] == self.weight.shape, f"the shapes are {x.shape} and {self.weight.shape}"))
        return normalized(x, self.weight, getattr(self, "bias", None), self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """Normalize by mean and variance; there is a bias."""


class RMSNorm(_Norm):
    """Normalize by the root mean square; there is no bias."""
