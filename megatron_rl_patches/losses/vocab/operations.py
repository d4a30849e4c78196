"""The operations on deferred logits whose result is deferred, too, and those that are computed in tiles.

Each function gets the operation and its arguments, and returns ``None`` for arguments that it cannot follow.
To import this module fills in :attr:`.DeferredLogits.followed` and ``computed_in_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...common.devices import on_device
from .arguments import in_float32
from .deferred import Contents, DeferredLogits, Division
from .output_layer import OutputLayerRows
from .reduction import Block, Blocks, Loss, Writer
from .sources import Tensors

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _derived(
    parents: Sequence[DeferredLogits],
    rows: Tensor,
    *,
    divisions: tuple[Division, ...] | None = None,
    dtype: torch.dtype | None = None,
    keeps_strides: bool = False,
) -> DeferredLogits | None:
    """Return logits with contents of their own, made of others.

    Args:
        parents: what they are made of.
        rows: which rows of the layer's logits, in the shape of the result.
        keeps_strides: their dimensions have the order in memory that those of the first parent have.
    """
    if (has_gradient := _has_gradient_of_rows(parents)) is None:
        return None
    first = parents[0]
    order = list(range(rows.dim()))  # of dimensions in memory
    if keeps_strides:
        strides = torch.empty_like(first._rows).stride()
        order.sort(key=lambda dim: -strides[dim])
    in_memory = rows.permute(order).clone(memory_format=torch.contiguous_format)
    divisions = first._contents.divisions if divisions is None else divisions
    contents = Contents(first._contents.layer, in_memory.flatten(), divisions)
    numbers = in_memory.permute([order.index(dim) for dim in range(rows.dim())])
    return type(first)(contents, numbers, dtype or first.dtype, has_gradient)


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
    rows = _viewed_rows(func, logits._rows, logits.shape[-1], *args, **kwargs)
    if rows is None:
        return None
    has_gradient = func is not aten.detach.default and bool(_has_gradient_of_rows([logits]))

    def view(rows: Tensor) -> DeferredLogits:
        return type(logits)(logits._contents, rows, logits.dtype, has_gradient)

    # A view is an inference tensor if what it is a view of is one, whatever the mode.
    with torch.inference_mode(logits.is_inference()):
        return list(map(view, rows)) if isinstance(rows, list) else view(rows)


def _copy(func: Any, logits: DeferredLogits, *, memory_format: Any = None) -> DeferredLogits | None:
    return _derived([logits], logits._rows, keeps_strides=_keeps_strides(memory_format))


def _keeps_strides(memory_format: torch.memory_format | None) -> bool:
    return memory_format in (None, torch.preserve_format)


def _index(func: Any, logits: DeferredLogits, indices: Sequence[Tensor | None]) -> DeferredLogits | None:
    return _taken(func, logits, indices) if _selects_rows(indices, logits.dim()) else None


def _index_select(func: Any, logits: DeferredLogits, dim: int, index: Tensor) -> DeferredLogits | None:
    dim %= logits.dim()
    return _taken(func, logits, dim, index) if dim < logits.dim() - 1 else None


def _taken(func: Any, logits: DeferredLogits, *args: Any) -> DeferredLogits | None:
    """Return what the operation takes from the logits, whose columns it leaves complete."""
    return _derived([logits], func(_rows_beside(logits, *tree_leaves(args)), *args))


def _cat(func: Any, parts: Sequence[DeferredLogits], dim: int = 0) -> DeferredLogits | None:
    def kind(part: DeferredLogits) -> tuple[Any, ...]:
        divisions = [
            (one.number, isinstance(one.operand, Tensor), one.in_graph) for one in part._contents.divisions
        ]
        return part._contents.layer, part.dtype, part.dim(), divisions

    dim %= parts[0].dim()
    if any(kind(part) != kind(parts[0]) for part in parts) or dim == parts[0].dim() - 1:
        return None
    rows = [_rows_beside(part, *(other._rows for other in parts)) for part in parts]
    return _derived(parts, func(rows, dim))


def _rows_beside(logits: DeferredLogits, *others: Any) -> Tensor:
    """Return the numbers of the rows in host memory, or on the GPU if one of the other tensors is there."""
    on_gpu = any(isinstance(other, Tensor) and other.device.type != "cpu" for other in others)
    return on_device(logits._rows, logits.device) if on_gpu else logits._rows


def _divide(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    division = _division(divisor, logits)
    if division is None:
        return None
    divisions = *logits._contents.divisions, division
    return _derived([logits], logits._rows, divisions=divisions, keeps_strides=True)


def _divide_in_place(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    contents = logits._contents
    division = _division(divisor, logits)
    if division is None or contents.memory is not None or logits._rows.numel() != contents.rows.numel():
        return None
    # Autograd does not record a division without grad mode: the gradient of what came before stays undivided.
    # A loss in tiles would divide it.
    in_graph = torch.is_grad_enabled() and logits.has_gradient_of_rows
    contents.divisions = *contents.divisions, division._replace(in_graph=in_graph)
    return logits


def _division(divisor: Any, logits: DeferredLogits) -> Division | None:
    """Return the division of all logits by one number, or ``None`` if rows have different divisors.

    A column of divisors, one per row, counts if all are the same.
    """
    operand = number = divisor
    if isinstance(divisor, Tensor):
        per_row = divisor.dim() == 0 or (divisor.shape[-1] == 1 and divisor.dtype == logits.dtype)
        per_row = per_row and torch.broadcast_shapes(divisor.shape, logits.shape) == logits.shape  # type: ignore[no-untyped-call]
        per_row = per_row and not divisor.is_complex() and divisor.numel() > 0
        if not per_row or divisor.requires_grad or isinstance(divisor, type(logits)):
            return None
        lowest, highest = torch.stack(torch.aminmax(divisor.double())).tolist()
        number = lowest if lowest == highest else None
        operand = divisor.detach().flatten()[0].clone()  # its owner may overwrite the tensor
    if not isinstance(number, (int, float)) or not in_float32(number):
        return None
    # The quotient of 16-bit logits is rounded to 16 bits.
    if number != 1 and logits.dtype not in (torch.float32, torch.float64):
        return None
    return Division(float(number), operand)


def _convert(func: Any, logits: DeferredLogits, *, dtype: Any = None, **kwargs: Any) -> DeferredLogits | None:
    """Follow a conversion to the same or a more precise dtype."""
    dtype = dtype or logits.dtype
    elsewhere = kwargs.get("device") not in (None, logits.device) or kwargs.get("pin_memory")
    if elsewhere or dtype not in (logits.dtype, torch.float32) or logits.dtype == torch.float64 != dtype:
        return None
    keeps = _keeps_strides(kwargs.get("memory_format"))
    return _derived([logits], logits._rows, dtype=dtype, keeps_strides=keeps)


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


# --- computed in tiles


class _SumOfLogits(Loss):
    """The sum of all logits of the selected rows, in the layer's ``dtype``; forward computes no logits."""

    def forward(
        self, sources: Sequence[OutputLayerRows], tensors: Tensors, read: Callable[..., Tensor]
    ) -> tuple[list[Tensor], Tensors]:
        (layer,) = sources
        weight = layer.weight.detach().sum(0, dtype=layer.dtype).to(layer.device)
        total = layer.hidden_nh.sum(0, dtype=layer.dtype) @ weight
        if layer.bias is not None and layer.n:
            total = total + layer.n * layer.bias.detach().sum(dtype=layer.dtype).to(layer.device)
        return [total], {}

    def writer(self, sources: Sequence[Any], saved: Tensors, *gradients: Tensor | None) -> Writer:
        def write(block: Block) -> None:
            block.function(block.out, gradients[0])

        return Writer(_fill, write, Blocks(has_work=False, compiled=0, compiled_on_gpu=0))


def _fill(out: Tensor, value: Tensor) -> None:
    out.copy_(value.expand_as(out))


def _sum(input: Any, *others: Any, **options: Any) -> Tensor | None:
    """Return the sum of all logits; ``None`` for any other call. Some losses multiply it by zero."""
    if not isinstance(input, DeferredLogits) or others or options or not input.is_deferred:
        return None
    (total,) = _SumOfLogits()(input.rows_in_tiles(slice(None)))
    return (total / input.divisor).to(input.dtype)


def _overloads(names: str) -> list[Any]:
    """Return operations of ATen by name, such as ``view`` or ``select.int``."""
    split = (name.partition(".") for name in names.split())
    return [getattr(getattr(aten, name), overload or "default") for name, _, overload in split]


_VIEWS = """
    alias detach permute select.int slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim
    squeeze.dims transpose.int unbind.int unsqueeze view _unsafe_view
"""
_MAKE_OTHERS = """
    empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like zeros_like
"""
DeferredLogits.followed.update(
    {
        **dict.fromkeys(_overloads(_VIEWS), _view),
        **dict.fromkeys(_overloads(_MAKE_OTHERS), _like),
        aten._to_copy.default: _convert,
        aten.cat.default: _cat,
        aten.clone.default: _copy,
        aten.div.Tensor: _divide,
        aten.div_.Tensor: _divide_in_place,
        aten.index.Tensor: _index,
        aten.index_select.default: _index_select,
    }
)
DeferredLogits.computed_in_tiles.update(dict.fromkeys((Tensor.sum, torch.sum), _sum))
