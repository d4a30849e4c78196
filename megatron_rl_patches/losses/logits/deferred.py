"""Logits that are computed when code reads their values, which the losses of this package never do."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...common.devices import on_device
from ...errors import InvalidInputError
from .autograd import Tensors, gather_sequence, gradients_of_inputs, save_source, sum_gradient
from .deferred_contents import Contents, LazyValues, Origin
from .options import DEFAULT, VocabParallelOptions, check_floats, check_group
from .rows import Inputs
from .slices import RowIndex, as_slices
from .tiles import KeepBytes, OutputLayerRows, SumOfLogits, TileOptions, largest_logits

aten = torch.ops.aten
_PACKAGE = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_log = logging.getLogger(__name__)
_warned: set[tuple[str, str, int]] = set()


def deferred_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tile_bytes: int | None = None,
    keep_bytes: KeepBytes = 0,
) -> DeferredLogits:
    """Return the logits ``hidden @ weight.T + bias`` without computing them.

    The functions of :mod:`megatron_rl_patches.losses` that take logits take these, and compute them in tiles
    that they forget; see :class:`DeferredLogits` for what other code sees.

    Args:
        hidden: ``[..., h]``, what the output layer would get: with ``sequence_parallel`` this rank's part of
            the first dimension.
        weight: ``[V / tp, h]``, in the dtype of ``hidden``: this rank's rows of the output layer. It may be
            frozen, and it may be that of the embedding. Where nothing has a gradient it may stay in host
            memory, from where the losses bring one tile's part at a time to the device of ``hidden``.
        bias: ``[V / tp]``, where the weight is.
        tp_group: ranks that hold the other rows of the weight. The gradient of ``hidden`` is summed over
            them; the losses need the group as well.
        sequence_parallel: ``hidden`` is split over ``tp_group``: it is gathered here, and its gradient is
            reduce-scattered.
        tile_bytes: how much memory the logits of one tile take. Default: 64 MiB on a CPU, 512 MiB on a GPU.
        keep_bytes: how much memory forward may fill with logits, which backward then need not compute again:
            with all of them it multiplies three times instead of four. ``"auto"`` takes half of what is free
            on a GPU at the first backward of the process, and never more later; before that, and on a CPU,
            it takes nothing.

    Returns:
        Logits ``[..., V / tp]`` in the dtype of ``hidden``, of whole sequences. What is computed from them
        has gradients for ``hidden``, ``weight`` and ``bias``; those of bfloat16 and float16 are accumulated
        in float32. Without an NVIDIA GPU and torch 2.8, what a tile adds to that of ``hidden`` is rounded
        to bfloat16 first.

    Raises:
        InvalidInputError: arguments do not fit; before any communication, on every rank alike.
    """
    check_floats(hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or len(weight) == 0:
        raise InvalidInputError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, expected [..., h] and "
            "[vocab / tp, h]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias is {list(bias.shape)}, expected {list(weight.shape[:1])}")
    inputs = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    has_gradient = hidden.requires_grad or any(tensor.requires_grad for tensor in inputs.values())
    for name, tensor in inputs.items():
        may_differ = not has_gradient and not tensor.is_meta
        if tensor.dtype != hidden.dtype or (not may_differ and tensor.device != hidden.device):
            raise InvalidInputError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected {hidden.dtype} on {hidden.device} as "
                "hidden is; another device is possible where nothing requires a gradient"
            )
    check_group(tp_group)
    if sequence_parallel and tp_group is None:
        raise InvalidInputError("sequence_parallel is True without tp_group: pass the group it is split over")
    tiling = TileOptions(tile_bytes, keep_bytes)
    whole = gather_sequence(hidden, tp_group) if sequence_parallel else sum_gradient(hidden, tp_group)

    def product() -> Tensor:
        own_bias = None if bias is None else bias.to(whole.device)
        return torch.nn.functional.linear(whole, weight.to(whole.device), own_bias)

    return defer(whole, weight, bias, tiling, product)


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tiling: TileOptions, layer: Callable[[], Tensor]
) -> DeferredLogits:
    """Return :class:`DeferredLogits` of whole sequences.

    Args:
        hidden: ``[..., h]``, whose gradient needs no further reduction.
        layer: computes the logits ``[..., V / tp]`` with a graph, for code that reads them.
    """
    hidden_th = hidden.flatten(0, -2)
    rows = OutputLayerRows(hidden_th, weight, bias, slice(0, len(hidden_th)), tiling)
    shape = torch.Size((*hidden.shape[:-1], len(weight)))
    origin = Origin(rows, shape, hidden.dtype, layer)
    logits: DeferredLogits = _Defer.apply(origin, *rows.inputs)  # type: ignore[no-untyped-call]
    # Without grad mode they have no graph. They may get that of an autograd function of other code later.
    logits._has_gradient = logits._contents.has_graph = logits.requires_grad
    return logits


def dense(logits: Tensor, *, to_write: bool = True) -> Tensor:
    """Return ordinary logits: deferred ones are computed, without a warning, and others returned.

    Args:
        to_write: the returned tensor may be written to.
    """
    if isinstance(logits, DeferredLogits):
        if to_write:
            logits._contents.share(writes=False, counts=False)
        return cast("Tensor", _ToDense.apply(logits))  # type: ignore[no-untyped-call]
    return logits


def hide_columns(logits: Tensor, start: int) -> Tensor:
    """Set the columns from ``start`` on to -inf, so that their tokens have probability zero; without a graph.

    Ordinary logits are overwritten. Deferred ones stay deferred.
    """
    if not isinstance(logits, DeferredLogits) or not logits.is_deferred:
        logits[..., start:] = float("-inf")
        return logits
    old, lazy = logits._contents, logits._contents.lazy
    layer = old.origin.all_rows
    bias = layer.weight.new_zeros(layer.width) if layer.bias is None else layer.bias.detach().clone()
    bias[start:] = float("-inf")

    def hidden() -> Tensor:
        values = lazy.get().clone()
        values[..., start:] = float("-inf")
        return values

    origin = replace(old.origin, all_rows=replace(layer, bias=bias).detached())
    contents = Contents(origin, old.rows, old.dtype, old.divisor, LazyValues(origin, hidden))
    lazy.copies.add(contents.lazy)
    return DeferredLogits(contents, logits._positions)


class DeferredLogits(Tensor):
    """Logits that have a shape, a dtype and a device, and no values until some code reads them.

    They stay deferred where rows are selected, reordered or concatenated, where they are converted to
    float32, and where they are divided by a number. Functions of :mod:`megatron_rl_patches.losses` compute
    what they need from hidden states and weight; so do the sum of all and the largest of each row. Any other
    operation that reads values materializes the logits: once, by the output layer's own code, with a warning
    that names the operation and the line that called it. All views of them share these values, and what is
    written there is what losses read. A division materializes 16-bit logits, too: its quotient is rounded.

    Attributes:
        divisor: what the logits have been divided by.
        followed: for operations whose result is deferred, functions that compute it, or return ``None``.
    """

    followed: ClassVar[dict[Any, Callable[..., Any]]] = {}
    _contents: Contents
    _positions: Tensor  # int64, in the shape of this tensor without its last dimension
    _has_gradient: bool

    @staticmethod
    def __new__(cls, contents: Contents, positions: Tensor, has_gradient: bool = False) -> DeferredLogits:
        origin = contents.origin
        width = origin.shape[-1]
        # It takes requires_grad from autograd, as the output of an operation.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*positions.shape, width),
            strides=(*(stride * width for stride in positions.stride()), 1),
            storage_offset=positions.storage_offset() * width,
            dtype=contents.dtype,
            device=origin.all_rows.device,
        )
        self._contents, self._positions, self._has_gradient = contents, positions, has_gradient
        return self

    @property
    def divisor(self) -> float:
        return self._contents.divisor

    @property
    def origin(self) -> Origin:
        """What these logits are rows of; views, slices and copies have the same."""
        return self._contents.origin

    @property
    def is_deferred(self) -> bool:
        """Whether a loss may compute values and gradients in tiles, without these logits and their graph.

        This is so as long as no code has written to the values, no hook waits for the gradient of the logits,
        and only operations whose gradient this class knows lie between the output layer and these logits. It
        does not depend on who has read the values: ranks that differ in that compute alike.
        """
        if not self.are_rows or self.origin.has_hooks:
            return False
        return self.has_gradient_of_rows or not (self.requires_grad and torch.is_grad_enabled())

    @property
    def are_rows(self) -> bool:
        """Whether the values are rows of the origin's logits, divided by the divisor.

        They are until somebody writes to them. Autograd counts every write as a version, also one by way of a
        view, and a division in place counts, too.
        """
        if not self._contents.are_rows or not self.origin.is_unchanged:
            return False
        return self.is_inference() or self._version == self._contents.num_divisions

    @property
    def has_gradient_of_rows(self) -> bool:
        """Whether the gradient of these logits is that of their rows of the output layer's logits.

        A leaf, and the output of an autograd function of other code, have gradients of their own.
        """
        if not self._has_gradient or not self.requires_grad or self.is_leaf:
            return False
        # If other code's function returns logits that have a graph, autograd puts its own in place of that.
        return getattr(type(self.grad_fn), "_forward_cls", _Defer) is _Defer

    def hidden_states(self) -> Tensor:
        """Return what the output layer gets for these logits, ``[..., h]``, without a graph."""
        layer = self.origin.all_rows
        return layer.hidden.detach()[on_device(self.row_numbers, layer.device)]

    @property
    def row_numbers(self) -> Tensor:
        """Which rows of the origin's logits these are: int64, in their shape without the last dimension."""
        rows = self._contents.rows
        return self._positions if rows is None else rows[self._positions]

    def source(
        self, index: RowIndex = slice(None), options: VocabParallelOptions = DEFAULT
    ) -> OutputLayerRows:
        """Return rows of these logits for the functions that read tiles; they count as ``[T, V / tp]``."""
        origin, rows = self.origin, self.row_numbers.flatten()
        origin.check_unchanged()
        if isinstance(index, tuple):
            index = torch.cat([torch.arange(run.start, run.stop) for run in index])
        if isinstance(index, Tensor):
            rows = on_device(rows, index.device)
        numbers = rows[index]
        selected = as_slices(numbers)
        selected = selected if isinstance(selected, slice) else on_device(numbers, self.device)
        source = origin.all_rows.select(selected, options)
        if not self.requires_grad:
            return source.detached()
        if torch.is_grad_enabled():
            origin.has_losses = True
            source = source.keeping_tiles(True)
        return source

    # --- operations

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if compute := _COMPUTED_IN_TILES.get(func):
            result = compute(*args, **kwargs)
            if result is not None:
                return result
        if func in (Tensor.register_hook, Tensor.retain_grad):
            args[0]._wait_for_gradient(func.__name__)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # which counts writes, as data does not
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise InvalidInputError(
                "the data of deferred logits was set: write to the logits, logits[:] = data"
            )
        # Results are of this class only if __torch_dispatch__ returns one, not because an argument is.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if follow := cls.followed.get(func):
            operands = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            # Logits that have been written to are followed, too. So their divisor stays known, as it does on
            # other ranks, which may have written nothing.
            if all(isinstance(operand, DeferredLogits) for operand in operands):
                result = follow(func, *args, **kwargs)
                if result is not None:
                    return result
        else:
            # Under inference mode operations such as reshape arrive here whole.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
            raise InvalidInputError(
                f"{func} was called, and deferred logits keep their shape and their memory: call an "
                "operation that returns another tensor, such as view or transpose"
            )
        writes = func._schema.is_mutable
        aliases = writes or any(result.alias_info for result in func._schema.returns)
        materialized: dict[int, DeferredLogits] = {}

        def materialize(logits: DeferredLogits) -> Tensor:
            logits._warn(str(func))
            if aliases:
                logits._contents.share(writes=writes)
            values = logits._as_of_now()()
            materialized[id(values)] = logits
            return values

        args, kwargs = tree_map_only(DeferredLogits, materialize, (args, kwargs))
        result = func(*args, **kwargs)
        # An operation in place returns what it was given.
        return tree_map_only(Tensor, lambda t: materialized.get(id(t), t), result) if writes else result

    def _warn(self, operation: str) -> None:
        """Warn if an operation is the first to read the values."""
        if self._contents.values is None:
            _warn(operation, self)

    def _as_of_now(self) -> Callable[[], Tensor]:
        """Return a function that returns the values, as they are now, as a view of the contents."""
        lazy, shape, width = self._contents.lazy, self.shape, self.shape[-1]
        strides = [stride * width for stride in self._positions.stride()]
        offset = self._positions.storage_offset() * width

        def values() -> Tensor:
            contents = lazy.get()
            return contents.as_strided(shape, (*strides, 1), contents.storage_offset() + offset)

        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "deferred" if self._contents.values is None else "materialized"
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, device={self.device}, {state})"

    # The following read the storage, which logits without values do not have. They are methods, since hooks
    # of saved tensors call them where __torch_function__ is switched off.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain("pickling", to_write=False).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self._plain("copy.deepcopy", to_write=False).__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        return self._plain("data_ptr").data_ptr()

    def untyped_storage(self) -> Any:
        return self._plain("untyped_storage").untyped_storage()

    def tolist(self) -> Any:
        return self._plain("tolist", to_write=False).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain("numpy").numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._plain("__dlpack__").__dlpack__(**options)

    def _plain(self, operation: str, to_write: bool = True) -> Tensor:
        self._warn(operation)
        return dense(self, to_write=to_write)

    def _wait_for_gradient(self, name: str) -> None:
        if self.origin.has_losses:
            raise InvalidInputError(
                f"{name} was called on deferred logits after a loss of them had been computed, and the "
                f"gradient of that loss does not pass through them: call {name} before the loss"
            )
        self.origin.has_hooks = True


class _Defer(torch.autograd.Function):
    """Makes deferred logits a function of hidden states, weight and bias.

    Its backward gets only gradients of code that read the logits; losses in tiles compute theirs themselves.
    """

    @staticmethod
    def forward(ctx: Any, origin: Origin, *inputs: Tensor | None) -> DeferredLogits:
        save_source(ctx, origin.all_rows, {})
        positions = torch.arange(origin.shape[:-1].numel()).view(origin.shape[:-1])
        return DeferredLogits(
            Contents(origin, None, origin.dtype, 1.0, LazyValues(origin, origin.values)), positions
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *gradients_of_inputs(ctx, _gradients_of_logits, 1, gradient.flatten(0, -2))


def _gradients_of_logits(
    layer: OutputLayerRows, saved: Tensors, needed: Sequence[bool], gradient: Tensor
) -> Inputs:
    return layer.gradients_of(gradient, needed)


class _ToDense(torch.autograd.Function):
    """Returns the values as an ordinary tensor, in the same memory, whose gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        return logits._as_of_now()()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _sum(input: Any, *others: Any, **options: Any) -> Tensor | None:
    """Return the sum of all logits; ``None`` for any other call. Some losses multiply it by zero."""
    if not isinstance(input, DeferredLogits) or others or options or not input.is_deferred:
        return None
    (total,) = SumOfLogits().apply(input.source())
    return (total / input.divisor).to(input.dtype)


def _largest(input: Any, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
    """Return the largest logit of each row without a gradient; ``None`` for any other call."""
    if not isinstance(input, DeferredLogits) or (input.requires_grad and torch.is_grad_enabled()):
        return None
    is_of_rows = type(dim) is int and dim in (-1, input.dim() - 1) and not keepdim and not others
    if not is_of_rows or not input.is_deferred:
        return None
    of_rows = largest_logits(input.source())
    values, indices = (largest.view(input.shape[:-1]) for largest in of_rows)
    return torch.return_types.max((values.to(input.dtype) / input.divisor, indices))


def _argmax(*args: Any, **kwargs: Any) -> Tensor | None:
    largest = _largest(*args, **kwargs)
    return None if largest is None else largest.indices


_COMPUTED_IN_TILES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((Tensor.sum, torch.sum), _sum),
    **dict.fromkeys((Tensor.max, torch.max), _largest),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}


def _warn(operation: str, logits: DeferredLogits) -> None:
    """Warn, once for each line of code, that an operation materializes the logits."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    place = operation, frame.f_code.co_filename, frame.f_lineno
    if place not in _warned:
        _warned.add(place)
        message = "%s at %s:%d looks at deferred logits %s, which were materialized"
        _log.warning(message, *place, list(logits.shape))


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, _TORCH, "<")) or Path(file).parent == Path(copy.__file__).parent
