"""What layers share: ranks, parameters and their marks, gradients of weights.

Sequences lie along the first dimension. Communication is Megatron's, which must not be imported before the
stand-in is in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .refusals import check_options, require


def positions_of(rank: int, size: int, rows: int) -> Tensor:
    """Return the positions of a rank's rows: a piece from either end, as Megatron cuts sequences."""
    if size == 1:
        return torch.arange(rows)
    require((rows % 2 == 0, f"{rows} rows on a rank, which are not two pieces of the same length"))
    pieces = torch.arange(rows * size).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def enter(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return all of a sequence, of which each rank has a part or all; gradients are sums over the ranks."""
    from megatron.core.tensor_parallel import mappings as m

    gather, copy = m.gather_from_sequence_parallel_region, m.copy_to_tensor_model_parallel_region
    return (gather if is_split else copy)(x, group=group)


def leave(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return the sum over the ranks: a rank's part of the sequence, or all of it."""
    from megatron.core.tensor_parallel import mappings as m

    scatter, reduce = m.reduce_scatter_to_sequence_parallel_region, m.reduce_from_tensor_model_parallel_region
    return (scatter if is_split else reduce)(x, group=group)


def activation_dtype(default: torch.dtype) -> torch.dtype:
    """Return the precision of results: that of autocast where it is on."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else default


class ResettableModule(torch.nn.Module):
    """Base of layers, whose parameters are initialized and marked by ``reset_parameters()``."""

    def __init__(self, dtype: torch.dtype | None = None, device: Any = "cuda") -> None:
        super().__init__()
        self._dtype, self._device = dtype, device
        # Name of a parameter -> how it is initialized, and in which context.
        self._initial: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Any]]] = {}

    def _add_parameter(self, name: str, init: Any, *shape: int, context: Any = nullcontext) -> None:
        setattr(self, name, Parameter(torch.empty(shape, dtype=self._dtype, device=self._device)))
        self._initial[name] = init, context

    def _add_norm(self, prefix: str, size: int, has_bias: bool, zero_centered: bool) -> None:
        init = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
        self._add_parameter(f"{prefix}weight", init, size)
        if has_bias:
            self._add_parameter(f"{prefix}bias", torch.nn.init.zeros_, size)

    def _initialize(self) -> None:
        """Initialize new parameters; those on the device ``meta`` get neither values nor marks yet."""
        self.reset_parameters(defer_init=any(parameter.is_meta for parameter in self.parameters()))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize and mark parameters; those on the device ``meta`` are replaced by real ones."""
        if defer_init:
            return
        for name, (init, context) in self._initial.items():
            if getattr(self, name).is_meta:
                setattr(self, name, Parameter(torch.empty_like(getattr(self, name), device="cuda")))
            with context(), torch.no_grad():
                init(getattr(self, name))
        self._mark()

    def _mark(self) -> None:
        """Set attributes of parameters."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class TransformerEngineBaseModule(ResettableModule):
    """Base of layers with products. Megatron sets attributes before ``__init__``, which must keep them."""

    def __init__(self, tp_size: int, tp_group: Any, *of_parameters: Any) -> None:
        super().__init__(*of_parameters)
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.primary_weights_in_fp8 = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of tensor parallelism, which may come after the layer is made."""
        self.tp_group = tp_group

    def _check_group(self) -> None:
        unset = f"tp_size is {self.tp_size}, and set_tensor_parallel_group() was not called"
        require((self.tp_size == 1 or self.tp_group is not None, unset))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there is no FP8."""


class LinearBase(TransformerEngineBaseModule):
    """Base of layers that multiply with weights."""

    def __init__(
        self,
        owner: str,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **others: Any,
    ) -> None:
        super().__init__(tp_size, tp_group, params_dtype, device)
        check_options(owner, others)
        self.parallel_mode, self._tracker = parallel_mode, get_rng_state_tracker
        self._init_method = init_method or partial(torch.nn.init.normal_, std=0.023)
        self._tracker_names = [name] if (name := others.get("rng_tracker_name")) else []
        divided = {"row": in_features, "column": out_features}.get(parallel_mode or "", 0)
        require(
            (parallel_mode in ("column", "row", None), f"parallel_mode is {parallel_mode!r}"),
            (divided % self.tp_size == 0, f"{divided} features are not divisible by {self.tp_size} ranks"),
        )
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias

    def _fork(self) -> Any:
        return nullcontext() if self._tracker is None else self._tracker().fork(*self._tracker_names)

    def _add_product(self, suffix: str = "") -> None:
        """Add a weight and a bias. Without a bias the real layers have an empty tensor of that name."""
        shape = self.out_features, self.in_features
        self._add_parameter(f"weight{suffix}", self._init_method, *shape, context=self._fork)
        if self.use_bias:
            self._add_parameter(f"bias{suffix}", torch.nn.init.zeros_, self.out_features)
        else:
            setattr(self, f"bias{suffix}", torch.empty(0, dtype=self._dtype))

    def _mark(self, suffix: str = "") -> None:
        # Also if the weight is whole on each rank: the mode is None for "duplicated" layers and for experts.
        _mark_tensor_parallel(getattr(self, f"weight{suffix}"), 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            getattr(self, f"bias{suffix}").sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark_tensor_parallel(getattr(self, f"bias{suffix}"), 0)

    def _prepared(self, x: Tensor) -> Tensor:
        """Return the input of a call in the precision of its products."""
        self._check_group()
        wrong = f"the input has {x.shape[-1]} features, not {self.in_features}"
        require((x.shape[-1] == self.in_features, wrong))
        for name, parameter in () if torch.is_autocast_enabled() else self.named_parameters():
            require((parameter.dtype == x.dtype, f"the input is {x.dtype}, and {name} is {parameter.dtype}"))
        return x.to(activation_dtype(x.dtype))

    def _product(self, x: Tensor, is_first: bool | None, suffix: str = "", mode: str | None = None) -> Any:
        """Return the product, with the bias unless that is returned by the layer, and the bias."""
        if self.tp_size > 1 and mode == "column":
            x = enter(x, self.tp_group, self.sequence_parallel)
        weight, fuse = getattr(self, f"weight{suffix}"), self.fuse_wgrad_accumulation
        y: Tensor = _Product.apply(x, weight, fuse, is_first)  # type: ignore[no-untyped-call]
        if self.tp_size > 1 and mode == "row":
            y = leave(y, self.tp_group, self.sequence_parallel)
        bias = getattr(self, f"bias{suffix}").to(y.dtype)
        return y + bias if self.apply_bias else y, bias


class _Product(torch.autograd.Function):
    """``x @ weight.T``. The gradient of the weight may be added to its ``main_grad``, or overwrite it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuse: bool, is_first: bool | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fuse, ctx.is_first = weight, fuse, is_first  # main_grad belongs to this very object
        return x @ weight.to(x.dtype).t()

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1] and not ctx.fuse:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        elif ctx.needs_input_grad[1]:
            if ctx.is_first or getattr(ctx.weight, "overwrite_main_grad", False):
                ctx.weight.main_grad.zero_()
            add_to_main_grad(x, grad, ctx.weight.main_grad)
            if hasattr(ctx.weight, "grad_added_to_main_grad"):
                ctx.weight.grad_added_to_main_grad = True  # and the hooks of DDP still want a gradient
                grad_weight = get_dummy_wgrad(list(weight.shape), weight.dtype)
        return grad_x, grad_weight, None, None


def add_to_main_grad(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add the gradient of a weight, from the input and the gradient of the output of its product."""
    main_grad.add_(grad.flatten(0, -2).to(main_grad.dtype).t() @ x.flatten(0, -2).to(main_grad.dtype))


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a gradient that nobody reads, as the true one is in ``main_grad``."""
    return torch.zeros(shape, dtype=dtype)


def _mark_tensor_parallel(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
