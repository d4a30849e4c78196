"""One reduction over the columns of logits: tiles, blocks of a tile, then ranks. Every loss here is one.

A :class:`Loss` says what a block of columns adds, how two parts merge, and what gradient a block gets. A
:class:`.Source` says how its logits come into memory, one tile after the other. Only this module loops over
tiles and blocks, and only it calls collectives::

    forward    read(function, part, merge):   for tile in tiles:
                                                  for block in tile: part(block)
                                                  merge the tile with the ones before it
                                              merge ranks
    backward   writer(...) -> write:          for tile in tiles:
                                                  for block in tile: write(block) into its gradient
                                                  gradients.add(tile)

Statistics travel between tiles and ranks as float64, in the units of the logits that the caller passed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import compiling
from .arguments import VocabParallelOptions
from .autograd import gradients_of_inputs, save_sources
from .softmax import RowsOf
from .sources import Grid, Inputs, Place, Source, Tensors, Tile, cut_runs

Read = Callable[..., Tensor]  # Loss.read, which has got the sources and the claim
Results = tuple[Sequence[Tensor | None], Tensors]  # the results, and the tensors that backward needs
_MIB = 1 << 20
STRETCH, _SHORTEST_STRETCH = 1024, 64  # columns
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# On a CPU, torch 2.6 copies logits that it converts or takes by number, and 2.13 does not.
_COMPILER_COPIES = TORCH < (2, 13)


class Blocks(NamedTuple):
    """How large blocks are, and what plain operators work in."""

    tensors: int = 1  # of a block's size, that plain operators need beside the logits that they overwrite
    has_work: bool = True  # they get these as buffers, and what they sum up in stretches
    compiled: int = 1  # on a CPU, a compiled function gets a tile in so many blocks or more; 0: none is
    compiled_on_gpu: int = 16  # blocks of a compiled function on a GPU are so many times as large as others
    takes_numbers: bool = False  # a compiled function gets rows that are no slice as RowsOf, not as a copy


class Block(NamedTuple):
    """Some rows of a tile."""

    # The logits of each source, the student's first, perhaps as RowsOf a tile: in stretches where they are
    # summed up, and for a gradient as rows [b, w] or as one stretch.
    xs: list[Any]
    out: Any  # where to write their gradient; perhaps the very object xs[0], so that a compiler knows it
    rows: slice  # of the n rows
    tile: Tile  # the student's
    # Buffers cut as the logits are, whose first one may hold the logits where no gradient is written.
    work: Tensor | None  # None: the function is compiled
    function: Callable[..., Any]  # computes the block
    cut: Callable[[Tensor], Tensor]  # returns what the function gets in place of a tensor [..., w]

    def part(self, values: Tensor | None) -> Tensor | None:
        """Return the block's rows of ``values`` ``[n, 1]``, cut as its logits are."""
        return None if values is None else self.cut(values[self.rows])


class Writer(NamedTuple):
    """How a loss writes the gradient of a tile."""

    function: Callable[..., Any]  # computes the gradient of a block
    write: Callable[[Block], None]  # calls it for a block
    blocks: Blocks
    finish: Callable[[Tile, Tensor], None] | None = None  # is called with a tile and its gradient after that


class Loss(ABC):
    """A function of rows of logits with a gradient of its own; one object for each call.

    An object has no tensors as attributes, so that autograd alone decides how long they live.
    """

    owners: Sequence[str] = ()  # whose the sources behind the first one are, for errors
    grid: Grid  # of the tiles, which forward and backward read alike

    @abstractmethod
    def forward(self, sources: Sequence[Any], tensors: Tensors, read: Read) -> Results:
        """Return the results, and the tensors that :meth:`writer` needs; :meth:`read` has got the sources."""

    def writer(self, sources: Sequence[Any], saved: Tensors, *gradients: Tensor | None) -> Writer | Tensor:
        """Return what writes the gradient of the first source from those of the results, perhaps ``None``.

        Where forward has summed up the derivative by hidden states, return it for each row, weighted.
        """
        raise NotImplementedError

    def gradients(
        self, sources: Sequence[Any], saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        """Return the gradients of the first source's inputs; ``None`` for one that needs none."""
        writer = self.writer(sources, saved, *gradients)
        if isinstance(writer, Tensor):
            return sources[0].spread(writer), None, None
        totals = sources[0].gradients(needed)
        for tiles in _in_step(sources, self.grid, is_backward=True):
            out = totals.out(tiles[0])
            each_block(sources[0], tiles, writer.function, writer.write, writer.blocks, out)
            if writer.finish is not None:
                writer.finish(tiles[0], out)
            totals.add(tiles[0])
        return totals.totals()

    def read(
        self,
        sources: Sequence[Source],
        claim: Any,
        function: Callable[..., Any],
        part: Callable[[Block], Tensor],
        merge: Callable[[Sequence[Tensor]], Tensor],
        blocks: Blocks,
        finish_tile: Callable[[Tile, Tensor], Tensor] | None = None,
        keeps_tiles: bool = True,
    ) -> Tensor:
        """Return statistics, float64 ``[m, n]``, of all columns of all ranks; sources are read in step.

        Args:
            claim: of the storage that backward overwrites; the ranks tell each other whether they can.
            part: returns the statistics of a block, ``[m, b]``, which ``function`` computes.
            merge: makes statistics of those of several parts of the columns, in their order.
            finish_tile: returns a tile's statistics in the units of the caller from those of its blocks.
            keeps_tiles: whether backward may read tiles that this pass has computed.
        """
        sources = sources if keeps_tiles else [sources[0].without_keeping(), *sources[1:]]
        totals: dict[int, Tensor] = {}
        for tiles in _in_step(sources, self.grid):
            values: list[Tensor] = each_block(sources[0], tiles, function, part, blocks)
            value, start = values[0] if len(values) == 1 else torch.cat(values, 1), tiles[0].rows.start
            if finish_tile is not None:
                value = finish_tile(tiles[0], value)
            totals[start] = merge([totals[start], value]) if start in totals else value
        parts = list(totals.values())
        local = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        gathered = all_gather(local, sources[0].options.tp_group, claim)
        return local if len(gathered) == 1 else merge(list(gathered))

    def __call__(self, *sources: Source, **tensors: Tensor | None) -> tuple[Any, ...]:
        """Return the results, with a graph to the first source's inputs."""
        first = sources[0]
        return _Reduction.apply(self, sources, first.claim(), tensors, *first.inputs)  # type: ignore[no-untyped-call]


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Loss, sources: Sequence[Source], claim: Any, tensors: Tensors, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        loss.grid = grid_of(sources)
        read = partial(loss.read, sources, claim)
        with without_autocast():
            results, others = loss.forward(sources, tensors, read)
        # The claim lives as long as the graph.
        ctx.loss, ctx.claim = loss, claim
        save_sources(ctx, sources, others, loss.owners)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        with without_autocast():
            return None, None, None, None, *gradients_of_inputs(ctx, ctx.loss.gradients, 4, *gradients)


def without_autocast() -> ExitStack:
    """Switch autocast off until the stack is left: forward and backward must read the same numbers."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


# --- tiles and blocks


def grid_of(sources: Sequence[Source]) -> Grid:
    """Cut the rows and columns of sources such that the tiles of all take the memory of one tile."""
    first = sources[0]
    width = max(first.num_columns, 1)
    rows, columns = max(first.n, 1), width
    if computed := [source for source in sources if source.computes_tiles]:
        shapes = [source.shape_of_tiles(width, len(sources)) for source in computed]
        rows, columns = (min(sizes) for sizes in zip(*shapes, strict=True))
    # Where padding follows, what exceeds a multiple of a stretch is a range of its own, so that others can be
    # cut into stretches. It comes first where tiles are computed, since backward begins with the last tile.
    count = first.num_columns
    rest = count % STRETCH if count < first.width else 0
    end = rest if first.computes_tiles else count - rest
    cut_columns = [*ranges(0, end, columns), *ranges(end, count, columns)]  # none, if this rank has no id
    return Grid(ranges(0, first.n, rows) or [slice(0, 0)], cut_columns or [slice(0, 1)], len(sources))


def ranges(start: int, stop: int, step: int) -> list[slice]:
    """Cut a range into parts of so many numbers; the last one may be shorter."""
    return [slice(number, min(number + step, stop)) for number in range(start, stop, step)]


def _in_step(sources: Sequence[Source], grid: Grid, is_backward: bool = False) -> Iterator[tuple[Tile, ...]]:
    return zip(*(source.tiles(grid, is_backward) for source in sources), strict=True)


def each_block(
    source: Source,
    tiles: Sequence[Tile],
    function: Callable[..., Any],
    compute: Callable[[Block], Any],
    blocks: Blocks,
    gradient: Tensor | None = None,
) -> list[Any]:
    """Call ``compute`` for one block of rows of the tiles after the other, and return what it returns.

    A block's ``function`` is compiled for large logits, see :class:`.BlockFunction`. The first tile is that
    of the source; its gradient ``[any, w]`` is where the tile's rows are to be written.
    """
    tile, options, is_writing, results = tiles[0], source.options, gradient is not None, list[Any]()
    done, row_bytes = tile.rows.start, tile.x.shape[1] * source.dtype.itemsize
    if is_writing and options.inplace_backward:  # the compiler would copy all rows
        blocks = blocks._replace(takes_numbers=False)
    is_large = options.fused == "auto" and source.n * source.width >= compiling.WORTHWHILE_ELEMENTS

    def add(rows: slice, place: Place, *of_block: Any) -> None:
        block = _block_of(tiles, rows, place, gradient, *of_block)
        results.append(compute(block))
        if gradient is None or isinstance(block.out, RowsOf):
            return
        values = block.out.flatten(1)
        if isinstance(place, Tensor):
            gradient.index_copy_(0, place, values.to(gradient.dtype))
        elif (destination := gradient[place]).data_ptr() != values.data_ptr():  # else it was computed there
            destination.copy_(values)

    if blocks.compiled and (options.fused is True or is_large):
        call = compiling.BlockFunction(function, options.fused is True, source.device.type, is_writing)
        # On a CPU, what is computed for each logit alone is faster in one loop over a row.
        view = _as_one_stretch if is_writing and source.device.type == "cpu" else stretches
        if call.compiled:
            parts = cut_runs(tile.runs, tile.rows, _compiled_rows(tile, options, row_bytes, blocks))
            done = call.each(parts, lambda *part: add(*part, None, call, view, blocks.takes_numbers), done)
        if call.compiled:
            return results
    view = (lambda x: x) if is_writing or not blocks.has_work else stretches
    tensors = blocks.tensors + (is_writing and blocks.has_work and source.copies_rows)
    left, most = slice(done, tile.rows.stop), rows_of_block(tile.x, options, row_bytes * max(tensors, 1))
    must_cut = left != tile.rows or most < left.stop - left.start
    parts = cut_runs(tile.runs, left, most) if must_cut else tile.runs
    longest = max(rows.stop - rows.start for rows, _ in parts)
    work = tile.x.new_empty((tensors * blocks.has_work, longest, tile.x.shape[1]), dtype=source.dtype)
    for rows, place in parts:
        add(rows, place, work[:, : rows.stop - rows.start], function, view)
    return results


def _compiled_rows(tile: Tile, options: VocabParallelOptions, row_bytes: int, blocks: Blocks) -> int:
    """Return how many rows a block of a compiled function has."""
    # Copies of single rows have to fit into the cache.
    copies = not blocks.takes_numbers and len(tile.runs) == 1 and isinstance(tile.runs[0][1], Tensor)
    if tile.x.device.type == "cuda":
        row_bytes, scale = tile.x.shape[1] * tile.x.itemsize, 1 if copies else blocks.compiled_on_gpu
        return rows_of_block(tile.x, options, row_bytes, scale)
    if options.block_bytes or copies or _COMPILER_COPIES:
        return rows_of_block(tile.x, options, row_bytes)
    width, columns = _width_of_stretches(tile.x.shape[1]), tile.x.shape[1]
    parts = STRETCH // width if width < columns else 1  # statistics take less than a hundredth of the logits
    return max(-(-(tile.rows.stop - tile.rows.start) // max(parts, blocks.compiled)), 1)


def _block_of(
    tiles: Sequence[Tile],
    rows: slice,
    place: Place,
    gradient: Tensor | None,
    work: Tensor | None,
    function: Callable[..., Any],
    cut: Callable[[Tensor], Tensor],
    takes_numbers: bool = False,
) -> Block:
    """Return a block, whose logits are views of the tile, or copies in the dtype of the computation."""
    logits, buffer = tiles[0].x, work[0] if work is not None and len(work) else None
    others = []
    for tile in tiles[1:]:
        ((run, others_place),) = tile.runs
        assert isinstance(others_place, slice), "all rows of the other sources are read"
        shift = others_place.start - run.start
        others.append(cut(tile.x[shift + rows.start : shift + rows.stop]))
    if takes_numbers and isinstance(place, Tensor):
        numbered = RowsOf(cut(logits), place)
        written = numbered if gradient is None else RowsOf(cut(gradient), place)
        return Block([numbered, *others], written, rows, tiles[0], work, function, cut)
    if isinstance(place, Tensor):
        is_same = buffer is not None and logits.dtype == buffer.dtype
        x = torch.index_select(logits, 0, place, out=buffer if is_same else None)
    else:
        x = logits[place]
    if buffer is not None and x.dtype != buffer.dtype:
        x = buffer.copy_(x)
    # A copy is overwritten with its gradient. Tensors without elements have the same address, whether they
    # share memory or not.
    out = x
    if gradient is not None and isinstance(place, slice) and x is not buffer:
        is_in_place = gradient.numel() > 0 and gradient.data_ptr() == logits.data_ptr()
        out = x if is_in_place else gradient[place]
    if work is not None:
        work = cut(work[1:] if gradient is not None and x is buffer else work)
    xs = [cut(x), *others]
    return Block(xs, xs[0] if out is x else cut(out), rows, tiles[0], work, function, cut)


def rows_of_block(logits: Tensor, options: VocabParallelOptions, row_bytes: int, scale: int = 1) -> int:
    """Return how many rows of so many bytes fit into ``block_bytes``, or its default times ``scale``.

    On a CPU the default stays in the cache: 2 MiB per thread, but at most 1% of the logits, and at least 1
    MiB. On a GPU it keeps the device busy: 64 MiB, or 1% of the logits if that is more.
    """
    size = options.block_bytes
    if size is None:
        least, share = 64 * _MIB, logits.nbytes // 100
        if logits.device.type == "cpu":
            least, share = _MIB, min(2 * _MIB * torch.get_num_threads(), share)
        size = max(least, share) * scale
    return max(1, size // max(row_bytes, 1))


def stretches(x: Tensor) -> Tensor:
    """Cut the last dimension into stretches of equal width: ``[..., V]`` as ``[..., stretches, columns]``."""
    width = _width_of_stretches(x.shape[-1])
    return x.view(*x.shape[:-1], x.shape[-1] // width, width)


def _as_one_stretch(x: Tensor) -> Tensor:
    return x.unsqueeze(-2)


@lru_cache
def _width_of_stretches(columns: int) -> int:
    """Return a divisor of ``columns`` near the best width, or ``columns`` itself if there is none."""
    width = math.gcd(columns, STRETCH)
    if width >= _SHORTEST_STRETCH:
        return width
    divisors = (width for width in range(2 * STRETCH, _SHORTEST_STRETCH, -1) if columns % width == 0)
    return next(divisors, columns)


# --- ranks


def all_gather(values: Tensor, group: dist.ProcessGroup | None, claim: Any = None) -> Tensor:
    """Return ``[tp, k, n]``, the ``[k, n]`` of every rank of the group.

    With a claim that ranks have asked for, check that all of them can overwrite their logits.
    """
    size = 1 if group is None else dist.get_world_size(group)
    marker = values.new_full((1,), claim.reason) if claim is not None and claim.asked_for else None
    gathered = values[None]
    if size > 1:
        sent = values if marker is None else torch.cat([values.flatten(), marker])
        received = sent.new_empty((size * len(sent), *sent.shape[1:]))
        dist.all_gather_into_tensor(received, sent.contiguous(), group=group)
        gathered = received.view(size, *sent.shape)
        if marker is not None:
            gathered, marker = gathered[:, :-1].view(size, *values.shape), gathered[:, -1]
    if marker is not None:
        claim.check(marker)
    return gathered
