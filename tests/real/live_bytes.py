"""How many bytes the tensors of this process hold, whoever holds them."""

from __future__ import annotations

import gc
import time

import torch


def live_bytes() -> int:
    """Sum over the storages of all tensors that the garbage collector can reach; views count once.

    Parameters, gradient buffers and optimizer state are all reachable. Take the difference to a baseline.
    Gloo's threads let go of a collective's tensors a little after the collective: wait until they have.
    """
    found = _reachable_bytes()
    while True:
        time.sleep(0.02)
        before, found = found, _reachable_bytes()
        if found == before:
            return found


def _reachable_bytes() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # isinstance() would ask proxies for their class, which some answer with a warning or an import.
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
