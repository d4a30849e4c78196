"""How many bytes the tensors of this process hold, whoever holds them."""

from __future__ import annotations

import gc

import torch


def live_bytes() -> int:
    """Sum over the storages of all tensors that the garbage collector can reach; views count once.

    Parameters, gradient buffers and optimizer state are all reachable. Take the difference to a baseline.
    """
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # isinstance() would ask proxies for their class, which some answer with a warning or an import.
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
