"""The parts of :class:`~megatron_rl_patches.testing.MockDDP`: modules, configuration, bucket groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class MockConfig:
    """The part of ``TransformerConfig`` that training loops read and write."""

    no_sync_func: Any = None
    grad_sync_func: Any = None
    param_sync_func: Any = None
    finalize_model_grads_func: Any = None
    grad_scale_func: Any = None
    timers: Any = None


@dataclass
class MockDDPConfig:
    """The part of ``DistributedDataParallelConfig`` that decides what is dispatched when."""

    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = False
    align_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False


class MockProcessGroup:
    """A process group of this rank alone: there is nobody to communicate with."""

    size = staticmethod(lambda: 1)
    rank = staticmethod(lambda: 0)


class MockModule(torch.nn.Module):
    """A module whose forward pass calls the modules below it, one after the other, and computes nothing.

    Args:
        children: the modules below it.
        params: how many parameters it holds itself, each a zero.
        expert: whether these belong to an expert, and so to a bucket group of experts.
    """

    def __init__(self, *children: torch.nn.Module, params: int = 0, expert: bool = False) -> None:
        super().__init__()
        for number, child in enumerate(children):
            self.add_module(str(number), child)
        for number in range(params):
            param = torch.nn.Parameter(torch.zeros(()))
            param.allreduce = not expert  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", param)

    @classmethod
    def tiny(cls) -> MockModule:
        """Return an embedding, two layers in a decoder, and a head: six parameters in four bucket groups."""
        return cls(cls(params=1), cls(cls(params=2), cls(params=2)), cls(params=1))

    def forward(self, *args: Any, **kwargs: Any) -> None:
        for child in self.children():
            child(*args, **kwargs)


class MockBucketGroup:
    """Stands for ``_ParamAndGradBucketGroup``, which keeps track of outstanding collectives.

    The real class lacks ``is_stale``, true from an optimizer step until a gather that began later is done,
    and ``is_unreduced``, true from a backward pass until a reduction that began later is done.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], ddp_config: Any, process_group: Any) -> None:
        self.params = set(params)
        self.ddp_config = ddp_config
        if ddp_config.use_distributed_optimizer:
            self.intra_distributed_optimizer_instance_group = process_group
        else:
            self.data_parallel_group = process_group
        self.next_param_gather_bucket_group: MockBucketGroup | None = None
        self.golden_per_param_grad_ready_counts: dict[torch.nn.Parameter, int] = {}
        self.per_param_grad_ready_counts: dict[torch.nn.Parameter, int] = {}
        self.is_last_microbatch = True
        self.is_first_batch = True
        # What an asynchronous collective returns. Waiting switches off a mark, unless that was set meanwhile.
        self.param_gather_handle: SimpleNamespace | None = None
        self.param_gather_dispatched = False
        self.grad_reduce_handle: SimpleNamespace | None = None
        self.is_stale = False
        self.is_unreduced = False

    def mark(self, name: str, handle: SimpleNamespace | None) -> None:
        """Set a mark, which a collective that is in flight does not switch off."""
        setattr(self, name, True)
        if handle is not None:
            handle.wait = lambda: None

    def reset(self) -> None:
        self.is_unreduced = False
        if self.is_first_batch and self.per_param_grad_ready_counts:
            assert len(self.per_param_grad_ready_counts) == len(self.params)
            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts
            self.is_first_batch = False
        self.per_param_grad_ready_counts = {}
        self.is_last_microbatch = True

    def start_param_sync(self, force_sync: bool = False) -> None:
        assert self.ddp_config.use_distributed_optimizer
        if not force_sync:
            assert self.param_gather_handle is None
        elif self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            return
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = SimpleNamespace(wait=partial(setattr, self, "is_stale", False))
        else:
            self.is_stale = False
        self.param_gather_dispatched = True

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        assert self.ddp_config.use_distributed_optimizer
        assert self.ddp_config.overlap_param_gather
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            following = self.next_param_gather_bucket_group
            if following and not (skip_next_bucket_dispatch or following.param_gather_dispatched):
                following.start_param_sync()

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        message = "Should not have multiple communication calls outstanding at once"
        assert self.grad_reduce_handle is None, message
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = SimpleNamespace(wait=partial(setattr, self, "is_unreduced", False))
        else:
            self.is_unreduced = False

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.param_gather_dispatched = False
        if self.is_first_batch or not self.ddp_config.overlap_grad_reduce:
            self.start_grad_sync(force_all_reduce)
        if not self.ddp_config.overlap_grad_reduce:
            return
        assert self.grad_reduce_handle is not None, (
            "Communication call has not been issued for this bucket "
            f"({len(self.per_param_grad_ready_counts)}/{len(self.params)} params have grad available)"
        )
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None

    def register_grad_ready(self, param: torch.nn.Parameter, force_all_reduce: bool = False) -> None:
        message = "register_grad_ready() should only be called when overlap_grad_reduce is True"
        assert self.ddp_config.overlap_grad_reduce, message
        if not self.is_last_microbatch:
            return
        assert param in self.params, "Param is not in the bucket group"
        counts = self.per_param_grad_ready_counts
        counts[param] = counts.get(param, 0) + 1
        if not self.is_first_batch and counts == self.golden_per_param_grad_ready_counts:
            self.start_grad_sync(force_all_reduce)


def is_patched(method: str) -> bool:
    """Return whether a method of a real class is patched, or will be when the class is imported."""
    from .. import status

    states = {site.state for site in status() if site.target.endswith(f".{method}")}
    return not states.isdisjoint({"applied", "waiting", "absent"})
