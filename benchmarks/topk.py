"""Memory, time, error and bytes sent of top-k distillation: ours, the usual formula, and other frameworks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_at, vocab_parallel_topk
from tests.references.dense import dense_log_probs_at
from tests.references.sent_bytes import sent_bytes

from .candidates import NEMO_RL, Candidate, calls, checkout
from .logits import REFERENCE_ROWS, Logits, LogitsSetup
from .measure import DEVICE, Call, Result, largest_error, left_out, on_ranks, rows
from .page import Benchmark, Parts

Group = dist.ProcessGroup
#: Log-probs [T, K] and, where there is one, the tail's [T].
Values = tuple[Tensor, ...]
# (logits [T, V / tp], ids [T, K], group) -> values.
AtIds = Callable[[Tensor, Tensor, Group], Values]
# (logits [T, V / tp], k, group) -> ids [T, k].
Selection = Callable[[Tensor, int, Group], Tensor]
MOST_BYTES = 6 << 30


def ours(logits: Tensor, ids: Tensor, group: Group, **options: Any) -> Values:
    return vocab_parallel_log_probs_at(logits, ids, tp_group=group, with_tail=True, **options)


def naive(logits: Tensor, ids: Tensor, group: Group) -> Values:
    log_probs = torch.log_softmax(logits, 1).gather(1, ids)
    below_zero = -torch.finfo(log_probs.dtype).tiny
    return log_probs, (-log_probs.logsumexp(1).clamp(max=below_zero).expm1()).log()


def nemo_rl(module: Any, logits: Tensor, ids: Tensor, group: Group, chunk_size: int) -> Values:
    start, width = group.rank() * logits.shape[1], logits.shape[1]
    gather = module.ChunkedDistributedGatherLogprob.apply
    return (gather(logits[None], ids[None], start, start + width, chunk_size, group)[0],)


def openclaw(module: Any, logits: Tensor, ids: Tensor, group: Group) -> Values:
    """Its loop over the K ids, each with a copy of the logits, and its tail."""
    if ids.shape[1] * logits.nbytes > MOST_BYTES:
        raise MemoryError(f"keeps {ids.shape[1]} times the logits, which may be more than there is")
    columns = [module.compute_log_probs(logits.clone(), one, group).squeeze(-1) for one in ids.T]
    log_probs = torch.stack(columns, dim=-1)
    log_sum = torch.logsumexp(log_probs, dim=-1).clamp(max=-1e-7)
    return log_probs, torch.log(-torch.expm1(log_sum))


def select_ours(logits: Tensor, k: int, group: Group) -> Tensor:
    return vocab_parallel_topk(logits, k, tp_group=group).indices


def select_nemo_rl(module: Any, logits: Tensor, k: int, group: Group) -> Tensor:
    start, width = group.rank() * logits.shape[1], logits.shape[1]
    options = {"vocab_start_index": start, "vocab_end_index": start + width, "chunk_size": 128}
    return module.distributed_vocab_topk(logits[None], k, group, **options)[1][0]


def select_by_gathering(logits: Tensor, k: int, group: Group) -> Tensor:
    """The whole vocabulary to every rank, as the draft slime#2033 does."""
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits, group=group)
    return torch.cat(parts, 1).topk(k).indices


AT_IDS = (
    Candidate("ours", ours),
    Candidate("ours, in place", partial(ours, inplace_backward=True)),
    Candidate("log_softmax, log1mexp", naive, splits_vocabulary=False),
    Candidate("NeMo-RL, chunks of 128", partial(nemo_rl, chunk_size=128), NEMO_RL),
    Candidate("OpenClaw-RL, loop over ids", openclaw, checkout("OpenClaw-RL", "slime.utils.ppo_utils")),
)
SELECTIONS = (
    Candidate("ours", select_ours),
    Candidate("NeMo-RL, chunks of 128", select_nemo_rl, NEMO_RL),
    Candidate("all-gather of the vocabulary", select_by_gathering),
)

# Probability of the tail in the rows by which errors are measured.
TAILS = (1e-1, 1e-4, 1e-7, 1e-9)
#: Per row, what a rank sends; and errors.
DETAILS = {"bytes sent": ",.0f", "collectives": ".0f"}
DETAILS |= dict.fromkeys(("gradient error", *(f"tail {tail:g}" for tail in TAILS)), ".0e")
AT_GIVEN_IDS, SELECTION = "at given ids", "selection"


@dataclass(frozen=True)
class Setup(LogitsSetup):
    k: int = 64

    def __str__(self) -> str:
        return f"{super().__str__()}, K = {self.k}"


SETUPS = [setup for tp in (1, 2) for setup in (Setup(tp, 512, 32768, k=64), Setup(tp, 256, 151936, k=256))]
QUICK = [Setup(tp, 128, 4096, k=16) for tp in (1, 2)]


class Inputs(Logits):
    """What a rank's functions are given."""

    def __init__(self, setup: Setup, group: dist.ProcessGroup) -> None:
        super().__init__(setup, group)
        self.k = setup.k
        self.ids = torch.rand(setup.rows, setup.vocab, **self.options).topk(setup.k).indices

    def at_ids(self, at_ids: AtIds) -> Call:
        """Return the call of forward and backward."""

        def run(logits: Tensor) -> Tensor:
            values = at_ids(logits, self.ids, self.group)
            return torch.autograd.grad([value.sum() for value in values], logits)[0]

        def details() -> tuple[float, ...]:
            # Of log-probabilities, and of the tail where there is one, relative to the largest value.
            error = largest_error(*self._gradients(at_ids, self.first_rows, slice(None)))
            of_tails = (self._tail_error(at_ids, tail) for tail in TAILS)
            return *self._sent(partial(run, self.fresh())), error, *of_tails

        return Call(run, self.fresh, least_bytes=3 * self.pristine.nbytes, details=details)

    def selection(self, select: Selection) -> Call:
        def run(_: object) -> Tensor:
            return select(self.pristine, self.k, self.group)

        return Call(run, least_bytes=self.pristine.nbytes, details=lambda: self._sent(partial(run, None)))

    def _sent(self, call: Callable[[], object]) -> tuple[float, float]:
        """Return how many bytes per row a rank gives to collectives, and how many it calls."""
        with sent_bytes() as sent:
            call()
        return sum(nbytes for _, nbytes in sent) / len(self.ids), len(sent)

    def _tail_error(self, at_ids: AtIds, tail: float) -> float:
        """Relative, of the gradient of the tail's log-probability outside the ids."""
        ids = self.ids[:REFERENCE_ROWS].cpu()
        inside = torch.zeros_like(self.first_rows, dtype=torch.bool).scatter_(1, ids, True)
        p = self.first_rows.double().softmax(1)
        now = p.masked_fill(inside, 0.0).sum(1, keepdim=True)
        shift = torch.where(inside, ((1 / tail - 1) / ((1 - now) / now)).log(), 0.0)
        logits = self.first_rows + shift.to(self.first_rows.dtype)
        measured, expected = self._gradients(at_ids, logits, slice(1, 2))
        outside = ~inside[:, self.columns]
        return largest_error(measured[outside], expected[outside])

    def _gradients(self, at_ids: AtIds, logits: Tensor, which: slice) -> tuple[Tensor, Tensor]:
        """Of as many of the two values as there are: measured, and expected by float64."""
        ids = self.ids[:REFERENCE_ROWS]
        leaf = logits[:, self.columns].to(DEVICE, copy=True).requires_grad_()
        exact = logits.double().requires_grad_()
        values = at_ids(leaf * 1, ids, self.group)
        if not values[which]:
            return torch.full_like(leaf, math.nan).cpu(), exact.detach()[:, self.columns]
        reference = dense_log_probs_at(exact, ids.cpu())[: len(values)]
        [measured] = torch.autograd.grad([value.sum() for value in values[which]], leaf)
        [expected] = torch.autograd.grad([value.sum() for value in reference[which]], exact)
        return measured.cpu(), expected[:, self.columns]


def measure(quick: bool) -> list[Result]:
    return on_ranks(_measure, QUICK, turns=1) if quick else on_ranks(_measure, SETUPS)


def _measure(setup: Setup, turns: int) -> Result:
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    inputs = Inputs(setup, dist.new_group(list(range(setup.tp_size))))
    copy, result = inputs.copy(), Result(setup)
    at_ids = calls(AT_IDS, inputs.at_ids, result.left_out, setup.tp_size)
    result.measure(AT_GIVEN_IDS, copy | at_ids, turns)
    selections = calls(SELECTIONS, inputs.selection, result.left_out, setup.tp_size)
    result.measure(SELECTION, copy | selections, turns)
    return result


def parts(results: Sequence[Result]) -> Parts:
    return {"top-k": rows(results, "mode", "way", DETAILS), "left out": left_out(results)}


BENCHMARK = Benchmark(measure, parts)
