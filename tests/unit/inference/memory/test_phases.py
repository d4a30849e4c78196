"""Which phase memory is counted in, with an allocator of CUDA that is made up; and what is logged."""

from __future__ import annotations

import json
import re
from functools import partial
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


class Chunk(torch.nn.Linear):
    """On a device that holds 1 GiB; what it uses comes on top, for a moment."""

    def __init__(self, monkeypatch: MonkeyPatch) -> None:
        super().__init__(2, 2)
        self.peak = 1
        stats = lambda _: {"allocated_bytes": {"all": {"peak": self.peak * GIB}}}  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", stats, raising=False)
        reset = partial(setattr, self, "peak", 1)
        monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda _: reset(), raising=False)
        monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda *args, **kwargs: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(report, "reset_peaks", {})

    def use(self, gib: int) -> None:
        self.peak = max(self.peak, 1 + gib)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.use(20 if torch._C._current_graph_task_id() >= 0 else 2)
        return super().forward(x)


class Optimizer(torch.optim.SGD):
    def step(self, use: Any = lambda _: None) -> None:  # type: ignore[override]
        use(4)


@pytest.fixture
def parts(monkeypatch: MonkeyPatch) -> tuple[Chunk, Optimizer]:
    chunk = Chunk(monkeypatch)
    return chunk, Optimizer(chunk.parameters(), 0.1)


def logged(caplog: LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return what stands before the JSON of each line, and the JSON."""
    found = [re.fullmatch(r".*(peak.*): ({.*})\..*", line) for line in caplog.messages]
    caplog.clear()
    return [(match[1], json.loads(match[2])) for match in found if match]


def is_left(parts: tuple[Chunk, Optimizer]) -> bool:
    chunk, optimizer = parts
    return bool(chunk._forward_pre_hooks or chunk._forward_hooks or "step" in vars(optimizer) or report._open)


X = torch.ones(2)


def test_passes_and_steps_are_phases(parts: Any, caplog: LogCaptureFixture) -> None:
    chunk, optimizer = parts
    with MemoryPhases([chunk], optimizer) as phases:
        with torch.no_grad():
            chunk(X)
            chunk.use(3)  # the scores
        checkpoint(chunk, chunk(X), use_reentrant=False).sum().backward()
        torch.optim.lr_scheduler.LambdaLR(optimizer, float)  # it wraps the method
        optimizer.step(chunk.use)
        with phases("save"):
            with phases("copy"):
                chunk.use(7)
                chunk(X)
            chunk.use(6)
    in_gib = {
        "other": 1,
        "scoring": 4,
        "forward": 3,
        "loss and backward": 21,
        "step": 5,
        "save": 7,
        "copy": 8,
    }
    assert phases.peaks == {name: peak * GIB for name, peak in in_gib.items()}
    line = "peak memory by phase until the end, in GiB"
    assert logged(caplog) == [(line, {"measured": "cuda:1", **in_gib})]
    assert not is_left(parts)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_exception_is_logged_with_its_phase_on_every_rank(
    parts: Any, rank: str, caplog: LogCaptureFixture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    chunk, optimizer = parts

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    for fails, phase in (
        (lambda phases: chunk(X), "loss and backward"),
        (lambda phases: phases("save")(fail)(), "save"),
        (lambda phases: optimizer.step(fail), "step"),
        (lambda phases: chunk(fail), "forward"),
        (fail, "other"),
    ):
        with pytest.raises(Exception), MemoryPhases(*parts, logs=False) as phases:  # noqa: B017
            fails(phases)
            fail()
        assert phases.phase == phase and not is_left(parts)
        [(line, _)] = logged(caplog)
        assert re.fullmatch(f"peak memory by phase until [A-Za-z]+Error in '{phase}', in GiB", line)
    with MemoryPhases(chunk):
        pass
    assert len(logged(caplog)) == (rank == "0")


def test_blocks_are_nested_and_others_see_the_peak_of_all(parts: Any, caplog: LogCaptureFixture) -> None:
    (chunk, _), own = parts, torch.cuda.memory_stats
    with applied("reentrant-train", settings=Settings(memory_phases=True)):
        chunk.use(9)
        with MemoryPhases() as outer:
            with MemoryPhases(name="scoring", logs=False) as inner:
                chunk.use(5)
            with MemoryPhases(name="save", peaks=inner.peaks):
                chunk.use(1)
        assert outer.peaks == {"other": 6 * GIB}
        assert logged(caplog)[0][1] == {"measured": "cuda:1", "scoring": 6, "save": 2}
        assert torch.cuda.max_memory_allocated() == 10 * GIB
        torch.cuda.reset_peak_memory_stats()
        chunk.use(2)
        with MemoryPhases():
            pass
        assert torch.cuda.max_memory_allocated() == 3 * GIB
    assert torch.cuda.max_memory_allocated() == GIB and torch.cuda.memory_stats is own


def test_without_a_device_it_is_resident_memory(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    sizes = iter([1, 5, 4, 3])
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=next(sizes) * GIB))
    for expected in ({"measured": "rss", "other": 5, "save": 4}, {"measured": None}):  # then no size is left
        with MemoryPhases(torch.nn.Linear(2, 2)) as phases, phases("save"):
            pass
        assert logged(caplog)[-1][1] == expected
