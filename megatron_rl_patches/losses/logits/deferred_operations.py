"""The operations on deferred logits whose result is deferred, too.

Each function gets the operation and its arguments, and returns ``None`` for arguments that it cannot follow.
To import this module fills in :attr:`.DeferredLogits.followed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...common.devices import on_device
from .deferred import DeferredLogits
from .deferred_contents import Contents, LazyValues
from .options import in_float32

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _derived(
    parents: Sequence[DeferredLogits],
    rows: Tensor,
    compute: Callable[..., Tensor],
    *,
    divisor: float | None = None,
    dtype: torch.dtype | None = None,
    keeps_strides: bool = False,
) -> DeferredLogits | None:
    """Return logits with memory of their own, made of others.

    Args:
        parents: what they are made of.
        rows: which rows of the origin's logits, in the shape of the result.
        compute: makes their values of those of the parents.
        keeps_strides: their dimensions have the order in memory that those of the first parent have.
    """
    if (has_gradient := _has_gradient_of_rows(parents)) is None:
        return None
    old = parents[0]._contents
    values = [parent._as_of_now() for parent in parents]
    order = list(range(rows.dim()))  # of dimensions in memory
    if keeps_strides:
        strides = torch.empty_like(parents[0]._positions).stride()
        order.sort(key=lambda dim: -strides[dim])
    in_memory = rows.permute(order)
    is_all = rows is parents[0]._positions and rows.is_contiguous() and len(old) == rows.numel()
    lazy = LazyValues(old.origin, lambda: compute(*(value() for value in values)).permute(*order, rows.dim()))
    for parent in parents:
        parent._contents.lazy.copies.add(lazy)
    contents = Contents(
        old.origin,
        None if is_all else in_memory.flatten(),
        dtype or old.dtype,
        old.divisor if divisor is None else divisor,
        lazy,
        has_graph=has_gradient,
        are_rows=all(parent.are_rows for parent in parents),
    )
    if any(parent._contents.lazy.is_shared for parent in parents):
        lazy.get()  # before other code overwrites what it is made of
    positions = torch.arange(rows.numel(), device=rows.device).view(in_memory.shape)
    positions = positions.permute([order.index(dim) for dim in range(rows.dim())])
    return type(parents[0])(contents, positions, has_gradient)


def _has_gradient_of_rows(parents: Sequence[DeferredLogits]) -> bool | None:
    """Return whether the gradient of a result is that of its rows; ``None`` if it is so for some rows only.

    Without grad mode a result has no graph, or it gets the one of an autograd function of other code.
    """
    if not torch.is_grad_enabled():
        return False
    of_rows = [parent.has_gradient_of_rows for parent in parents]
    if all(of_rows):
        return True
    return None if any(parent.requires_grad for parent in parents) else False


def _view(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    positions = _viewed_rows(func, logits._positions, logits.shape[-1], *args, **kwargs)
    if positions is None:
        return None
    has_gradient = func is not aten.detach.default and bool(_has_gradient_of_rows([logits]))
    if torch.is_inference_mode_enabled():
        # The view has a count of writes of its own.
        logits._contents.are_rows = logits.are_rows
        logits._contents.counts_writes = False
    # A view is an inference tensor if what it is a view of is one, whatever the mode.
    with torch.inference_mode(logits.is_inference()):
        if isinstance(positions, list):
            return [type(logits)(logits._contents, part, has_gradient) for part in positions]
        return type(logits)(logits._contents, positions, has_gradient)


def _copy(func: Any, logits: DeferredLogits, *, memory_format: Any = None) -> DeferredLogits | None:
    return _derived([logits], logits.row_numbers, torch.clone, keeps_strides=_keeps_strides(memory_format))


def _keeps_strides(memory_format: torch.memory_format | None) -> bool:
    return memory_format in (None, torch.preserve_format)


def _index(func: Any, logits: DeferredLogits, indices: Sequence[Tensor | None]) -> DeferredLogits | None:
    return _taken(func, logits, indices) if _selects_rows(indices, logits.dim()) else None


def _index_select(func: Any, logits: DeferredLogits, dim: int, index: Tensor) -> DeferredLogits | None:
    dim %= logits.dim()
    return _taken(func, logits, dim, index) if dim < logits.dim() - 1 else None


def _taken(func: Any, logits: DeferredLogits, *args: Any) -> DeferredLogits | None:
    """Return what the operation takes from the logits, whose columns it leaves complete."""
    args = tree_map_only(Tensor, _own, args)
    rows = _rows_beside(logits, *tree_leaves(args))
    return _derived([logits], func(rows, *args), lambda values: func(values, *args))


def _cat(func: Any, parts: Sequence[DeferredLogits], dim: int = 0) -> DeferredLogits | None:
    first = parts[0]
    same = (first._contents.origin, first.divisor, first.dtype, first.dim())
    alike = all((part._contents.origin, part.divisor, part.dtype, part.dim()) == same for part in parts)
    dim %= first.dim()
    if not alike or dim == first.dim() - 1:
        return None
    rows = [_rows_beside(part, *(other.row_numbers for other in parts)) for part in parts]
    return _derived(parts, func(rows, dim), lambda *values: func(values, dim))


def _rows_beside(logits: DeferredLogits, *others: Any) -> Tensor:
    """Return the numbers of the rows in host memory, or on the GPU if one of the other tensors is there."""
    on_gpu = any(isinstance(other, Tensor) and other.device.type != "cpu" for other in others)
    return on_device(logits.row_numbers, logits.device) if on_gpu else logits.row_numbers


def _divide(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    if (number := _number(divisor, logits)) is None:
        return None
    whole, divisor = logits.divisor * number, _own(divisor)
    return _derived(
        [logits], logits.row_numbers, lambda values: func(values, divisor), divisor=whole, keeps_strides=True
    )


def _divide_in_place(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    contents, shape = logits._contents, logits.shape
    # Autograd does not record a division without grad mode: the gradient of what came before stays undivided.
    # A loss in tiles would divide it.
    past_the_graph = contents.has_graph and not (torch.is_grad_enabled() and logits.has_gradient_of_rows)
    if past_the_graph or logits._positions.numel() != len(contents):
        return None
    if (number := _number(divisor, logits)) is None:
        return None
    divisor = _own(divisor)
    contents.divide_in_place(lambda values: func(values.view(shape), divisor), number)
    return logits


def _own(argument: Any) -> Any:
    """Return a copy of a tensor, which its owner may overwrite before the values are computed."""
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


def _number(divisor: Any, logits: DeferredLogits) -> float | None:
    """Return the number that all logits are divided by, or ``None`` if rows have different divisors.

    A column of divisors, one per row, counts if all are the same.
    """
    if isinstance(divisor, Tensor):
        per_row = divisor.dim() == 0 or (divisor.shape[-1] == 1 and divisor.dtype == logits.dtype)
        per_row = per_row and torch.broadcast_shapes(divisor.shape, logits.shape) == logits.shape  # type: ignore[no-untyped-call]
        if not per_row or divisor.requires_grad or isinstance(divisor, type(logits)) or not divisor.numel():
            return None
        lowest, highest = torch.stack(torch.aminmax(divisor)).tolist()
        divisor = lowest if lowest == highest else None
    if not isinstance(divisor, (int, float)) or not in_float32(divisor):
        return None
    # The quotient of 16-bit logits is rounded to 16 bits.
    if divisor != 1 and logits.dtype not in (torch.float32, torch.float64):
        return None
    return float(divisor)


def _convert(func: Any, logits: DeferredLogits, *, dtype: Any = None, **kwargs: Any) -> DeferredLogits | None:
    """Follow a conversion to the same or a more precise dtype."""
    dtype = dtype or logits.dtype
    elsewhere = kwargs.get("device") not in (None, logits.device) or kwargs.get("pin_memory")
    if elsewhere or dtype not in (logits.dtype, torch.float32) or logits.dtype == torch.float64 != dtype:
        return None
    return _derived(
        [logits],
        logits.row_numbers,
        lambda values: values.to(dtype, copy=True),
        dtype=dtype,
        keeps_strides=_keeps_strides(kwargs.get("memory_format")),
    )


def _like(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor for which only shape, strides, dtype and device of the logits matter."""
    stand_in = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    return func(stand_in, *args, **{**kwargs, "device": kwargs.get("device") or logits.device})


def _viewed_rows(
    func: Callable[..., Any], rows: Tensor, width: int, *args: Any, **kwargs: Any
) -> list[Tensor] | Tensor | None:
    """Return the rows, or a list of them, that a view of logits ``[..., width]`` has.

    The operation is applied to a matrix with the row's number in every column, which takes no memory.

    Args:
        rows: int64 numbers of rows, in the shape of the logits without their last dimension.

    Returns:
        ``None`` for a view that has parts of rows, or puts columns among rows.
    """
    try:
        result = func(rows.unsqueeze(-1).expand(*rows.shape, width), *args, **kwargs)
    except RuntimeError:
        return None
    parts = list(result) if isinstance(result, (list, tuple)) else [result]
    # The dimension of the columns has stride 0. It must still be the last one and complete.
    if any(part.dim() == 0 or part.shape[-1] != width for part in parts):
        return None
    if any(part.numel() > 0 and part.stride(-1) != 0 for part in parts):
        return None
    of_parts = [part[..., 0] for part in parts]
    return of_parts if isinstance(result, (list, tuple)) else of_parts[0]


def _selects_rows(indices: Sequence[Tensor | None], dimensions: int) -> bool:
    """Return whether indexing leaves the last of so many dimensions complete."""
    # A mask indexes as many dimensions as it has, and any other index one.
    taken = [index.dim() if index is not None and index.dtype in _MASKS else 1 for index in indices]
    return sum(taken) < dimensions


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.detach.default,
            aten.permute.default,
            aten.select.int,
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.transpose.int,
            aten.unbind.int,
            aten.unsqueeze.default,
            aten.view.default,
            aten._unsafe_view.default,
        ),
        _view,
    ),
    **dict.fromkeys(
        (
            aten.empty_like.default,
            aten.full_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
            aten.new_full.default,
            aten.new_ones.default,
            aten.new_zeros.default,
            aten.ones_like.default,
            aten.zeros_like.default,
        ),
        _like,
    ),
    aten._to_copy.default: _convert,
    aten.cat.default: _cat,
    aten.clone.default: _copy,
    aten.div.Tensor: _divide,
    aten.div_.Tensor: _divide_in_place,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
}

DeferredLogits.followed.update(_FOLLOWED)
