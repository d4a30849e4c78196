"""Logits that are computed when code reads their values, which the losses of this package never do."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...errors import InvalidInputError
from .autograd import once_differentiable
from .deferred_contents import Contents, Head, comes_from
from .deferred_operations import FOLLOWED
from .head import HeadLogits, TileOptions, largest_logits, sum_of_logits
from .options import check_group
from .sequence_parallel import gather_sequence, sum_gradient

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
    keep_bytes: int = 0,
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
        keep_bytes: how much memory forward may fill with logits that backward then need not compute again.

    Returns:
        Logits ``[..., V / tp]`` in the dtype of ``hidden``, of whole sequences. What is computed from them
        has gradients for ``hidden``, ``weight`` and ``bias``; those of bfloat16 and float16 are accumulated
        in float32. Without a GPU and torch 2.8, what a tile adds to that of ``hidden`` is rounded to
        bfloat16 first.

    Raises:
        InvalidInputError: arguments do not fit; before any communication, on every rank alike.
    """
    options = TileOptions(tile_bytes, keep_bytes)
    _check(hidden, weight, bias, tp_group, sequence_parallel, options)
    whole = gather_sequence(hidden, tp_group) if sequence_parallel else sum_gradient(hidden, tp_group)

    def product() -> Tensor:
        own_bias = None if bias is None else bias.to(whole.device)
        return torch.nn.functional.linear(whole, weight.to(whole.device), own_bias)

    return defer(whole, weight, bias, options, product)


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    options: TileOptions,
) -> None:
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
        if tensor.dtype != hidden.dtype or (has_gradient and tensor.device != hidden.device):
            raise InvalidInputError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected {hidden.dtype} on {hidden.device} as "
                "hidden is; another device is possible where nothing requires a gradient"
            )
    check_group(tp_group)
    if sequence_parallel and tp_group is None:
        raise InvalidInputError("sequence_parallel is True without tp_group: pass the group it is split over")
    for name in ("tile_bytes", "keep_bytes"):
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < (name == "tile_bytes")):
            raise InvalidInputError(f"{name} is {value!r}, expected a number of bytes")


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: TileOptions, layer: Callable[[], Tensor]
) -> DeferredLogits:
    """Return :class:`DeferredLogits` of whole sequences.

    Args:
        hidden: ``[..., h]``, whose gradient needs no further reduction.
        layer: computes the logits ``[..., V / tp]`` with a graph, for code that reads them.
    """
    head = Head(hidden, weight, bias, options, layer)
    logits = cast("DeferredLogits", _Defer.apply(head, hidden, weight, bias))  # type: ignore[no-untyped-call]
    logits._contents.has_graph = logits.requires_grad
    return logits


def dense(logits: Tensor) -> Tensor:
    """Return ordinary logits: deferred ones are computed, without a warning, and others returned."""
    if isinstance(logits, DeferredLogits):
        logits._contents.before_write()  # the caller may write to the returned tensor
        return cast("Tensor", _ToDense.apply(logits))  # type: ignore[no-untyped-call]
    return logits


def hide_columns(logits: Tensor, start: int) -> Tensor:
    """Set the columns from ``start`` on to -inf, so that their tokens have probability zero; without a graph.

    Ordinary logits are overwritten. Deferred ones stay deferred.
    """
    if not isinstance(logits, DeferredLogits) or not logits.is_deferred:
        logits[..., start:] = float("-inf")
        return logits
    old = logits._contents
    zeros = old.head.weight.new_zeros(logits.shape[-1])
    bias = zeros if old.head.bias is None else old.head.bias.detach().clone()
    bias[start:] = float("-inf")
    head, lazy = replace(old.head, bias=bias), old.lazy
    hidden = torch.arange(start, logits.shape[-1], device=logits.device)
    contents = Contents(
        head, old.rows, old.dtype, old.divisor, lambda: lazy.get().index_fill(-1, hidden, float("-inf"))
    )
    lazy.copies.add(contents.lazy)
    return DeferredLogits(contents, logits._positions)


class DeferredLogits(Tensor):
    """Logits that have a shape, a dtype and a device, and no values until some code reads them.

    They stay deferred where rows are selected, reordered or concatenated, where they are converted to
    float32, and where they are divided by a number. Functions of :mod:`megatron_rl_patches.losses` compute
    what they need from hidden states and weight; so do the sum of all and the largest of each row. Any other
    operation that reads values makes the logits: once, by the output layer's own code, with a warning that
    names the operation and the line that called it. From then on they are ordinary logits, in the same memory
    for all views of them. A division makes logits of 16 bits too, since its quotient is rounded to 16 bits.

    Attributes:
        divisor: what the logits have been divided by.
    """

    _contents: Contents
    _positions: Tensor  # int64, in the shape of this tensor without its last dimension

    @staticmethod
    def __new__(cls, contents: Contents, positions: Tensor) -> DeferredLogits:
        head = contents.head
        width = len(head.weight)
        # It takes requires_grad from autograd, as the output of an operation.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*positions.shape, width),
            strides=(*(stride * width for stride in positions.stride()), 1),
            storage_offset=positions.storage_offset() * width,
            dtype=contents.dtype,
            device=head.hidden.device,
        )
        self._contents, self._positions = contents, positions
        return self

    @property
    def divisor(self) -> float:
        return self._contents.divisor

    @property
    def is_deferred(self) -> bool:
        """Whether a loss may compute values and gradients in tiles, without these logits and their graph.

        This is so as long as no code has read the values, no hook waits for the gradient of the logits, and
        the graph from the output layer to here holds only operations whose gradient this class knows. An
        autograd function of other code, for instance, is none of these.
        """
        contents = self._contents
        if contents.values is not None or contents.head.has_hooks:
            return False
        has_gradient = self.requires_grad and torch.is_grad_enabled()
        return not has_gradient or comes_from(self.grad_fn, contents.head)

    def hidden_states(self) -> Tensor:
        """Return what the output layer gets for these logits, ``[..., h]``, without a graph."""
        hidden = self._contents.head.hidden.detach()
        return hidden.flatten(0, -2)[self._rows]

    @property
    def _rows(self) -> Tensor:
        """Rows of the head's logits, int64 in the shape of this tensor without its last dimension."""
        rows = self._contents.rows
        return self._positions if rows is None else rows[self._positions]

    def source(
        self,
        index: slice | Tensor = slice(None),
        block_bytes: int | None = None,
        inplace_backward: bool = False,
    ) -> HeadLogits:
        """Return rows of these logits for the functions that read tiles; they count as ``[T, V / tp]``."""
        head = self._contents.head
        head.check_unchanged()
        row_indices = self._rows.flatten()[index]
        rows: slice | Tensor = row_indices
        are_in_order = self._contents.rows is None and self._positions.is_contiguous()
        if are_in_order and isinstance(index, slice) and row_indices.stride() == (1,):
            rows = slice(row_indices.storage_offset(), row_indices.storage_offset() + len(row_indices))
        keeps = torch.is_grad_enabled() and self.requires_grad
        source = replace(
            head.all_rows(),
            index=rows,
            block_bytes=block_bytes,
            inplace_backward=inplace_backward,
            keeps_tiles=keeps,
        )
        return source if self.requires_grad else source.detached()

    # --- operations

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.sum, torch.sum) and len(args) == 1 and not kwargs:
            logits = args[0]
            if isinstance(logits, DeferredLogits) and logits.is_deferred:
                # Some losses multiply this by zero, to reach every parameter.
                return (sum_of_logits(logits.source()) / logits.divisor).to(logits.dtype)
        if func in (Tensor.argmax, torch.argmax, Tensor.max, torch.max):
            largest = _largest(*args, **(kwargs or {}))
            if largest is not None:
                return largest if func in (Tensor.max, torch.max) else largest.indices
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise InvalidInputError(
                "the data of deferred logits was set: write to the logits, logits[:] = data"
            )
        # Results are of this class only if __torch_dispatch__ returns one, not because an argument is.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if follow := FOLLOWED.get(func):
            operands = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            if all(isinstance(o, DeferredLogits) and o._contents.values is None for o in operands):
                result = follow(func, *args, **kwargs)
                if result is not None:
                    return result
        else:
            # Under inference mode operations such as reshape arrive here whole.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        writes = func._schema.is_mutable
        aliases = writes or any(result.alias_info for result in func._schema.returns)
        made: dict[int, DeferredLogits] = {}

        def make(logits: DeferredLogits) -> Tensor:
            values = logits._make(str(func))
            if aliases:
                logits._contents.before_write()
            made[id(values)] = logits
            return values

        args, kwargs = tree_map_only(DeferredLogits, make, (args, kwargs))
        result = func(*args, **kwargs)
        # An operation in place returns what it was given.
        return tree_map_only(Tensor, lambda t: made.get(id(t), t), result) if writes else result

    def _make(self, operation: str) -> Tensor:
        """Return the values, as a view of those that all views of these logits have in common."""
        contents = self._contents
        if contents.values is None:
            _warn(operation, self)
        return self._values()

    def _values(self) -> Tensor:
        return self._as_of_now()()

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
        state = "deferred" if self._contents.values is None else "made"
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, device={self.device}, {state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain("pickling").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self._plain("copy.deepcopy").__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        self._contents.head.has_hooks = True
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        self._contents.head.has_hooks = True
        super().retain_grad()

    # The following read the storage, which logits without values do not have.

    def data_ptr(self) -> int:
        return self._plain("data_ptr").data_ptr()

    def untyped_storage(self) -> Any:
        return self._plain("untyped_storage").untyped_storage()

    def tolist(self) -> Any:
        return self._plain("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain("numpy").numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self._plain("__dlpack__").__dlpack__(**options)

    def _plain(self, operation: str) -> Tensor:
        self._make(operation)
        return dense(self)


class _Defer(torch.autograd.Function):
    """Makes deferred logits a function of hidden states, weight and bias.

    Its backward gets only gradients of code that read the logits; losses in tiles compute theirs themselves.
    """

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
        ctx.token = head.token
        tensors, ctx.restore = head.all_rows().saved()
        ctx.save_for_backward(*tensors)
        shape = hidden.shape[:-1]
        positions = torch.arange(shape.numel(), device=hidden.device).view(shape)
        contents = Contents(head, None, hidden.dtype, 1.0, head.layer)
        return DeferredLogits(contents, positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        head: HeadLogits = ctx.restore(*tensors)
        with torch.no_grad():
            of_hidden, *others = head.gradients_of(gradient.flatten(0, -2), ctx.needs_input_grad[1:])
        if of_hidden is not None:
            of_hidden = of_hidden.view(*gradient.shape[:-1], of_hidden.shape[-1])
        return None, *once_differentiable((of_hidden, *others), (*tensors, gradient))


class _ToDense(torch.autograd.Function):
    """Returns the values as an ordinary tensor, in the same memory, whose gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        return logits._values()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _largest(input: Any, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
    """Return the largest logit of each row without a gradient; ``None`` for any other call."""
    logits = input
    if not isinstance(logits, DeferredLogits) or (logits.requires_grad and torch.is_grad_enabled()):
        return None
    is_of_rows = type(dim) is int and dim in (-1, logits.dim() - 1) and not keepdim and not others
    if not is_of_rows or not logits.is_deferred:
        return None
    values, indices = (of_rows.view(logits.shape[:-1]) for of_rows in largest_logits(logits.source()))
    return torch.return_types.max((values.to(logits.dtype) / logits.divisor, indices))


def _warn(operation: str, logits: DeferredLogits) -> None:
    """Warn that logits were made, once for each line of code that caused it."""
    frame = sys._getframe()
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    place = operation, frame.f_code.co_filename, frame.f_lineno
    if place not in _warned:
        _warned.add(place)
        _log.warning("%s at %s:%d looks at deferred logits %s, which were made", *place, list(logits.shape))


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, _TORCH, "<")) or Path(file).parent == Path(copy.__file__).parent
