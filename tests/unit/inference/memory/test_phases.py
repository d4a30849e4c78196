"""Which phase memory is counted in, on an allocator of CUDA that is made up; and what is logged."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.inference import MemoryPhases
from megatron_rl_patches.inference.memory import report

GIB = 2**30


class Allocator:
    """What ``torch.cuda`` says of GiB that :meth:`use` allocates and frees at once."""

    def __init__(self, monkeypatch: MonkeyPatch) -> None:
        self.peak = self.held = 1
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", self.stats, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", self.reset, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda *args, **kwargs: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def use(self, gib: int) -> None:
        self.peak = max(self.peak, self.held + gib)

    def stats(self, device: int) -> Any:
        return {"allocated_bytes": {"all": {"current": self.held * GIB, "peak": self.peak * GIB}}}

    def reset(self, device: int) -> None:
        self.peak = self.held


@pytest.fixture
def cuda(monkeypatch: MonkeyPatch) -> Allocator:
    monkeypatch.setattr(report, "hidden_peaks", {})
    return Allocator(monkeypatch)


class Chunk(torch.nn.Linear):
    """A model chunk that takes so many GiB in a forward pass, and in its backward."""

    def __init__(self, cuda: Allocator) -> None:
        super().__init__(2, 2)
        self.cuda, self.fails = cuda, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cuda.use(20 if torch._C._current_graph_task_id() >= 0 else 2)
        x = super().forward(x)
        if self.fails:
            raise torch.OutOfMemoryError
        if x.requires_grad:
            x.register_hook(lambda _: self.cuda.use(8))
        return x


class Optimizer(torch.optim.SGD):
    cuda: Allocator

    def step(self, closure: Any = None) -> Any:
        self.cuda.use(4)
        return super().step()


def lines(caplog: LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return what stands before the JSON of each line, and the JSON."""
    texts = [record.getMessage().removeprefix("megatron_rl_patches: ") for record in caplog.records]
    caplog.clear()
    return [
        (text.partition(": {")[0], json.loads(text[text.index("{") : text.index("}") + 1])) for text in texts
    ]


@pytest.fixture
def parts(cuda: Allocator) -> tuple[Chunk, Optimizer]:
    chunk = Chunk(cuda)
    optimizer = Optimizer(chunk.parameters(), 0.1)
    optimizer.cuda = cuda
    return chunk, optimizer


def test_passes_and_steps_are_phases(parts: Any, cuda: Allocator, caplog: LogCaptureFixture) -> None:
    chunk, optimizer = parts
    with MemoryPhases([chunk], optimizer) as phases:
        cuda.use(1)
        with torch.no_grad():
            chunk(torch.ones(2))
            cuda.use(3)  # the scores
        chunk(torch.ones(2)).sum().backward()
        torch.optim.lr_scheduler.LambdaLR(optimizer, float)  # it wraps the method
        optimizer.step()
        with phases("save"):
            cuda.use(6)
            with phases("copy"), torch.no_grad():
                cuda.use(7)
                chunk(torch.ones(2))
            cuda.use(5)
        cuda.use(0)
    in_gib = {"other": 2, "scoring": 4, "forward": 3, "loss and backward": 9, "step": 5, "save": 7, "copy": 8}
    assert phases.peaks == {name: peak * GIB for name, peak in in_gib.items()}
    assert lines(caplog) == [("peak memory by phase, in GiB", {"measured": "cuda:1", **in_gib})]
    assert not chunk._forward_pre_hooks and not chunk._forward_hooks and "step" not in vars(optimizer)
    assert not report._open


@pytest.mark.parametrize("inner", ["chunk", "all"])
def test_a_pass_within_backward_is_backward(parts: Any, inner: str) -> None:
    chunk, optimizer = parts
    x = torch.ones(2, requires_grad=True)
    with MemoryPhases(chunk, optimizer) as phases:
        y = chunk(x) if inner == "all" else x
        checkpoint(chunk, y, use_reentrant=False).sum().backward()
        chunk(x)
    assert phases.peaks["loss and backward"] == 21 * GIB and phases.peaks["forward"] == 3 * GIB


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_is_logged_with_its_phase_on_every_rank(
    parts: Any, cuda: Allocator, rank: str, caplog: LogCaptureFixture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    chunk, optimizer = parts

    def fail_in_backward() -> None:
        y = chunk(torch.ones(2))
        y.register_hook(lambda _: 1 / 0)
        y.sum().backward()

    def fail_in_a_phase() -> None:
        with phases("save"):
            chunk.fails = True
            chunk(torch.ones(2))

    for fails, kind, phase in (
        (fail_in_backward, ZeroDivisionError, "loss and backward"),
        (fail_in_a_phase, torch.OutOfMemoryError, "save"),
        (lambda: chunk(torch.ones(2)), torch.OutOfMemoryError, "forward"),
        (lambda: optimizer.step(1 / 0), ZeroDivisionError, "other"),
    ):
        with pytest.raises(kind), MemoryPhases(chunk, optimizer, logs=False) as phases:
            fails()
        [(line, _)] = lines(caplog)
        assert line == f"peak memory by phase, in GiB until {kind.__name__} in {phase!r}"
        assert not chunk._forward_pre_hooks and not report._open
    with MemoryPhases(chunk):
        pass
    assert len(lines(caplog)) == (rank == "0")


def test_blocks_may_be_nested_and_go_on(cuda: Allocator, caplog: LogCaptureFixture) -> None:
    with MemoryPhases() as outer:
        cuda.use(3)
        with MemoryPhases(name="scoring", logs=False) as inner:
            cuda.use(5)
        with MemoryPhases(name="save", peaks=inner.peaks):
            cuda.use(1)
    assert outer.peaks == {"other": 6 * GIB}
    assert [line for _, line in lines(caplog)] == [
        {"measured": "cuda:1", "scoring": 6, "save": 2},
        {"measured": "cuda:1", "other": 6},
    ]


def test_the_option_leaves_to_others_what_torch_says(cuda: Allocator) -> None:
    cuda.use(9)
    own = torch.cuda.memory_stats
    with applied("reentrant-train", settings=Settings(memory_phases=True)):
        with MemoryPhases():
            cuda.use(3)
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory.max_memory_allocated() == 10 * GIB
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == GIB
        torch.cuda.reset_peak_memory_stats()
        cuda.use(2)
        with MemoryPhases():
            pass
        assert torch.cuda.max_memory_allocated() == 3 * GIB
    assert torch.cuda.max_memory_allocated() == GIB
    assert torch.cuda.memory_stats is torch.cuda.memory.memory_stats is own


def test_without_a_device_it_is_resident_memory(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    sizes = iter([1, 5, 4, 3])
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=next(sizes) * GIB))
    with MemoryPhases() as phases, phases("save"):
        pass
    assert lines(caplog)[0][1] == {"measured": "rss", "other": 5, "save": 4}


def test_an_error_of_its_own_is_harmless(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: 1 / 0)
    with MemoryPhases(torch.nn.Linear(2, 2)) as phases, phases("save"):
        pass
    assert lines(caplog)[-1][1] == {"measured": None}
