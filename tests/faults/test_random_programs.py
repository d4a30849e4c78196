"""Random programs on logits have the values and gradients of dense formulas in float64, on 1, 2 and 4 ranks.

``programs.py`` draws a program from a seed. It runs on ordinary logits of all ranks at once, whose losses are
formulas, and with this package, each rank on its own part. What one rank alone sees is refused on all.
No rank waits for another, and all of them have the same bits and send alike. A failure prints the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import deferred_logits
from megatron_rl_patches.losses.logits.autograd import sum_gradient
from megatron_rl_patches.losses.logits.deferred import rows_of_existing
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES
from tests.device_thread import device_thread
from tests.faults.program_losses import OF_MICROBATCH, Data, Place, dense, ours
from tests.faults.programs import (
    OPERATIONS,
    OVERWRITTEN,
    RESHAPING,
    RESPONSES,
    TOTALS,
    B,
    H,
    Loss,
    Program,
    S,
    Step,
    drawn,
    run_step,
)
from tests.ranks import everywhere, on_ranks
from tests.references.sent_bytes import sent_bytes

#: Programs up to which the default suite goes, the slow one, and that of the night, by the number of ranks.
PROGRAMS = {1: (60, 300, 1500), 2: (20, 100, 400), 4: (0, 25, 100)}
#: Losses of the last tensor, which nobody draws together.
ALL_LOSSES = (
    *(Loss(kind, -1, 1, temperature=1.2) for kind in ("alone", "scores", "kept", "at", "topk", "mixture")),
    *(Loss("mutual", -1, 1, divergence=name) for name in DIVERGENCES if name != "generalized_kl"),
)
SPLIT = {
    f"the sequence is split, too: {split}, the layer is trained: {trains}": Program(
        3, tp=2, sequence_parallel=split, gradients=(True, trains, trains), losses=ALL_LOSSES
    )
    for split, trains in product((False, True), repeat=2)
}
#: What programs have found, shortened, and what nobody draws.
FOUND: dict[str, Program] = {
    "one rank writes out of place to what all have divided": Program(
        0, tp=2, steps=(Step("divide", 0, 0), Step("columns", -1, 0, alone=1)), losses=(Loss("at", -1, 0),)
    ),
    "made in a reentrant checkpoint": Program(0, within="reentrant", losses=(Loss("at", 0, 0),)),
    "a temperature that is no power of two": Program(
        0, close=True, tile_bytes=1 << 20, losses=(Loss("divergence", 0, 0, temperature=0.7),)
    ),
    "a large finite mask over a rank": Program(
        0, tp=2, masked=-1e5, losses=(Loss("divergence", 0, 0, divergence="forward_kl"),)
    ),
    "an id that one rank scores": Program(0, cp=2, losses=(Loss("policy", 0, 0, wrong="id"),)),
    "an id that one rank compares": Program(0, cp=2, losses=(Loss("distillation", 0, 0, wrong="id"),)),
    "an id that a teacher has twice": Program(
        0, cp=2, losses=(Loss("distillation", 0, 0, wrong="duplicate"),)
    ),
    **SPLIT,
}
#: Operations of :data:`OPERATIONS` that the default suite has on one of two ranks.
QUICK = ("masked_fill", "divided twice", "written", "written, then divided", "hooked", "function of its own")
REFUSED = "refused"
Leaves = tuple[Tensor, Tensor, Tensor | None]
_RESPONSE_ROWS = torch.cat(
    [torch.arange(S * i + TOTALS[i] - RESPONSES[i] - 1, S * i + TOTALS[i] - 1) for i in range(B)]
)


class Outcome(NamedTuple):
    values: list[Tensor]
    gradients: list[Tensor]


class Reference:
    """The program on ordinary logits of all ranks.

    Attributes:
        refused: torch refuses the program, or its numbers are not those that a formula is for.
        data: what each loss gets, by the context-parallel rank.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.refused = program, False
        places = [Place(t, c) for c in range(program.cp) for t in range(program.tp)]
        self.leaves = {place: exact(leaves_of(program, place)) for place in places}
        for place, (_, *of_rank) in self.leaves.items():  # tensor-parallel ranks share their hidden states
            self.leaves[place] = (self.leaves[Place(0, place.cp_rank)][0], *of_rank)
        self.data: list[list[Data]] = []
        self.values: list[list[Tensor]] = []
        tensors: dict[Place, list[Tensor]] = {}
        try:
            for place, (hidden, weight, bias) in self.leaves.items():
                # No view: a hook of a view is lost when somebody writes to it.
                tensors[place] = [linear(hidden, weight, bias).clone()]
                for step in program.steps:
                    run_step(step, tensors[place], place.tp_rank)
            total = sum(self._loss(loss, tensors) for loss in program.losses)
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()
        except (RuntimeError, IndexError) as error:
            assert "megatron_rl_patches" not in str(error)
            self.refused = True

    def _loss(self, loss: Loss, tensors: dict[Place, list[Tensor]]) -> Tensor:
        chosen = {place: chosen_of(loss, of_place) for place, of_place in tensors.items()}
        cp, tp = self.program.cp, self.program.tp
        parts = [torch.cat([chosen[Place(t, c)] for t in range(tp)], -1) for c in range(cp)]
        is_of_microbatch = loss.kind in OF_MICROBATCH
        if is_of_microbatch:
            parts = [joined(parts).flatten(0, 1)[_RESPONSE_ROWS]]
        data = [Data(loss, self.program, part.detach()) for part in parts]
        values = [dense(loss, *pair) for pair in zip(data, parts, strict=True)]
        # Beyond this the ratios of a policy loss are bounded, and no formula.
        self.refused |= loss.kind == "policy" and not (values[0].abs() < 1e6).all()
        self.data.append(data * (cp // len(data)))
        self.values.append(values * (cp // len(data)))
        # Every context-parallel rank computes the whole loss of the microbatch, and all of them are added up.
        return sum(map(weighted, values), start=torch.zeros(())) * (cp if is_of_microbatch else 1)

    def of(self, place: Place) -> Outcome | str:
        """Return what a rank must find."""
        if any(loss.wrong for loss in self.program.losses):
            return REFUSED
        values = [of_loss[place.cp_rank].detach() for of_loss in self.values]
        gradients = gradients_of(self.leaves[Place(*place[:2])])
        if self.program.sequence_parallel:
            gradients[0] = gradients[0].chunk(self.program.tp)[place.tp_rank]
        return Outcome(values, gradients)


def leaves_of(program: Program, place: Place) -> Leaves:
    """Return hidden states of a context-parallel rank, and weight and bias of a tensor-parallel one."""
    generator = torch.Generator().manual_seed(program.seed)
    columns = slice(place.tp_rank * program.width, (place.tp_rank + 1) * program.width)
    dtype = torch.float32 if program.close or program.single else torch.float64

    random = partial(torch.randn, generator=generator, dtype=torch.float64)
    if program.close:  # each row of logits is a column of the weight
        hidden = torch.eye(B * S).view(B, S, B * S)
        weight = 2 * random(program.width * program.tp, B * S) + 15
    else:
        hidden, weight = random(B, S, H), random(program.width * program.tp, H)
    bias = random(len(weight))
    if program.masked:
        bias[len(weight) // 2 :] = program.masked
    # Zigzag: each rank has a chunk from the front and one from the back.
    chunks = hidden.chunk(2 * program.cp, 1)
    part = torch.cat([chunks[place.cp_rank], chunks[-1 - place.cp_rank]], 1) if program.cp > 1 else hidden
    bias = None if program.close else bias[columns].to(dtype, copy=True)
    leaves = part.to(dtype), weight[columns].to(dtype), bias
    for leaf, has_gradient in zip(leaves, program.gradients, strict=True):
        if leaf is not None:
            leaf.requires_grad_(has_gradient and not (program.close and leaf is leaves[0]))
    return leaves


def exact(leaves: Leaves) -> Leaves:
    """Return leaves of ``float64``, but for products that have no rounding."""
    if leaves[2] is None:
        return leaves
    hidden, weight, bias = (leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves)
    return hidden, weight, bias


def joined(parts: list[Tensor]) -> Tensor:
    """Return whole sequences from those of context-parallel ranks."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], 1)


def chosen_of(loss: Loss, tensors: list[Tensor]) -> Tensor:
    """Return the tensor that a loss is of: rows, or for a microbatch logits of its shape."""
    chosen = tensors[loss.of % len(tensors)]
    if loss.kind in OF_MICROBATCH:
        return chosen if chosen.shape == tensors[0].shape else tensors[0]
    return chosen.reshape(-1, chosen.shape[-1])


def weighted(values: Tensor) -> Tensor:
    weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view(values.shape)
    return (weights * values).sum()


def gradients_of(leaves: Leaves) -> list[Tensor]:
    needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in needed]


def made(program: Program, leaves: Leaves, place: Place) -> Tensor:
    hidden, weight, bias = leaves

    def make(x: Tensor) -> Tensor:
        if program.made == "deferred":
            x = x * 1 if program.within else x
            how = {"sequence_parallel": program.sequence_parallel, "tile_bytes": program.tile_bytes}
            return deferred_logits(x, weight, bias=bias, tp_group=place.tp_group, **how)
        logits = linear(sum_gradient(x, place.tp_group), weight, bias).clone()
        return logits if program.made == "ordinary" else rows_of_existing(logits)

    if not program.within:
        return make(hidden)
    return checkpoint(make, hidden, use_reentrant=program.within == "reentrant")


def outcome(program: Program, reference: Reference, place: Place) -> Outcome | str:
    """Return what this package makes of the program on this rank."""
    leaves, values = leaves_of(program, place), []
    if program.sequence_parallel:
        mine = leaves[0].detach().chunk(program.tp)[place.tp_rank].clone().requires_grad_()
        leaves = (mine, *leaves[1:])
    try:
        tensors = [made(program, leaves, place)]
        for step in program.steps:
            run_step(step, tensors, place.tp_rank)
        for loss, data in zip(program.losses, reference.data, strict=True):
            logits = chosen_of(loss, tensors)
            values.append(ours(loss, data[place.cp_rank], logits, program, place))
        total = sum(map(weighted, values))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
    except InvalidInputError:
        if not any(loss.wrong for loss in program.losses):
            raise
        return REFUSED
    return Outcome([x.detach() for x in values], gradients_of(leaves))


def check(program: Program, place: Place, may_be_refused: bool = True) -> None:
    reference = Reference(program)
    if reference.refused:
        assert may_be_refused, program
        return
    expected = reference.of(place)
    try:
        # Half of the programs have their backward in a thread of autograd, as on CUDA.
        thread = device_thread if program.seed % 2 else nullcontext
        with sent_bytes() as sent, thread():
            found = outcome(program, reference, place)
        if place.tp_group is not None and isinstance(found, Outcome):
            bits = [value.numpy().tobytes() for value in found.values]
            first, *others = everywhere((bits, sent), place.tp_group)
            assert all(other == first for other in others), "ranks have other bits, or send other things"
        assert isinstance(found, str) == isinstance(expected, str), found
        if isinstance(found, Outcome) and isinstance(expected, Outcome):
            compare(program, found, expected)
    except Exception as error:
        # torch lets a detached inference tensor be written to; deferred logits keep to its documented rule.
        if "Inplace update to inference tensor" not in str(error):
            raise AssertionError(f"{type(error).__name__}: {error}\n{program!r}") from error


def compare(program: Program, found: Outcome, expected: Outcome) -> None:
    if not program.close:
        pairs = zip((*found.values, *found.gradients), (*expected.values, *expected.gradients), strict=True)
        for mine, formula in pairs:
            largest = formula[formula.isfinite()].abs().flatten().tolist()
            bound = (2e-5 if program.single else 1e-10) * max([1.0, *largest])
            torch.testing.assert_close(mine.double(), formula, rtol=0, atol=bound, equal_nan=True)
        return
    for mine, formula in zip(found.values, expected.values, strict=True):
        torch.testing.assert_close(mine.double(), formula, rtol=2e-3, atol=1e-13)
    for mine, formula in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine, formula, rtol=0, atol=1e-3 * float(formula.abs().max()))


# --- on one rank, and on several


def places(ranks: int) -> Iterator[tuple[tuple[int, int], Place]]:
    """Yield this process's place in each layout ``(tp, cp)``, with groups that wait for a minute."""
    rank = dist.get_rank()
    for tp in (n for n in (1, 2, 4) if ranks % n == 0):
        by_tp = [list(range(first, first + tp)) for first in range(0, ranks, tp)]
        by_cp = [list(range(first, ranks, tp)) for first in range(tp)]
        minute = timedelta(seconds=60)
        of_tp, of_cp = (dist.new_subgroups_by_enumeration(lists, minute)[0] for lists in (by_tp, by_cp))
        yield (tp, ranks // tp), Place(rank % tp, rank // tp, of_tp, of_cp if tp < ranks else None)


def check_all(ranks: int, seeds: range, found: bool = False) -> None:
    """Check the programs of some seeds, and those of this number of ranks that were found before."""
    by_layout = dict(places(ranks)) if ranks > 1 else {(1, 1): Place()}
    shortened = [program for program in FOUND.values() if found and program.tp * program.cp == ranks]
    for program in [*shortened, *(drawn(seed, ranks) for seed in seeds)]:
        check(program, by_layout[program.tp, program.cp])


def check_operations(ranks: int, names: Iterable[str], times: int) -> None:
    """Let one rank alone do something with its logits, each rank in turn."""
    place = dict(places(ranks))[ranks, 1] if ranks > 1 else Place()
    turns = cycle(product((True, False), (1, 2), ("deferred", "existing"), range(ranks)))
    for name in names:
        for _ in range(times):
            single, divisions, made, odd = next(turns)
            steps = [Step("divided twice", -1, 0)] * divisions + [Step(name, -1, 0, alone=odd)]
            of_made = {"made": made, "single": single, "gradients": (name not in OVERWRITTEN,) * 3}
            program = Program(odd, tp=ranks, steps=tuple(steps), losses=ALL_LOSSES, **of_made)
            check(program, place, may_be_refused=False)


def test_on_one_rank() -> None:
    check_all(1, range(PROGRAMS[1][0]), found=True)
    check_operations(1, OPERATIONS, 2)


@on_ranks(2, megatron=False, timeout=180)
def test_on_two_ranks() -> None:
    check_all(2, range(PROGRAMS[2][0]), found=True)
    check_operations(2, QUICK, 1)


@pytest.mark.slow
@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ranks", PROGRAMS)
@on_ranks(lambda ranks: ranks, megatron=False, timeout=480)
def test_more(ranks: int, nightly: bool) -> None:
    check_all(ranks, range(*PROGRAMS[ranks][nightly : nightly + 2]))
    # One rank alone without a graph has no backward, and the others would wait: with ordinary logits, too.
    left_out = (*RESHAPING, "past the graph") if ranks > 1 else ()
    times = 8 // ranks if nightly else 1
    check_operations(ranks, (name for name in OPERATIONS if name not in left_out), times)
