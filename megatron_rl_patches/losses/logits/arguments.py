"""Checks of arguments of the losses over logits: on every rank alike, before anything is computed or sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .deferred import DeferredLogits, dense
from .options import VocabParallelOptions, check_no_transform, check_tensor, is_integer
from .overwriting import check_not_overwritten
from .rows import LogitSource, SelectedRows
from .slices import RowIndex, Rows, as_slices

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def checked_source(
    logits: Tensor,
    rows: Rows,
    options: VocabParallelOptions,
    keep_mask: Tensor | None = None,
    name: str = "logits",
) -> LogitSource:
    """Return the rows of the logits that a loss reads; reject logits, rows and a mask that do not fit.

    Deferred logits are read undivided; what they are divided by becomes part of the options.
    """
    _check_logits(name, logits)
    index = _valid_rows(rows, logits)
    source: LogitSource
    if isinstance(logits, DeferredLogits) and logits.is_deferred:
        if options.tp_size == 1:
            options = replace(options, temperature=options.temperature * logits.divisor)
        else:
            options = replace(options, divisor=logits.divisor)
        source = logits.source(index, options)
    else:
        if isinstance(logits, DeferredLogits):
            # Other code has written to them, and may do so again before backward reads them.
            logits = logits.clone()
        logits = dense(logits, to_write=options.inplace_backward)
        check_not_overwritten(logits)
        source = SelectedRows(logits, index, options)
    if keep_mask is not None:
        _check_mask(keep_mask, source)
    return source


def _check_logits(name: str, logits: Tensor) -> None:
    """Reject logits that are not ``[T, V / tp]`` in one of the dtypes."""
    check_tensor(name, logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInputError(
            f"{name} are [T, vocab / tp], not {list(logits.shape)}: flatten the dimensions before the last"
        )
    if logits.dtype not in _FLOATS:
        raise InvalidInputError(f"{name} are {logits.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
    check_no_transform(logits)


def _check_mask(keep_mask: Tensor, source: LogitSource) -> None:
    """Reject a mask that is not bool ``[n, V / tp]``."""
    check_tensor("keep_mask", keep_mask)
    _check_device("keep_mask", keep_mask, source.device)
    if keep_mask.dtype != torch.bool or keep_mask.shape != (source.n, source.width):
        raise InvalidInputError(
            f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, expected torch.bool "
            f"{[source.n, source.width]}: a line per selected row, a column per column of logits"
        )


def valid_targets(targets: Tensor, source: LogitSource) -> Tensor:
    """Return the targets as int64; reject those that do not fit the rows or lie outside the vocabulary."""
    check_tensor("targets", targets)
    if targets.shape != (source.n,) or targets.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"targets are {targets.dtype} {list(targets.shape)}, expected torch.int64 {[source.n]}: "
            "one token id for each selected row"
        )
    return _valid_ids("targets", targets, source, "to ignore a row")


def valid_indices(indices: Tensor, source: LogitSource) -> Tensor:
    """Return the indices as int64; reject those that do not fit the rows or lie outside the vocabulary."""
    check_tensor("indices", indices)
    fits = indices.dim() == 2 and len(indices) == source.n and indices.shape[1] > 0
    if not fits or indices.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"indices are {indices.dtype} {list(indices.shape)}, expected torch.int64 [{source.n}, K]: "
            "K token ids for each selected row, K at least 1"
        )
    return _valid_ids("indices", indices, source, "for no entry")


def _valid_ids(name: str, ids: Tensor, source: LogitSource, meaning: str) -> Tensor:
    _check_device(name, ids, source.device)
    check_ids(name, ids, source.vocab_size, source.options.ignore_index, meaning)
    return ids.long()


def check_ids(name: str, ids: Tensor, vocab_size: int, ignore_index: int, meaning: str) -> None:
    """Reject ids outside of the vocabulary, but for ``ignore_index``."""
    in_vocabulary = ((ids >= 0) & (ids < vocab_size)) | (ids == ignore_index)
    _require(in_vocabulary, f"{name}: token ids below {vocab_size}, or {ignore_index} {meaning}", ids)


def check_distinct(name: str, ids: Tensor) -> None:
    """Reject an id that a row ``[K]`` has twice; negative ones are none."""
    ordered = ids.sort(1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    expected = f"{name}: each id at most once per token, since its probability would count twice"
    _require(~is_repeated, f"{expected}; -100 stands for no entry", ordered[:, 1:])


def _valid_rows(rows: Rows, logits: Tensor) -> RowIndex:
    """Return the rows; reject numbers that are not of rows, or of one row twice."""
    size = logits.shape[0]
    if rows is None:
        return slice(0, size)
    if isinstance(rows, slice):
        row_range = range(*rows.indices(size))
        if row_range.step == 1:
            return slice(row_range.start, max(row_range.start, row_range.stop))
        return torch.tensor(row_range, dtype=torch.int64, device=logits.device)
    if isinstance(rows, Sequence):
        return _valid_slices(rows, size)
    if not isinstance(rows, Tensor):
        raise InvalidInputError(f"rows are a {type(rows).__name__}, expected slices or a tensor of numbers")
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
    return as_slices(rows)


def _valid_slices(rows: Sequence[Any], size: int) -> RowIndex:
    end = 0
    for part in rows:
        bounds = [part.start, part.stop] if isinstance(part, slice) and part.step in (None, 1) else []
        if not bounds or not all(map(is_integer, bounds)) or not end <= bounds[0] < bounds[1] <= size:
            raise InvalidInputError(
                f"rows have {part!r}, expected slices of the {size} rows with start and stop, none of them "
                "empty, each behind the one before it"
            )
        end = part.stop
    return tuple(rows) if len(rows) > 1 else rows[0] if rows else slice(0, 0)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise InvalidInputError(f"{name} on {tensor.device}, logits on {device}: expected one device")


def _require(ok: Tensor, expected: str, values: Tensor) -> None:
    if ok.device.type == "cuda":
        # Reading the values would make the CPU wait for the GPU. A kernel checks them and stops the device.
        torch._assert_async(ok.all(), f"expected {expected}")
    elif not ok.all():
        raise InvalidInputError(f"expected {expected}; found {values[~ok][:5].tolist()}")
