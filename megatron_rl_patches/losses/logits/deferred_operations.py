"""The operations on deferred logits whose result is deferred, too.

Each function gets the operation and its arguments, and returns ``None`` for arguments that it cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .deferred_contents import Contents
from .row_selection import selects_rows, viewed_rows

if TYPE_CHECKING:
    from .deferred import DeferredLogits

aten = torch.ops.aten


def _derived(
    parents: Sequence[DeferredLogits],
    rows: Tensor,
    compute: Callable[..., Tensor],
    *,
    divisor: float | None = None,
    dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """Return logits with memory of their own, made of others.

    Args:
        parents: what they are made of.
        rows: which rows of the head's logits, in the shape of the result.
        compute: makes their values of those of the parents.
    """
    old = parents[0]._contents
    values = [parent._as_of_now() for parent in parents]
    is_all = rows is parents[0]._positions and rows.is_contiguous() and len(old) == rows.numel()
    contents = Contents(
        old.head,
        None if is_all else rows.flatten(),
        dtype or old.dtype,
        old.divisor if divisor is None else divisor,
        lambda: compute(*(value() for value in values)),
    )
    for parent in parents:
        parent._contents.lazy.copies.add(contents.lazy)
        contents.has_graph |= parent.requires_grad and torch.is_grad_enabled()
    return type(parents[0])(contents, torch.arange(rows.numel(), device=rows.device).view(rows.shape))


def _view(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    positions = viewed_rows(func, logits._positions, logits.shape[-1], *args, **kwargs)
    if positions is None:
        return None
    # A view is an inference tensor if what it is a view of is one, whatever the mode.
    with torch.inference_mode(logits.is_inference()):
        if isinstance(positions, list):
            return [type(logits)(logits._contents, part) for part in positions]
        return type(logits)(logits._contents, positions)


def _copy(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> DeferredLogits:
    return _derived([logits], logits._rows, torch.clone)


def _index(func: Any, logits: DeferredLogits, indices: Sequence[Tensor | None]) -> DeferredLogits | None:
    if not selects_rows(indices, logits.dim()):
        return None
    indices = [_own(index) for index in indices]
    return _derived([logits], func(logits._rows, indices), lambda values: func(values, indices))


def _index_select(func: Any, logits: DeferredLogits, dim: int, index: Tensor) -> DeferredLogits | None:
    dim %= logits.dim()
    if dim == logits.dim() - 1:
        return None
    index = _own(index)
    return _derived([logits], func(logits._rows, dim, index), lambda values: func(values, dim, index))


def _cat(func: Any, parts: Sequence[DeferredLogits], dim: int = 0) -> DeferredLogits | None:
    first = parts[0]
    same = (first._contents.head, first.divisor, first.dtype, first.dim())
    alike = all((part._contents.head, part.divisor, part.dtype, part.dim()) == same for part in parts)
    dim %= first.dim()
    if not alike or dim == first.dim() - 1:
        return None
    return _derived(parts, func([part._rows for part in parts], dim), lambda *values: func(values, dim))


def _divide(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    if (number := _number(divisor, logits)) is None:
        return None
    whole, divisor = logits.divisor * number, _own(divisor)
    return _derived([logits], logits._rows, lambda values: func(values, divisor), divisor=whole)


def _divide_in_place(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    contents, shape = logits._contents, logits.shape
    # Autograd does not record a division without grad mode: the gradient of what came before stays undivided.
    # A loss in tiles would divide it.
    past_the_graph = contents.has_graph and not (torch.is_grad_enabled() and logits.requires_grad)
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
        per_row = per_row and _broadcasts(divisor, logits)
        if not per_row or divisor.requires_grad or isinstance(divisor, type(logits)) or not divisor.numel():
            return None
        lowest, highest = torch.stack(torch.aminmax(divisor)).tolist()
        divisor = lowest if lowest == highest else None
    if not isinstance(divisor, (int, float)) or not 0 < divisor < float("inf"):
        return None
    # The quotient of 16-bit logits is rounded to 16 bits.
    if divisor != 1 and logits.dtype not in (torch.float32, torch.float64):
        return None
    return float(divisor)


def _broadcasts(divisor: Tensor, logits: Tensor) -> bool:
    """Return whether the quotient has the shape of the logits."""
    if divisor.dim() > logits.dim():
        return False
    return all(a in (1, b) for a, b in zip(divisor.shape[::-1], logits.shape[::-1], strict=False))


def _convert(func: Any, logits: DeferredLogits, *, dtype: Any = None, **kwargs: Any) -> DeferredLogits | None:
    """Follow a conversion to the same or a more precise dtype."""
    dtype = dtype or logits.dtype
    elsewhere = kwargs.get("device") not in (None, logits.device) or kwargs.get("pin_memory")
    if elsewhere or dtype not in (logits.dtype, torch.float32) or logits.dtype == torch.float64 != dtype:
        return None
    return _derived([logits], logits._rows, lambda values: values.to(dtype, copy=True), dtype=dtype)


def _like(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Make a tensor for which only shape, strides, dtype and device of the logits matter."""
    stand_in = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    return func(stand_in, *args, **{**kwargs, "device": kwargs.get("device") or logits.device})


FOLLOWED: dict[Any, Callable[..., Any]] = {
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
