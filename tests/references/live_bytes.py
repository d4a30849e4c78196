"""Bytes that tensors hold: of one call as the allocator reports them, and of everything in this process."""

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile


class LiveBytes(NamedTuple):
    peak: int  # beyond what was live before the call
    retained: int  # when it returned, its result included


def live_bytes(call: Callable[[], Any]) -> LiveBytes:
    """Bytes that a call allocates and has not freed, those of compiled kernels included."""
    with profile(profile_memory=True) as profiled:
        result = call()
    assert profiled.kineto_results is not None
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return LiveBytes(peak, live)


def reachable_bytes() -> int:
    """Sum over the storages of all tensors that the garbage collector can reach; views count once.

    Parameters, gradient buffers and optimizer state are all reachable. Take the difference to a baseline.
    Gloo's threads let go of a collective's tensors a little after the collective: wait until they have.
    """
    total = _reachable_bytes()
    while True:
        time.sleep(0.02)
        before, total = total, _reachable_bytes()
        if total == before:
            return total


def _reachable_bytes() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # isinstance() would ask proxies for their class, which some answer with a warning or an import.
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            try:
                storage = thing.untyped_storage()
            except NotImplementedError:  # another thread freed the tensor after it was listed (torch 2.6)
                continue
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(call: Callable[[], object], on_gpu: bool) -> int:
    """Return the most bytes that a call has allocated at once, beyond those allocated before it."""
    if not on_gpu:
        return live_bytes(call).peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
