"""The same as ``_eager`` in one kernel each, which the compiler of torch makes: one pass over the logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ._shard import Shard, Target, Term, floor

# The first kernel of a process takes some ten seconds to compile, further ones one or two.
WORTHWHILE_ELEMENTS = 1 << 24

_log = logging.getLogger(__name__)
_compiled: dict[Any, Callable[..., Any]] = {}
_cannot: dict[Any, str] = {}


class Unavailable(Exception):
    """There is no kernel for this; nothing was computed."""


class _NotCompiled(Exception):
    """A kernel runs as Python, which over whole tensors would allocate many times the logits."""


def is_worthwhile(shard: Shard) -> bool:
    return shard.n * shard.logits.shape[1] >= WORTHWHILE_ELEMENTS


def obstacle(shard: Shard, in_place: bool) -> str | None:
    """What keeps a kernel from going over these logits without allocating more than a few numbers per row."""
    logits = shard.logits
    if logits.device.type not in ("cpu", "cuda"):
        return f"there are kernels for CPUs and for CUDA, not for {logits.device.type!r}"
    if not logits.is_contiguous():
        return "the logits are not contiguous"
    if logits.device.type == "cuda" and _selected(shard).data_ptr() % 16:
        return "the logits do not start at a multiple of 16 bytes, and would be copied"
    if in_place and shard.keep_mask is not None and not isinstance(shard.rows, slice):
        return "in place and with a keep-mask, rows must be a slice"
    return None


def statistics(shard: Shard, column: Tensor, entropy: bool) -> list[Tensor]:
    """See :func:`._local.statistics`."""
    _refuse(obstacle(shard, in_place=False))
    logits, rows = _selected(shard), _row_numbers(shard)
    found = _run(
        _statistics_kernel,
        (logits.device.type, logits.dtype, rows is None, shard.keep_mask is None, entropy),
        *(logits, rows, shard.keep_mask, column, _scale(shard), entropy),
    )
    return [torch.stack(one) for one in found]


def gradient(shard: Shard, kept: Term | None, full: Term | None, target: Target, in_place: bool) -> Tensor:
    """See :func:`._local.gradient`."""
    _refuse(obstacle(shard, in_place))
    selection, counts = shard, target.counts
    if in_place and not isinstance(shard.rows, slice):
        # A kernel cannot gather rows of a tensor and scatter into it. The others get their zeros on the way.
        assert full is not None
        shard, full, counts = _over_all_rows(shard, full, counts)
    out = shard.gradient_buffer(in_place)
    selected = out[shard.rows] if isinstance(shard.rows, slice) else out
    logits, rows = _selected(shard), _row_numbers(shard)
    has_slope = full is not None and full.b is not None
    _run(
        _gradient_kernel,
        (logits.device.type, logits.dtype, in_place, rows is None, kept is None, full is None, has_slope),
        *(None if in_place else selected, logits, rows, shard.keep_mask, _scale(shard)),
        *(kept, full, counts),
    )
    _put(out, selection.row_numbers(), target)
    return out


def _put(out: Tensor, rows: Tensor, target: Target) -> None:
    """After the kernel, which would take half as long again if it compared each column with the target."""
    column = target.column.squeeze(1)
    places = rows, column.clamp(min=0)
    out[places] = torch.where(column < 0, out[places], target.value.squeeze(1).to(out.dtype))


def _over_all_rows(shard: Shard, full: Term, counts: Tensor) -> tuple[Shard, Term, Tensor]:
    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(shard.logits), 1).index_copy_(0, shard.row_numbers(), values)

    b = None if full.b is None else spread(full.b)
    everywhere = Term(spread(full.top), spread(full.share), spread(full.a), b)
    return replace(shard, rows=slice(0, len(shard.logits))), everywhere, spread(counts)


def _selected(shard: Shard) -> Tensor:
    logits = shard.logits.detach()
    return logits[shard.rows] if isinstance(shard.rows, slice) else logits


def _row_numbers(shard: Shard) -> Tensor | None:
    return None if isinstance(shard.rows, slice) else shard.rows


def _scale(shard: Shard) -> Tensor:
    # A tensor, since a number might be compiled in. Inverted: dividing takes longer.
    return torch.full((), 1 / shard.temperature, dtype=shard.dtype, device=shard.logits.device)


def _refuse(why_not: str | None) -> None:
    if why_not is not None:
        raise Unavailable(why_not)


def _run(kernel: Any, variant: tuple[Any, ...], *args: Any) -> Any:
    key = (kernel, variant)
    _refuse(_cannot.get(key))
    compiled = _compiled.get(key)
    if compiled is None:
        # torch counts recompilations by code object and gives up at eight, so each variant has its own.
        own = FunctionType(kernel.__code__.replace(), kernel.__globals__, kernel.__name__)
        compiled = torch.compile(own, dynamic=True, fullgraph=True)
    try:
        result = compiled(*args)
    except _NotCompiled as error:
        raise Unavailable("torch.compile is switched off") from error
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        _cannot[key] = str(error)
        _log.info("no kernel for the loss, going on without: %s", error)
        raise Unavailable(str(error)) from error
    _compiled[key] = compiled
    return result


def _statistics_kernel(
    logits: Tensor,
    rows: Tensor | None,
    keep_mask: Tensor | None,
    column: Tensor,
    scale: Tensor,
    entropy: bool,
) -> list[list[Tensor]]:
    _must_be_compiled()
    x = (logits if rows is None else logits[rows]).to(scale.dtype)
    if keep_mask is None:
        return [_statistics(x, scale, entropy)]
    kept = torch.where(keep_mask | _is_at(column, x), x, float("-inf"))
    found = [_statistics(kept, scale, False)]
    return [*found, _statistics(x, scale, True)] if entropy else found


def _statistics(x: Tensor, scale: Tensor, entropy: bool) -> list[Tensor]:
    top = x.amax(1, keepdim=True)
    z = _z(x, torch.where(top == float("-inf"), 0.0, top), scale, entropy)
    exp_z = z.exp()
    # On a CPU the kernel adds one after the other: in float32 that would cost two digits.
    rest = exp_z.sum(1, dtype=torch.float64) - 1.0
    found = [top.squeeze(1), rest.to(x.dtype)]
    return [*found, (exp_z * z).sum(1, dtype=torch.float64).to(x.dtype)] if entropy else found


def _gradient_kernel(
    out: Tensor | None,
    logits: Tensor,
    rows: Tensor | None,
    keep_mask: Tensor | None,
    scale: Tensor,
    kept: Term | None,
    full: Term | None,
    counts: Tensor,
) -> None:
    _must_be_compiled()
    x = (logits if rows is None else logits[rows]).to(scale.dtype)
    gradient = torch.zeros_like(x)
    if full is not None:
        gradient = gradient + _part(x, full, scale)
    if kept is not None and keep_mask is not None:
        gradient = gradient + torch.where(keep_mask, _part(x, kept, scale), 0.0)
    gradient = torch.where(counts, gradient, 0.0).to(logits.dtype)
    if out is None:
        logits.copy_(gradient)
    elif rows is None:
        out.copy_(gradient)
    else:
        out.index_copy_(0, rows, gradient)


def _part(x: Tensor, term: Term, scale: Tensor) -> Tensor:
    z = _z(x, term.top, scale, term.b is not None)
    return z.exp() * (term.a if term.b is None else term.a + term.b * z)


def _z(x: Tensor, top: Tensor, scale: Tensor, is_factor: bool) -> Tensor:
    z = (x - top) * scale
    return z.clamp(min=floor(x.dtype)) if is_factor else z


def _is_at(column: Tensor, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) == column


def _must_be_compiled() -> None:
    if not torch.compiler.is_compiling():
        raise _NotCompiled
