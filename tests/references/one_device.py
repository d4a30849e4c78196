"""The device of a program that runs on one rank: the GPU if there is one, otherwise the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed

from megatron_rl_patches.testing import cpu_backend


@contextmanager
def gpu_or_cpu() -> Iterator[str]:
    """Run megatron-core on the GPU with NCCL, or on the CPU with gloo; yield ``"cuda"`` or ``"cpu"``.

    Enter the block on a rank whose default process group is a gloo group. If that group has several ranks,
    they are on the CPU, since a GPU of its own for each is not taken for granted.
    """
    if not torch.cuda.is_available() or torch.distributed.get_world_size() > 1:
        with cpu_backend():
            yield "cpu"
        return
    torch.distributed.destroy_process_group()
    torch.cuda.set_device(0)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined, unused-ignore]
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield "cuda"
