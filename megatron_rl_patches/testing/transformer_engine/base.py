"""What linear layers and attention share: options, parameters and their attributes, gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import communication
from .refusals import refuse


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Arguments of the linear layers, named as in TransformerEngine."""

    sequence_parallel: bool = False
    fuse_wgrad_accumulation: bool = False
    tp_group: Any = None
    tp_size: int = 1
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None
    init_method: Callable[[Tensor], Any] | None = None
    bias: bool = True
    return_bias: bool = False
    params_dtype: torch.dtype | None = None
    parallel_mode: str | None = None
    device: Any = "cuda"
    ub_name: str | None = None
    delay_wgrad_compute: bool = False
    symmetric_ar_type: str | None = None
    save_original_input: bool = False
    single_grouped_weight: bool = False
    single_grouped_bias: bool = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> LinearOptions:
        """Check the arguments. Userbuffers (``ub_…``) are accepted, as they do not change results."""
        known = {field.name for field in fields(cls)}
        made = cls(**{k: v for k, v in options.items() if k in known or not k.startswith("ub_")})
        refused = ("delay_wgrad_compute", "symmetric_ar_type", "single_grouped_weight", "single_grouped_bias")
        for name in refused:
            if getattr(made, name):
                refuse(name)
        if made.parallel_mode not in ("row", "column", None):
            raise AssertionError(f"parallel_mode is {made.parallel_mode!r}; expected row, column or None")
        return made


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of layers. Megatron sets attributes before ``__init__``, which must keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.primary_weights_in_fp8 = False
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.tp_group: Any = None

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of tensor parallelism, which may come after the layer is made."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: there is no FP8."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        pass


class LinearBase(TransformerEngineBaseModule):
    """Base of layers that multiply with weights."""

    def __init__(self, in_features: int, out_features: int, options: LinearOptions) -> None:
        super().__init__()
        self._options = options
        self._initial: dict[str, tuple[Callable[[Tensor], Any], bool]] = {}
        self.parallel_mode, self.ub_name = options.parallel_mode, options.ub_name
        self.tp_size = options.tp_size if options.tp_group is None else options.tp_group.size()
        self.set_tensor_parallel_group(options.tp_group)
        self.in_features = in_features // (self.tp_size if self.parallel_mode == "row" else 1)
        self.out_features = out_features // (self.tp_size if self.parallel_mode == "column" else 1)
        self.sequence_parallel = self.tp_size > 1 and options.sequence_parallel
        self.fuse_wgrad_accumulation = options.fuse_wgrad_accumulation
        self.use_bias, self.return_bias = options.bias, options.return_bias
        self.apply_bias = options.bias and not options.return_bias

    def _add_parameter(
        self, name: str, shape: tuple[int, ...], init: Callable[[Tensor], Any], tracked: bool = False
    ) -> None:
        options = self._options
        empty = torch.empty(shape, dtype=options.params_dtype, device=options.device)
        setattr(self, name, Parameter(empty))
        self._initial[name] = init, tracked

    def _add_product(self, suffix: str = "") -> None:
        """Add a weight and a bias. Without a bias the real layers have an empty tensor of that name."""
        init = self._options.init_method or _default_init
        self._add_parameter(f"weight{suffix}", (self.out_features, self.in_features), init, tracked=True)
        if self.use_bias:
            self._add_parameter(f"bias{suffix}", (self.out_features,), torch.nn.init.zeros_)
        else:
            setattr(self, f"bias{suffix}", torch.empty(0, dtype=self._options.params_dtype))

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize parameters, weights with the state of the tracker of random numbers, and mark them."""
        tracker = self._options.get_rng_state_tracker
        names = [self._options.rng_tracker_name] if self._options.rng_tracker_name else []
        for name, (init, tracked) in self._initial.items():
            context = tracker().fork(*names) if tracked and tracker is not None else nullcontext()
            with context, torch.no_grad():
                init(getattr(self, name))
        self._mark()

    def _mark(self) -> None:
        self._mark_product()

    def _mark_product(self, suffix: str = "") -> None:
        # Also if the weight is whole on each rank: the mode is None for "duplicated" layers and for experts.
        _mark_tensor_parallel(getattr(self, f"weight{suffix}"), 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            getattr(self, f"bias{suffix}").sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark_tensor_parallel(getattr(self, f"bias{suffix}"), 0)

    def _product(self, x: Tensor, suffix: str = "", mode: str | None = None) -> Tensor:
        group = self.tp_group if self.tp_size > 1 else None
        if group is not None and mode == "column":
            x = communication.enter_column(x, group, self.sequence_parallel)
        weight = getattr(self, f"weight{suffix}")
        y: Tensor = _Product.apply(x, weight, self.fuse_wgrad_accumulation)  # type: ignore[no-untyped-call]
        if group is not None and mode == "row":
            y = communication.leave_row(y, group, self.sequence_parallel)
        return y + getattr(self, f"bias{suffix}") if self.apply_bias else y


class _Product(torch.autograd.Function):
    """``x @ weight.T``; the gradient of the weight may go into its ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuse: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fuse = weight, fuse  # main_grad belongs to this very object
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if not ctx.fuse:
            return grad_x, grad.flatten(0, -2).t() @ x.flatten(0, -2), None
        add_to_main_grad(x, grad, ctx.weight.main_grad)
        dummy = None
        if hasattr(ctx.weight, "grad_added_to_main_grad"):
            ctx.weight.grad_added_to_main_grad = True  # and the hooks of DDP still want a gradient
            dummy = get_dummy_wgrad(list(weight.shape), weight.dtype)
        return grad_x, dummy, None


def add_to_main_grad(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add the gradient of a weight, from the input and the gradient of the output of its product."""
    main_grad.add_(grad.flatten(0, -2).to(main_grad.dtype).t() @ x.flatten(0, -2).to(main_grad.dtype))


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a gradient that nobody reads, as the true one is in ``main_grad``."""
    return torch.zeros(shape, dtype=dtype)


def _default_init(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


def _mark_tensor_parallel(parameter: Any, dim: int) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
