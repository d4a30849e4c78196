"""Copies of tensors to a GPU, and how the problems of several ranks are told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.common import devices
from megatron_rl_patches.common.agreement import agreed, all_or_none, raise_on_all, summary
from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.testing.cuda_redirect import CudaToCpu

DEVICE = torch.device("cuda", 0)
Access = tuple["Stream", int, bool]  # the stream, its number there, and whether it writes


class Stream:
    """A stream whose ``seen`` says how many operations of each stream have ended before its next one."""

    def __init__(self) -> None:
        self.seen: Counter[Stream] = Counter()

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen

    def run(self, memory: Tensor, accesses: dict[int, list[Access]], writes: bool) -> None:
        """Read or write memory; fail if another stream may do so at the same time."""
        earlier = accesses.setdefault(memory.untyped_storage().data_ptr(), [])
        for stream, number, has_written in earlier:
            assert number <= self.seen[stream] or not (writes or has_written), "a race"
        self.seen[self] += 1
        earlier.append((self, self.seen[self], writes))


class Gpu:
    def __init__(self) -> None:
        self.current, self.side = Stream(), Stream()
        self.accesses: dict[int, list[Access]] = {}
        self.buffers: list[Tensor] = []

    def buffer(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.buffers.append(torch.zeros(tensor.shape))
        return self.buffers[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU's two streams, whose memory is in the host's."""
    gpu, copy = Gpu(), Tensor.copy_

    def copy_(tensor: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        gpu.current.run(tensor, gpu.accesses, writes=True)
        gpu.current.run(source, gpu.accesses, writes=False)
        return copy(tensor, source, non_blocking)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(devices, "_copying_stream", lambda device: gpu.side)
    monkeypatch.setattr(torch, "empty_like", gpu.buffer)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    return gpu


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_next_tensor_is_copied_beside_computing_and_no_memory_is_used_twice(count: int, gpu: Gpu) -> None:
    whole = torch.arange(30.0).view(10, 3)
    gpu.current.run(whole, gpu.accesses, writes=True)  # another copy to host memory, which is still going on
    tensors = whole.chunk(count)
    for number, tensor in enumerate(devices.each_prefetched(tensors, DEVICE)):
        assert tensor.equal(tensors[number])
        gpu.current.run(tensor, gpu.accesses, writes=False)
        if number + 1 < count:  # the copy of the next one waits for all that was computed before this
            assert gpu.side.seen[gpu.current] == gpu.current.seen[gpu.current] - 1
    assert len(gpu.buffers) == min(count, 2) == len(gpu.accesses) - 1


def test_memory_is_given_back_after_the_last_copy(gpu: Gpu) -> None:
    tensors = devices.each_prefetched(torch.empty(10, 3).chunk(5), DEVICE)
    next(tensors)
    tensors.close()
    for buffer in gpu.accesses.values():
        [(stream, number, _)] = buffer[-1:]
        assert number <= gpu.current.seen[stream]


def test_tensors_of_all_kinds_are_copied_together() -> None:
    tensors = [torch.rand(3), torch.arange(4).view(2, 2), torch.ones(5, 1).bool(), torch.empty(0, 7).double()]
    copies = devices.copied_together(tensors, "cpu")
    assert all(copy.dtype == x.dtype and copy.equal(x) for copy, x in zip(copies, tensors, strict=True))
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_an_expanded_tensor_is_copied_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As positions of several sequences are, or an attention mask."""

    def pin_memory(tensor: Tensor) -> Tensor:
        # torch gives the copy in pinned memory the same strides.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    positions = torch.arange(5).expand(3, -1)
    with CudaToCpu():
        assert torch.equal(devices.on_device(positions, torch.device("cuda")), positions)


# --- problems of several ranks


def test_ranks_that_failed_alike_are_named_together() -> None:
    assert summary(["gone"]) == "every rank: gone"
    assert summary(["gone", None, "gone", "cut"]) == "ranks 0, 2: gone; rank 3: cut"


def test_a_process_without_a_group_is_alone() -> None:
    raise_on_all(None)
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        raise_on_all("no data")
    assert agreed(1, None, None) == [1]
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        agreed(1, "no data", None)
    message = r"^reading: every rank: KeyError: 'a'\. All is old\.$"
    reading = all_or_none("reading", error=CheckpointError, outcome="All is old.")
    with pytest.raises(CheckpointError, match=message) as raised, reading:
        raise KeyError("a")
    assert isinstance(raised.value.__cause__, KeyError)
