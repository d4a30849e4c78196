"""Arguments of the losses over logits: their options, handed on as one object, and the checks of all others.

The checks run on every rank alike and before anything is computed or sent.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from .rows import LogitSource, RowIndex, as_slice

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class VocabParallelOptions:
    """How to read logits ``[T, V / tp]`` and where to put their gradient.

    Attributes:
        tp_group: see :func:`.vocab_parallel_log_probs`, as for all that is not explained here.
        ignore_index: target, or entry of ``indices``, that stands for no token.
        with_entropy: compute entropies beside log-probabilities.
        entropy_grad: entropies require grad.
        others_overwrite: other ranks may have ``inplace_backward`` though this one has not: each chooses by
            its own logits.
    """

    tp_group: dist.ProcessGroup | None = None
    temperature: float = 1.0
    inplace_backward: bool = False
    block_bytes: int | None = None
    fused: bool | str = "auto"
    ignore_index: int = -100
    with_entropy: bool = False
    entropy_grad: bool = False
    others_overwrite: bool = False

    def __post_init__(self) -> None:
        temperature: Any = self.temperature  # numpy's numbers count
        if not (isinstance(temperature, numbers.Real) and in_float32(float(temperature))):
            raise InvalidInputError(
                f"temperature is {self.temperature!r}, expected a positive number in the range of float32"
            )
        if self.block_bytes is not None:
            check_integer("block_bytes", self.block_bytes, 1, "a positive number or None")
        if self.fused not in (True, False, "auto"):
            raise InvalidInputError(f'fused is {self.fused!r}, expected True, False or "auto"')
        check_group(self.tp_group)

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else dist.get_rank(self.tp_group)

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)


def in_float32(number: float) -> bool:
    """Return whether a positive number is in the range of float32."""
    return torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max


def check_integer(name: str, value: Any, lowest: int, expected: str, *, highest: int | None = None) -> int:
    """Return an integer, which may be one of numpy's, or refuse what is none or out of bounds."""
    is_integer = isinstance(value, numbers.Integral)
    if not is_integer or int(value) < lowest or (highest is not None and int(value) > highest):
        raise InvalidInputError(f"{name} is {value!r}, expected {expected}")
    return int(value)


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Refuse a tensor-parallel group that this rank is not in."""
    if tp_group is not None and dist.get_rank(tp_group) < 0:
        raise InvalidInputError(
            "this rank is not in tp_group: pass the group that holds its part of the vocabulary"
        )


def check_logits(logits: Tensor) -> None:
    """Reject logits that are not ``[T, V / tp]`` in one of the dtypes."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInputError(
            f"logits are [T, vocab / tp], not {list(logits.shape)}: flatten the dimensions before the last"
        )
    if logits.dtype not in _FLOATS:
        raise InvalidInputError(f"logits are {logits.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
    if torch._C._functorch.is_functorch_wrapped_tensor(logits):
        raise InvalidInputError(
            "logits are those of a transform of torch.func, such as grad or vmap, which sees no storage: use "
            "torch.autograd.grad"
        )


def check_mask(keep_mask: Tensor, source: LogitSource) -> None:
    """Reject a mask that is not bool ``[n, V / tp]``."""
    _check_device("keep_mask", keep_mask, source.device)
    if keep_mask.dtype != torch.bool or keep_mask.shape != (source.n, source.width):
        raise InvalidInputError(
            f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, expected torch.bool "
            f"{[source.n, source.width]}: a line per selected row, a column per column of logits"
        )


def valid_targets(targets: Tensor, source: LogitSource, options: VocabParallelOptions) -> Tensor:
    """Return the targets as int64; reject those that do not fit the rows or lie outside the vocabulary."""
    if targets.shape != (source.n,) or targets.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"targets are {targets.dtype} {list(targets.shape)}, expected torch.int64 {[source.n]}: "
            "one token id for each selected row"
        )
    return _valid_ids("targets", targets, source, options, "to ignore a row")


def valid_indices(indices: Tensor, source: LogitSource, options: VocabParallelOptions) -> Tensor:
    """Return the indices as int64; reject those that do not fit the rows or lie outside the vocabulary."""
    fits = indices.dim() == 2 and len(indices) == source.n and indices.shape[1] > 0
    if not fits or indices.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"indices are {indices.dtype} {list(indices.shape)}, expected torch.int64 [{source.n}, K]: "
            "K token ids for each selected row, K at least 1"
        )
    return _valid_ids("indices", indices, source, options, "for no entry")


def _valid_ids(
    name: str, ids: Tensor, source: LogitSource, options: VocabParallelOptions, meaning: str
) -> Tensor:
    _check_device(name, ids, source.device)
    vocab_size, ignore_index = source.width * options.tp_size, options.ignore_index
    in_vocabulary = ((ids >= 0) & (ids < vocab_size)) | (ids == ignore_index)
    _require(in_vocabulary, f"{name}: token ids below {vocab_size}, or {ignore_index} {meaning}", ids)
    return ids.long()


def valid_rows(rows: Tensor | slice | None, logits: Tensor) -> RowIndex:
    """Return the rows; reject numbers that are not of rows, or of one row twice."""
    size = logits.shape[0]
    if rows is None:
        return slice(0, size)
    if isinstance(rows, slice):
        row_range = range(*rows.indices(size))
        if row_range.step == 1:
            return slice(row_range.start, max(row_range.start, row_range.stop))
        return torch.tensor(row_range, dtype=torch.int64, device=logits.device)
    if not isinstance(rows, Tensor):
        raise InvalidInputError(f"rows are a {type(rows).__name__}, expected a slice or a tensor of numbers")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise InvalidInputError(
            f"rows are {rows.dtype} {list(rows.shape)}, expected a slice or row numbers, torch.int64 [n]"
            + ("; rows of a mask are mask.nonzero().squeeze(1)" if rows.dtype == torch.bool else "")
        )
    _check_device("rows", rows, logits.device)
    _require((rows >= 0) & (rows < size), f"rows: numbers from 0 to {size - 1}", rows)
    once = torch.ones_like(rows)
    uses = torch.zeros(size, dtype=torch.int64, device=rows.device).index_add_(0, rows, once)
    expected = "rows: each at most once, since gradients of a row are written, not added up"
    _require(uses <= 1, expected, torch.arange(size, device=rows.device))
    return as_slice(rows)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise InvalidInputError(f"{name} on {tensor.device}, logits on {device}: expected one device")


def _require(ok: Tensor, expected: str, values: Tensor) -> None:
    if ok.device.type == "cuda":
        # Reading the values would make the CPU wait for the GPU. A kernel checks them and stops the device.
        torch._assert_async(ok.all(), f"expected {expected}")
    elif not ok.all():
        raise InvalidInputError(f"expected {expected}; found {values[~ok][:5].tolist()}")
