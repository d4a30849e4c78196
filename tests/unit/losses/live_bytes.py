"""Bytes that a call allocates and has not freed: as torch's allocators report, compiled kernels' too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.autograd.profiler import profile


class LiveBytes(NamedTuple):
    peak: int  # beyond what was live before the call
    retained: int  # when it returned, its result included


def live_bytes(call: Callable[[], Any]) -> LiveBytes:
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
