"""Random programs on logits have the values and gradients of dense formulas in float64, on 1, 2 and 4 ranks.

``programs.py`` draws a program from a seed. It runs on ordinary logits of all ranks at once, whose losses are
formulas, and with this package, each tensor-parallel rank on its own part. No rank waits for another, and all
of them have the same bits and send alike. A failure prints the program.
"""

from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses import DeferredLogits, deferred_logits
from megatron_rl_patches.losses.vocab import output_layer
from megatron_rl_patches.losses.vocab.autograd import sum_gradient
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from tests.device_thread import device_thread
from tests.faults import programs
from tests.faults.program_losses import dense, inputs_of, ours
from tests.faults.programs import Loss, Program, Step
from tests.ranks import everywhere, on_ranks
from tests.references.losses import Inputs
from tests.references.sent_bytes import sent_bytes

#: Programs up to which the default suite goes, the slow one, and that of the night, by the number of ranks.
PROGRAMS = {1: (150, 220, 1500), 2: (30, 60, 400), 4: (0, 12, 100)}
#: Losses of the last tensor, which nobody draws together.
ALL_LOSSES = (
    *(Loss(kind, -1, 1, temperature=1.2) for kind in ("alone", "scores", "kept", "at", "topk", "mixture")),
    *(Loss("mutual", -1, 1, divergence=name) for name in DIVERGENCES if name != "generalized_kl"),
)
#: On several ranks: as frameworks call them.
OF_FRAMEWORKS = (Loss("labels", -1, 1), Loss("samples", -1, 1, temperature=1.2))
#: Programs that failed once, shortened, and one that is never drawn: the sequence is split, too.
FAILED_BEFORE = (
    # One rank writes out of place to what all have divided.
    Program(0, 2, steps=(Step("divide", 0, 0), Step("columns", -1, 0, alone=1)), losses=(Loss("at", -1, 0),)),
    Program(0, within="reentrant", losses=(Loss("at", 0, 0),)),
    # One rank writes to logits whose loss backward computes again.
    Program(1, 2, written_after=True, losses=(Loss("scores", 0, 0, within="checkpointed"),)),
    # A large finite mask over a rank.
    Program(0, tp=2, masked=-1e5, losses=(Loss("divergence", 0, 0, divergence="forward_kl"),)),
    # A write to .data, which no version counter sees.
    Program(
        0,
        written_after=True,
        steps=(*[Step("divided twice", -1, 0)] * 2, Step("clamped", -1, 0, 0)),
        losses=(Loss("alone", -1, 1),),
    ),
    *(
        Program(3, tp=2, sequence_parallel=split, gradients=(True, trains, trains), losses=ALL_LOSSES)
        for split, trains in product((False, True), repeat=2)
    ),
)
#: Operations of :data:`OPERATIONS` that the default suite has on one of two ranks.
QUICK = (
    *("masked_fill", "divided twice", "written", "written, then divided", "hooked", "function of its own"),
    *("written by data of columns", "written by numpy", "written by a collective", "read"),
)
Leaves = tuple[Tensor, Tensor, Tensor]


class Outcome(NamedTuple):
    values: list[Tensor]
    gradients: list[Tensor]


class Reference:
    """The program on ordinary logits of all ranks; ``refused`` if torch refuses the program."""

    def __init__(self, program: Program) -> None:
        self.program, self.refused = program, False
        of_ranks = [leaves_of(program, rank) for rank in range(program.tp)]
        leaves = [
            [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in of_rank]
            for of_rank in of_ranks
        ]
        self.leaves = [(leaves[0][0], *of_rank) for _, *of_rank in leaves]  # they share their hidden states
        self.inputs: list[Inputs] = []
        self.values: list[Tensor] = []
        # No view: a hook of a view is lost when somebody writes to it.
        tensors = [[linear(*of_rank).clone()] for of_rank in self.leaves]
        try:
            for rank, of_rank in enumerate(tensors):
                for step in program.steps:
                    programs.run_step(step, of_rank, rank)
            for loss in program.losses:
                logits = torch.cat([chosen_of(loss, of_rank) for of_rank in tensors], -1)
                self.inputs.append(inputs_of(loss, logits.detach()))
                self.values.append(dense(loss, self.inputs[-1], logits))
            backward(self.values)
        except (RuntimeError, IndexError) as error:
            assert "megatron_rl_patches" not in str(error)
            self.refused = True

    def of(self, rank: int) -> Outcome:
        """Return what a rank must find."""
        gradients = gradients_of(self.leaves[rank])
        if self.program.sequence_parallel:
            gradients[0] = gradients[0].chunk(self.program.tp)[rank]
        return Outcome([values.detach() for values in self.values], gradients)


def columns_of(program: Program, rank: int) -> slice:
    return slice(rank * program.width, (rank + 1) * program.width)


def leaves_of(program: Program, rank: int) -> Leaves:
    """Return hidden states, and weight and bias of a rank."""
    random = partial(torch.randn, generator=torch.Generator().manual_seed(program.seed), dtype=torch.float64)
    size, dtype = program.width * program.tp, torch.float32 if program.single else torch.float64
    hidden, weight, bias = random(programs.B, programs.S, programs.H), random(size, programs.H), random(size)
    if program.masked:
        bias[size // 2 :] = program.masked
    columns = columns_of(program, rank)
    leaves = hidden.to(dtype), weight[columns].to(dtype), bias[columns].to(dtype, copy=True)
    for leaf, has_gradient in zip(leaves, program.gradients, strict=True):
        leaf.requires_grad_(has_gradient)
    return leaves


def chosen_of(loss: Loss, tensors: list[Tensor]) -> Tensor:
    """Return the rows that a loss is of."""
    chosen = tensors[loss.of % len(tensors)]
    return chosen.reshape(-1, chosen.shape[-1])


def backward(values: list[Tensor]) -> None:
    """Of a sum in which each value has a weight of its own."""
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in values]
    total: Any = sum((weight * x).sum() for weight, x in zip(weights, values, strict=True))
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()


def gradients_of(leaves: Leaves) -> list[Tensor]:
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in needed]


def made(program: Program, leaves: Leaves, group: dist.ProcessGroup | None) -> Tensor:
    hidden, weight, bias = leaves

    def make(x: Tensor) -> Tensor:
        if program.made == "deferred":
            x = x * 1 if program.within else x
            how = {"sequence_parallel": program.sequence_parallel, "tile_bytes": program.tile_bytes}
            return deferred_logits(x, weight, bias=bias, tp_group=group, **how)
        return linear(sum_gradient(x, group), weight, bias).clone()

    if not program.within:
        return make(hidden)
    return checkpoint(make, hidden, use_reentrant=program.within == "reentrant")


def outcome(program: Program, reference: Reference, rank: int, group: dist.ProcessGroup | None) -> Outcome:
    """Return what this package makes of the program on this rank."""
    leaves, columns = leaves_of(program, rank), columns_of(program, rank)
    if program.sequence_parallel:
        mine = leaves[0].detach().chunk(program.tp)[rank].clone().requires_grad_()
        leaves = (mine, *leaves[1:])
    tensors = [made(program, leaves, group)]
    for step in program.steps:
        programs.run_step(step, tensors, rank)
    pairs = zip(program.losses, reference.inputs, strict=True)
    values = [ours(loss, inputs, chosen_of(loss, tensors), columns, group) for loss, inputs in pairs]
    if program.written_after and rank == program.seed % program.tp:
        write_after(program, tensors)
    backward(values)
    return Outcome([x.detach() for x in values], gradients_of(leaves))


def write_after(program: Program, tensors: list[Tensor]) -> None:
    # A loss in torch's own reentrant checkpoint reads the logits a second time.
    may_write = all(loss.within != "reentrant" for loss in program.losses)
    for x, way in zip(tensors, cycle(programs.MEMORY.values()), strict=False):
        if isinstance(x, DeferredLogits):
            memory = way(x.detach())
            memory.fill_(7.0) if may_write else None


def check(program: Program, group: dist.ProcessGroup | None, may_be_refused: bool = True) -> None:
    rank, reference = dist.get_rank() if group else 0, Reference(program)
    if reference.refused:
        assert may_be_refused, program
        return
    try:
        # Half of the programs have their backward in a thread of autograd, as on CUDA.
        in_thread = device_thread() if program.seed % 2 else nullcontext()
        few_columns = mock.patch.object(output_layer, "_FEWEST_COLUMNS", program.fewest_columns)
        with sent_bytes() as sent, in_thread, few_columns:
            measured = outcome(program, reference, rank, group)
        if group is not None:
            bits = [value.numpy().tobytes() for value in measured.values]
            first, *others = everywhere((bits, sent), group)
            assert all(other == first for other in others), "ranks have other bits, or send other things"
        compare(program, measured, reference.of(rank))
    except Exception as error:
        # torch lets a detached inference tensor be written to; deferred logits keep to its documented rule.
        if "Inplace update to inference tensor" not in str(error):
            raise AssertionError(f"{type(error).__name__}: {error}\n{program!r}") from error


def compare(program: Program, measured: Outcome, expected: Outcome) -> None:
    results, formulas = ([*one.values, *one.gradients] for one in (measured, expected))
    for mine, formula in zip(results, formulas, strict=True):
        largest = formula[formula.isfinite()].abs().flatten().tolist()
        bound = (2e-5 if program.single else 1e-10) * max([1.0, *largest])
        torch.testing.assert_close(mine.double(), formula, rtol=0, atol=bound, equal_nan=True)


def check_all(
    ranks: int, seeds: range, names: Iterable[str], times: int, failed_before: bool = False
) -> None:
    """Check programs of some seeds, and what one rank alone does with its logits, each rank in turn."""
    group = dist.new_group(timeout=timedelta(seconds=60)) if ranks > 1 else None
    shortened = [program for program in FAILED_BEFORE if failed_before and program.tp == ranks]
    for program in [*shortened, *(programs.drawn(seed, ranks) for seed in seeds)]:
        check(program, group)
    turns = cycle(product((True, False), (1, 2), ("deferred", "ordinary"), range(ranks)))
    for name in [name for name in names for _ in range(times)]:
        single, divisions, made, odd = next(turns)
        steps = [Step("divided twice", -1, 0)] * divisions + [Step(name, -1, 0, alone=odd)]
        of_made = {"made": made, "single": single, "gradients": (name not in programs.OVERWRITTEN,) * 3}
        of_made["written_after"] = True
        of_made["losses"] = ALL_LOSSES + OF_FRAMEWORKS * (ranks > 1)
        program = Program(odd, tp=ranks, steps=tuple(steps), **of_made)
        check(program, group, may_be_refused=False)


@pytest.mark.parametrize(("ranks", "names"), [(1, [*programs.OPERATIONS]), (2, QUICK)], ids=["1", "2"])
@on_ranks(lambda ranks: ranks, cpu_backend=False, timeout=180)
def test_programs(ranks: int, names: list[str]) -> None:
    check_all(ranks, range(PROGRAMS[ranks][0]), names, 1, failed_before=True)


@pytest.mark.slow
@pytest.mark.parametrize("nightly", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ranks", PROGRAMS)
@on_ranks(lambda ranks: ranks, cpu_backend=False, timeout=480)
def test_more(ranks: int, nightly: bool) -> None:
    # One rank alone without a graph has no backward, and the others would wait: with ordinary logits, too.
    left_out = (*programs.RESHAPING, "past the graph") if ranks > 1 else ()
    names = [name for name in programs.OPERATIONS if name not in left_out]
    times = (8 if nightly else 2) // ranks or 1
    check_all(ranks, range(*PROGRAMS[ranks][nightly : nightly + 2]), names, times)
