"""What the losses over logits refuse, on every rank alike and before anything is computed or sent."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInputError
from ._fused import obstacle
from ._shard import Shard

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)


def checked_shard(
    logits: Tensor,
    rows: Tensor | slice | None,
    keep_mask: Tensor | None,
    temperature: float,
    block_bytes: int | None,
) -> Shard:
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInputError(
            f"logits are [T, vocab / tp], not {list(logits.shape)}: flatten the dimensions before the last"
        )
    if logits.dtype not in _FLOATS:
        raise InvalidInputError(f"logits are {logits.dtype}, expected one of {', '.join(map(str, _FLOATS))}")
    if not (isinstance(temperature, (int, float)) and 0 < temperature < math.inf):
        raise InvalidInputError(f"temperature is {temperature!r}, expected a positive number")
    if block_bytes is not None and block_bytes <= 0:
        raise InvalidInputError(f"block_bytes is {block_bytes}, expected a positive number or None")
    shard = Shard(logits, _checked_rows(rows, logits), keep_mask, float(temperature), block_bytes)
    if keep_mask is not None:
        _same_device("keep_mask", keep_mask, logits)
        if keep_mask.dtype != torch.bool or keep_mask.shape != (shard.n, logits.shape[1]):
            raise InvalidInputError(
                f"keep_mask is {keep_mask.dtype} {list(keep_mask.shape)}, expected torch.bool "
                f"{[shard.n, logits.shape[1]]}: a line per selected row, a column per column of logits"
            )
    return shard


def checked_targets(targets: Tensor, shard: Shard, vocab_size: int, ignore_index: int) -> Tensor:
    if targets.shape != (shard.n,) or targets.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"targets are {targets.dtype} {list(targets.shape)}, expected torch.int64 {[shard.n]}: "
            "one token id for each selected row"
        )
    return _checked_ids("targets", targets, shard, vocab_size, ignore_index, "to ignore a row")


def checked_indices(indices: Tensor, shard: Shard, vocab_size: int, ignore_index: int) -> Tensor:
    fits = indices.dim() == 2 and len(indices) == shard.n and indices.shape[1] > 0
    if not fits or indices.dtype not in _INTEGERS:
        raise InvalidInputError(
            f"indices are {indices.dtype} {list(indices.shape)}, expected torch.int64 [{shard.n}, K]: "
            "K token ids for each selected row, K at least 1"
        )
    return _checked_ids("indices", indices, shard, vocab_size, ignore_index, "for no entry")


def check_fused(fused: bool | str, shard: Shard, in_place: bool) -> None:
    if fused not in (True, False, "auto"):
        raise InvalidInputError(f'fused is {fused!r}, expected True, False or "auto"')
    if fused is True and (why_not := obstacle(shard, in_place)) is not None:
        raise InvalidInputError(f'fused=True, but {why_not}; fused="auto" goes on with plain operators')


def position_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidInputError("this rank is not in tp_group: give the group that holds its vocabulary")
    return rank, dist.get_world_size(group)


def _checked_ids(
    name: str, ids: Tensor, shard: Shard, vocab_size: int, ignore_index: int, meaning: str
) -> Tensor:
    _same_device(name, ids, shard.logits)
    in_vocabulary = ((ids >= 0) & (ids < vocab_size)) | (ids == ignore_index)
    _require(in_vocabulary, f"{name}: token ids below {vocab_size}, or {ignore_index} {meaning}", ids)
    return ids.long()


def _checked_rows(rows: Tensor | slice | None, logits: Tensor) -> slice | Tensor:
    size = logits.shape[0]
    if rows is None:
        return slice(0, size)
    if isinstance(rows, slice):
        numbers = range(*rows.indices(size))
        if numbers.step == 1:
            return slice(numbers.start, max(numbers.start, numbers.stop))
        return torch.tensor(numbers, dtype=torch.int64, device=logits.device)
    if not isinstance(rows, Tensor):
        raise InvalidInputError(f"rows are a {type(rows).__name__}, expected a slice or a tensor of numbers")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise InvalidInputError(
            f"rows are {rows.dtype} {list(rows.shape)}, expected a slice or row numbers, torch.int64 [n]"
            + ("; rows of a mask are mask.nonzero().squeeze(1)" if rows.dtype == torch.bool else "")
        )
    _same_device("rows", rows, logits)
    _require((rows >= 0) & (rows < size), f"rows: numbers from 0 to {size - 1}", rows)
    once = torch.ones_like(rows)
    uses = torch.zeros(size, dtype=torch.int64, device=rows.device).index_add_(0, rows, once)
    _require(uses <= 1, "rows: each at most once, since gradients of a row are written, not added up", uses)
    return _as_slice(rows)


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Consecutive rows need no copy. To know that of rows on a GPU would mean to wait for it."""
    if rows.device.type != "cpu":
        return rows
    if len(rows) == 0:
        return slice(0, 0)
    first = int(rows[0])
    consecutive = torch.equal(rows, torch.arange(first, first + len(rows), device=rows.device))
    return slice(first, first + len(rows)) if consecutive else rows


def _same_device(name: str, tensor: Tensor, logits: Tensor) -> None:
    if tensor.device != logits.device:
        raise InvalidInputError(f"{name} on {tensor.device}, logits on {logits.device}: expected one device")


def _require(ok: Tensor, expected: str, found: Tensor) -> None:
    if ok.device.type == "cuda":  # the kernel stops there; asking here would wait for it
        torch._assert_async(ok.all(), f"expected {expected}")
    elif not ok.all():
        raise InvalidInputError(f"expected {expected}; found {found[~ok][:5].tolist()}")
