"""What one loss costs on each rank: live bytes, time beside a copy of the logits, error against float64."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.losses.live_bytes import live_bytes
from tests.unit.losses.logits.dense import dense_log_probs_and_entropy

from ._loss_candidates import CANDIDATES, ENTROPY_GRAD, LOG_PROBS, Candidate, Loss

REFERENCE_ROWS = 64
MIN_TURNS, MAX_TURNS = 3, 9
FEW_FAULTS = 1000  # pages of 4 KiB
HEAP = 10  # times float32 logits, more than any loss takes


@dataclass(frozen=True)
class Setup:
    tp_size: int
    rows: int
    vocab: int
    dtype: str

    @property
    def name(self) -> str:
        return f"TP {self.tp_size}, {self.dtype} [{self.rows}, {self.vocab}]"


@dataclass(frozen=True)
class Cost:
    """Times in copies of the logits, memory in bytes of the logits, errors relative to the largest value."""

    memory: float
    forward: float
    total: float
    log_prob_error: float
    entropy_error: float | None
    gradient_error: float


@dataclass(frozen=True)
class Floor:
    copy_ms: float
    read: float  # in copies
    read_and_write: float


@dataclass(frozen=True)
class Result:
    setup: Setup
    floor: Floor
    costs: dict[tuple[str, str], Cost]  # by candidate and mode
    missing: dict[str, str]  # why, by candidate


def measure(setups: Sequence[Setup], seconds: float) -> list[Result]:
    """On each rank of the same TP size; ``seconds`` for each candidate and mode."""
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    from megatron.core import parallel_state

    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    return [_Bench(setup, group, seconds).result() for setup in setups]


class _Turn(NamedTuple):
    """Seconds, and whether much memory was new to the process."""

    forward: float
    total: float
    copy: float
    faults: bool


class _Bench:
    def __init__(self, setup: Setup, group: dist.ProcessGroup, seconds: float) -> None:
        self.setup, self.group, self.seconds = setup, group, seconds
        self.device = torch.device("cuda", group.rank()) if torch.cuda.is_available() else torch.device("cpu")
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(setup.rows, setup.vocab, generator=generator) * 2
        targets = torch.randint(setup.vocab, (setup.rows,), generator=generator)
        width = setup.vocab // setup.tp_size
        self.columns = slice(group.rank() * width, (group.rank() + 1) * width)
        dtype = getattr(torch, setup.dtype)
        self.reference_logits = whole[:REFERENCE_ROWS].to(dtype)
        self.pristine = whole[:, self.columns].to(dtype).to(self.device)
        self.targets = targets.to(self.device)
        self.copy_into = torch.empty_like(self.pristine)
        self.weights = torch.randn(2, setup.rows, generator=generator).to(self.device)
        self.one = torch.ones((), dtype=dtype, device=self.device, requires_grad=True)
        self.bytes = self.pristine.numel() * self.pristine.element_size()

    def result(self) -> Result:
        costs: dict[tuple[str, str], Cost] = {}
        missing: dict[str, str] = {}
        floor = self._floor()
        for candidate in CANDIDATES:
            _warm_heap(HEAP * self.pristine.numel() * 4)
            try:
                costs |= self._costs(candidate)
            except Exception as error:
                missing[candidate.name] = _why(error)
        return Result(self.setup, floor, costs, missing)

    def _costs(self, candidate: Candidate) -> dict[tuple[str, str], Cost]:
        if self.setup.tp_size > 1 and not candidate.splits_vocabulary:
            raise NotImplementedError("does not split the vocabulary")
        loss = candidate.load()
        return {(candidate.name, mode): self._cost(loss, mode) for mode in candidate.modes}

    def _cost(self, loss: Loss, mode: str) -> Cost:
        errors = self._errors(loss, mode)  # and warm-up: compiles, and grows the heap
        memory = self._memory(loss, mode)
        turns: list[_Turn] = []
        deadline = time.perf_counter() + self.seconds
        while self._goes_on(turns, deadline):
            turns.append(self._turn(loss, mode))
        turns = [turn for turn in turns if not turn.faults] or turns
        forward, total, copy = (
            statistics.median(times)
            for times in zip(*((turn.forward, turn.total, turn.copy) for turn in turns), strict=True)
        )
        return Cost(memory, forward / copy, total / copy, *errors)

    def _goes_on(self, turns: Sequence[_Turn], deadline: float) -> bool:
        """Agreed on by all ranks, which meet here."""
        without_faults = sum(not turn.faults for turn in turns)
        wants_more = without_faults < MIN_TURNS or time.perf_counter() < deadline
        goes_on = torch.tensor([float(wants_more and len(turns) < MAX_TURNS)])
        dist.all_reduce(goes_on, op=dist.ReduceOp.MAX, group=self.group)
        return bool(goes_on.item())

    def _memory(self, loss: Loss, mode: str) -> float:
        logits = self._logits()
        return live_bytes(lambda: self._run(loss, logits, mode)).peak / self.bytes

    def _turn(self, loss: Loss, mode: str) -> _Turn:
        logits = self._logits()
        faults = _page_faults()
        marks = [self._now()]
        self._run(loss, logits, mode, after_forward=lambda: marks.append(self._now()))
        total = self._now() - marks[0]
        faults = _page_faults() - faults
        return _Turn(marks[1] - marks[0], total, self._time(self._copy), faults > FEW_FAULTS)

    def _logits(self) -> Tensor:
        """As a model hands them over: no leaf, and a storage of their own."""
        return self.pristine * self.one

    def _run(
        self, loss: Loss, logits: Tensor, mode: str, after_forward: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, ...]:
        """The gradient, and what the loss returned."""
        found = loss(logits, self.targets, self.group, mode)
        after_forward()
        values = [value for value in found if value.requires_grad]
        weights = [weight.to(value.dtype) for weight, value in zip(self.weights, values, strict=False)]
        return torch.autograd.grad(values, logits, weights)[0], *found

    def _errors(self, loss: Loss, mode: str) -> tuple[float, float | None, float]:
        """Of the first rows."""
        leaf = self.reference_logits.double().requires_grad_()
        targets = self.targets[:REFERENCE_ROWS].cpu()
        expected = dense_log_probs_and_entropy(leaf, targets)
        weights = self.weights[:, :REFERENCE_ROWS].cpu().double()
        used = 2 if mode == ENTROPY_GRAD else 1
        [gradient] = torch.autograd.grad(expected[:used], leaf, list(weights[:used]))

        gradient_of_loss, *values_of_loss = self._run(loss, self._logits(), mode)
        errors = [_error(values, exact) for values, exact in zip(values_of_loss, expected, strict=False)]
        entropy_error = None if mode == LOG_PROBS else errors[1]
        return errors[0], entropy_error, _error(gradient_of_loss, gradient[:, self.columns])

    def _floor(self) -> Floor:
        reads, writes, copies = [], [], []
        for _ in range(MAX_TURNS):
            reads.append(self._time(lambda: self.pristine.amax(1)))
            copies.append(self._time(self._copy))
            writes.append(self._time(lambda: self.copy_into.mul_(1.0)))
        copy, read, write = (statistics.median(times[1:]) for times in (copies, reads, writes))
        return Floor(copy * 1e3, read / copy, write / copy)

    def _copy(self) -> None:
        self.copy_into.copy_(self.pristine)

    def _time(self, call: Callable[[], Any]) -> float:
        start = self._now()
        call()
        return self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _error(found: Tensor, expected: Tensor) -> float:
    difference = found[:REFERENCE_ROWS].detach().cpu().double() - expected.detach()
    return (difference.abs().max() / expected.abs().max()).item()


def _warm_heap(size: int) -> None:
    """Start with one free stretch of memory that the process has touched, rather than with many pieces."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only; else the heap grows with each loss
        ctypes.CDLL(None).malloc_trim(0)
    torch.zeros(size, dtype=torch.uint8).add_(1)


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _why(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"not installed: {error.name}"
    return str(error).splitlines()[0][:120] or type(error).__name__
