"""Which phase memory is counted in, with an allocator of CUDA that is made up; and what is logged."""

import json
import re
from functools import partial
from unittest.mock import Mock

import psutil
import pytest
import torch
from pytest import LogCaptureFixture, MonkeyPatch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.inference import MemoryPhases
from megatron_rl_patches.inference.memory import report
from megatron_rl_patches.reentry import reentrant_train

GIB, X = 2**30, torch.ones(2)


class Chunk(torch.nn.Linear):
    """On a device that holds 1 GiB; what it uses comes on top, for a moment."""

    peak = 1

    def use(self, gib: int) -> None:
        self.peak = max(self.peak, 1 + gib)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.use(20 if torch._C._current_graph_task_id() >= 0 else 2)
        return super().forward(x)


Parts = tuple[Chunk, torch.optim.SGD]


@pytest.fixture
def parts(monkeypatch: MonkeyPatch) -> Parts:
    chunk = Chunk(2, 2)
    stats = lambda _: {"allocated_bytes": {"all": {"peak": chunk.peak * GIB}}}  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", stats, raising=False)
    reset = partial(setattr, chunk, "peak", 1)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda _: reset(), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda n=None, **_: 1 if n is None else n)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(report, "_reset_peaks", {})
    return chunk, torch.optim.SGD(chunk.parameters(), 0.1)


def is_left(parts: Parts) -> bool:
    chunk, optimizer = parts
    return bool(chunk._forward_pre_hooks or chunk._forward_hooks or "step" in vars(optimizer) or report._open)


@pytest.mark.filterwarnings("error")
def test_passes_and_steps_are_phases(parts: Parts, caplog: LogCaptureFixture) -> None:
    chunk, optimizer = parts
    scheduler = LambdaLR(optimizer, float)  # it wraps the method, and warns if somebody else does
    step = optimizer.step
    with MemoryPhases([chunk], optimizer) as phases:
        with torch.no_grad():
            chunk(X)
            chunk.use(3)  # the scores
        checkpoint(chunk, chunk(X), use_reentrant=False).sum().backward()
        optimizer.step(partial(chunk.use, 4))
        scheduler.step()
        with phases("save"):
            chunk.use(6)
    in_gib = {"other": 1, "scoring": 4, "forward": 3, "loss and backward": 21, "step": 5, "save": 7}
    assert phases.peaks == {name: peak * GIB for name, peak in in_gib.items()}
    start, text = re.findall(r"(peak .*): ({.*})\.", caplog.text)[0]
    assert start == "peak memory by phase until the end, in GiB" and optimizer.step is step
    assert json.loads(text) == {"measured": "cuda:1", **in_gib}


def test_an_exception_is_logged_with_its_phase_on_every_rank(
    parts: Parts, caplog: LogCaptureFixture, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    chunk, optimizer = parts

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    for fails, phase in (
        (lambda phases: chunk(X), "loss and backward"),
        (lambda phases: phases("save")(fail)(), "save"),
        (lambda phases: optimizer.step(fail), "step"),
        (lambda phases: chunk(fail), "forward"),
    ):
        with pytest.raises(Exception), MemoryPhases(*parts, logs=False) as phases:  # noqa: B017
            fails(phases)
            fail()
        assert phases.phase == phase and not is_left(parts)
        assert re.search(rf"until [A-Za-z]+Error in '{phase}', in GiB: {{", caplog.messages[-1])
    with MemoryPhases(chunk):
        pass
    assert len(caplog.messages) == 4


def test_a_block_that_cannot_begin_leaves_nothing_and_mocks_keep_their_step(parts: Parts) -> None:
    chunk, _ = parts
    refuses = Mock(config=None, register_forward_pre_hook=Mock(side_effect=RuntimeError("a scripted module")))
    with pytest.raises(RuntimeError, match="a scripted module"), MemoryPhases([chunk, refuses]):
        pass
    assert not is_left(parts)
    with MemoryPhases(optimizer=(mock := Mock())):
        pass
    mock.step()


def test_blocks_are_nested_and_others_see_the_peak_of_all(parts: Parts, caplog: LogCaptureFixture) -> None:
    (chunk, _), own = parts, torch.cuda.memory_stats
    with applied("reentrant-train", settings=Settings(memory_phases=True)):
        chunk.use(9)
        with MemoryPhases() as outer:
            with MemoryPhases(name="scoring", logs=False) as inner:
                chunk.use(5)
            with MemoryPhases(name="save", peaks=inner.peaks):
                chunk.use(1)
        assert outer.peaks == {"other": 6 * GIB}
        assert '{"measured": "cuda:1", "scoring": 6.0, "save": 2.0}' in caplog.messages[0]
        for device, gib in ((None, 10), (1, 10), (0, 1)):
            assert torch.cuda.max_memory_allocated(device) == gib * GIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == GIB
        caplog.clear()
        assert not (train := reentrant_train(lambda model, optimizer: chunk.use(7)))(*parts)
    assert torch.cuda.memory_stats is own and not train(*parts)
    assert re.search('"other": 8.0}.* logs=False those of your own block', *caplog.messages)


def test_without_a_device_it_is_resident_memory(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    sizes = iter([1, 5, 4, 3])
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: Mock(rss=next(sizes) * GIB))
    for expected in ('"rss", "other": 5.0, "save": 4.0', "null"):  # then no size is left
        with MemoryPhases(torch.nn.Linear(2, 2)) as phases, phases("save"):
            pass
        assert f'{{"measured": {expected}}}' in caplog.messages[-1]
