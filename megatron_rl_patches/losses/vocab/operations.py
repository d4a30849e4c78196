"""ATen operations on :class:`.DeferredLogits` that compute no logits, such as views, indexing and division.

Each function returns its result, or ``None`` if these arguments need the logits. ``sum()`` adds them up tile
by tile. Importing this module registers the functions in :attr:`.DeferredLogits.followed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.devices import on_device
from .arguments import DEFAULT, in_float32
from .deferred import Contents, DeferredLogits
from .output_layer import OutputLayerRows
from .reduction import Block, Blocks, Loss, Read, Results, Writer
from .sources import Tensors

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def _derived(
    parents: Sequence[DeferredLogits],
    rows: Tensor,
    *,
    division: Any = None,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = torch.contiguous_format,
) -> DeferredLogits | None:
    """Return logits with contents of their own: ``rows`` of the layer's logits, in the shape of the result.

    They have one ``division`` more than the first parent, if one is given.
    """
    if (has_gradient := _has_gradient_of_rows(parents)) is None:
        return None
    first, contents = parents[0], parents[0]._contents
    rows = rows.clone(memory_format=memory_format)
    divisions = contents.divisions if division is None else (*contents.divisions, division)
    derived = Contents(contents.layer, rows.as_strided((rows.numel(),), (1,)), divisions, has_gradient)
    return type(first)(derived, rows, dtype or first.dtype, has_gradient)


def _has_gradient_of_rows(parents: Sequence[DeferredLogits]) -> bool | None:
    """Return whether the gradient of a result is that of its rows; ``None`` if that is so for some only."""
    if not torch.is_grad_enabled():  # it has no graph, or gets that of an autograd function of other code
        return False
    are_of_rows = [parent.has_gradient_of_rows for parent in parents]
    if all(are_of_rows):
        return True
    return None if any(parent.requires_grad for parent in parents) else False


def _view(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Return the view if it keeps the vocabulary as the last dimension, and all of it.

    The operation is applied to a matrix with the row's number in every column, which takes no memory.
    """
    width = logits.shape[-1]
    try:
        result = func(logits._rows.unsqueeze(-1).expand(logits.shape), *args, **kwargs)
    except RuntimeError:
        return None
    parts: Sequence[Tensor] = [result] if isinstance(result, Tensor) else result
    # The dimension of the columns has stride 0. It must still be the last one and complete.
    if any(x.dim() == 0 or x.shape[-1] != width or (x.numel() > 0 and x.stride(-1) != 0) for x in parts):
        return None
    has_gradient = func is not aten.detach.default and bool(_has_gradient_of_rows([logits]))
    # A view is an inference tensor if what it is a view of is one, whatever the mode.
    with torch.inference_mode(logits.is_inference()):
        views = [type(logits)(logits._contents, part[..., 0], logits.dtype, has_gradient) for part in parts]
    return views[0] if isinstance(result, Tensor) else views


def _index(func: Any, logits: DeferredLogits, indices: Sequence[Tensor | None]) -> DeferredLogits | None:
    # A mask indexes as many dimensions as it has, and any other index one.
    taken = [index.dim() if index is not None and index.dtype in _MASKS else 1 for index in indices]
    if sum(taken) >= logits.dim():
        return None
    return _derived([logits], func(_rows_beside(logits, *indices), indices))


def _index_select(func: Any, logits: DeferredLogits, dim: int, index: Tensor) -> DeferredLogits | None:
    if (dim := dim % logits.dim()) == logits.dim() - 1:
        return None
    return _derived([logits], func(_rows_beside(logits, index), dim, index))


def _cat(func: Any, parts: Sequence[DeferredLogits], dim: int = 0) -> DeferredLogits | None:
    def kind(part: DeferredLogits) -> tuple[Any, ...]:
        divisions = [(number, isinstance(operand, Tensor)) for number, operand in part._contents.divisions]
        return part._contents.layer, part.dtype, part.dim(), divisions

    dim %= parts[0].dim()
    if any(kind(part) != kind(parts[0]) for part in parts) or dim == parts[0].dim() - 1:
        return None
    numbers = [part._rows for part in parts]
    return _derived(parts, func([_rows_beside(part, *numbers) for part in parts], dim))


def _rows_beside(logits: DeferredLogits, *others: Any) -> Tensor:
    """Return the numbers of the rows in host memory, or on the GPU if one of the other tensors is there."""
    on_gpu = any(other is not None and other.device.type != "cpu" for other in others)
    return on_device(logits._rows, logits.device) if on_gpu else logits._rows


def _divide(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    division = _division(divisor, logits)
    return division and _derived([logits], logits._rows, division=division, memory_format=None)


def _divide_in_place(func: Any, logits: DeferredLogits, divisor: Any) -> DeferredLogits | None:
    contents, division = logits._contents, _division(divisor, logits)
    if division is None or logits._rows.numel() != contents.rows.numel():
        return None
    # A loss in tiles would divide the gradient of what came before, too, which autograd has not recorded.
    if contents.has_gradient and not (torch.is_grad_enabled() and logits.has_gradient_of_rows):
        return None
    contents.divisions = *contents.divisions, division
    return logits


def _division(divisor: Any, logits: DeferredLogits) -> tuple[float, Tensor | float] | None:
    """Return the number that all rows are divided by, and what holds it; ``None`` if there is no such one."""
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
    is_exact = number == 1 or logits.dtype.itemsize > 2  # the quotient of 16-bit logits is rounded
    return (float(number), operand) if is_exact else None


def _convert(func: Any, logits: DeferredLogits, *, dtype: Any = None, **kwargs: Any) -> DeferredLogits | None:
    """Return a copy of the logits in the same or a more precise dtype."""
    dtype = dtype or logits.dtype
    elsewhere = kwargs.get("device") not in (None, logits.device) or kwargs.get("pin_memory")
    if elsewhere or dtype not in (logits.dtype, torch.float32) or logits.dtype == torch.float64 != dtype:
        return None
    return _derived([logits], logits._rows, dtype=dtype, memory_format=kwargs.get("memory_format"))


def _like(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Create a tensor from shape, strides, dtype and device of the logits; their values do not matter."""
    stand_in = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    return func(stand_in, *args, **{**kwargs, "device": kwargs.get("device") or logits.device})


class _SumOfLogits(Loss):
    """The sum of all logits, in the layer's ``dtype``; forward computes none of them."""

    def forward(self, sources: Sequence[OutputLayerRows], tensors: Tensors, read: Read) -> Results:
        layer = sources[0]
        weight = layer.weight.detach().sum(0, dtype=layer.dtype).to(layer.device)
        total = layer.hidden_nh.sum(0, dtype=layer.dtype) @ weight
        if layer.bias is not None and layer.n:
            total = total + layer.n * layer.bias.detach().sum(dtype=layer.dtype).to(layer.device)
        return [total], {}

    def writer(self, sources: Sequence[Any], saved: Tensors, *gradients: Tensor | None) -> Writer:
        def write(block: Block) -> None:
            block.out.copy_(gradients[0].expand_as(block.out))  # type: ignore[union-attr]

        return Writer(write, write, Blocks(has_work=False, compiled=0, compiled_on_gpu=0))


def _sum(logits: DeferredLogits) -> Tensor:
    source = logits.loss_source(slice(None), DEFAULT)
    (total,) = _SumOfLogits()(source)
    return (total / source.options.scale).to(logits.dtype)


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
        aten.clone.default: _convert,
        aten.div.Tensor: _divide,
        aten.div_.Tensor: _divide_in_place,
        aten.index.Tensor: _index,
        aten.index_select.default: _index_select,
        "sum": _sum,
    }
)
