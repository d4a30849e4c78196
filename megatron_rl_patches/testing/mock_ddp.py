"""Megatron's distributed data parallelism without Megatron, for unit tests of the code around it.

The mocks are pure Python and compute nothing: ``ddp()`` is a forward pass, ``ddp.backward()`` a backward
pass. They keep what a pipeline can observe: which call raises what, which hooks are installed, which
collectives would be outstanding, and whether a forward pass would have used stale parameters, as in
megatron-core 0.16 to 0.19. While the patch ``reentrant-train`` is applied, the hook methods behave as those
of the patched class do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..common.chunks import bucket_groups
from ..reentry import forward_pre_hooks
from .mock_modules import (
    MockBucketGroup,
    MockConfig,
    MockDDPConfig,
    MockHandle,
    MockModule,
    MockParameter,
    MockProcessGroup,
    require,
)


def _hooks_are_patched() -> bool:
    """Return whether the hook methods of the real class are patched, or will be when it is imported."""
    from .. import status

    states = {site.state for site in status() if site.target.endswith(".disable_forward_pre_hook")}
    return not states.isdisjoint({"applied", "waiting"})


class MockDDP(MockModule):
    """Stands for ``megatron.core.distributed.DistributedDataParallel``.

    Parameters of one module share a bucket group, and groups are in the order of the backward pass; without
    overlapped reduction all parameters share one group.

    Args:
        module: the model; by default :meth:`MockModule.tiny`.
        config: the model's config, which chunks of an interleaved pipeline share.
        ddp_options: fields of :class:`MockDDPConfig`.

    Attributes:
        calls: names and keyword arguments of the methods that were called on it, in order.
        stale_forwards: how many forward passes have used a parameter before its gather.
    """

    def __init__(
        self, module: MockModule | None = None, config: MockConfig | None = None, **ddp_options: Any
    ) -> None:
        module = module or MockModule.tiny()
        super().__init__(module)
        self.module = module
        self.config = config or MockConfig()
        self.ddp_config = MockDDPConfig(**ddp_options)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.stale_forwards = 0
        self.force_all_reduce = False
        self.overlap_param_gather_with_optimizer_step = False
        self.use_forward_hook = (
            self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather
        )
        self.param_to_bucket_group: dict[MockParameter, MockBucketGroup] = {}
        self.bucket_groups = self._group(expert=False)
        self.expert_parallel_bucket_groups = self._group(expert=True)
        self.remove_forward_pre_hook_handles: dict[MockModule, MockHandle] = {}
        if self.use_forward_hook:
            self._install_hooks()

    def _group(self, expert: bool) -> list[MockBucketGroup]:
        per_module = [
            [param for param in module.parameters(recurse=False) if param.allreduce is not expert]
            for module in self.module.modules()
        ]
        if not self.ddp_config.overlap_grad_reduce:
            per_module = [list(chain.from_iterable(per_module))]
        process_group, not_empty = MockProcessGroup(), filter(None, reversed(per_module))
        groups = [MockBucketGroup(params, self.ddp_config, process_group) for params in not_empty]
        for group in groups:
            self.param_to_bucket_group.update(dict.fromkeys(group.params, group))
        if self.use_forward_hook:
            for group, following in zip(groups[1:], groups, strict=False):
                group.next_param_gather_bucket_group = following
        return groups

    def _install_hooks(self) -> None:
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module] = module.register_forward_pre_hook(self._pre_hook)

    def _pre_hook(self, module: MockModule, *unused: Any) -> None:
        require(self.use_forward_hook, "Should use pre-hook only when overlap_param_gather is True")
        skip_next = self.ddp_config.align_param_gather or self.overlap_param_gather_with_optimizer_step
        for param in module.parameters(recurse=False):
            if param in self.param_to_bucket_group:
                self.param_to_bucket_group[param].finish_param_sync(skip_next_bucket_dispatch=skip_next)

    def enable_forward_pre_hook(self) -> None:
        """Raise AssertionError without overlapped gather, or when any hook is installed."""
        self.calls.append(("enable_forward_pre_hook", {}))
        if self.remove_forward_pre_hook_handles and _hooks_are_patched():
            forward_pre_hooks.enable(self._enable_forward_pre_hook, self)
        else:
            self._enable_forward_pre_hook()

    def _enable_forward_pre_hook(self) -> None:
        require(self.use_forward_hook)
        require(len(self.remove_forward_pre_hook_handles) == 0)
        self._install_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Raise KeyError at the first module without a hook; those before it have lost theirs by then."""
        self.calls.append(("disable_forward_pre_hook", {"param_sync": param_sync}))
        if self.remove_forward_pre_hook_handles.keys() != set(self.module.modules()) and _hooks_are_patched():
            forward_pre_hooks.disable(self._disable_forward_pre_hook, self, param_sync)
        else:
            self._disable_forward_pre_hook(param_sync)

    def _disable_forward_pre_hook(self, param_sync: bool) -> None:
        require(self.use_forward_hook)
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module].remove()
            del self.remove_forward_pre_hook_handles[module]
        require(len(self.remove_forward_pre_hook_handles) == 0)
        if param_sync:
            self.start_param_sync(force_sync=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.calls.append(("no_sync", {}))
        for group in bucket_groups(self):
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in bucket_groups(self):
                group.is_last_microbatch = True

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        self.calls.append(("start_param_sync", {"force_sync": force_sync, "force_dispatch": force_dispatch}))
        if self.overlap_param_gather_with_optimizer_step and not (force_sync or force_dispatch):
            return
        for group in bucket_groups(self):
            group.start_param_sync(force_sync=force_sync)

    def start_grad_sync(self, *unused: Any) -> None:
        self.calls.append(("start_grad_sync", {}))
        for group in bucket_groups(self):
            group.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.calls.append(("finish_grad_sync", {"force_all_reduce": force_all_reduce}))
        for group in bucket_groups(self):
            group.finish_grad_sync(force_all_reduce)

    def zero_grad_buffer(self) -> None:
        self.calls.append(("zero_grad_buffer", {}))
        for group in bucket_groups(self):
            group.reset()

    def __call__(self, *args: Any) -> None:
        """Run a forward pass: the hooks of every module, in order."""
        super().__call__(*args)
        if any(group.is_stale for group in bucket_groups(self)):
            self.stale_forwards += 1

    def backward(self) -> None:
        """Run a backward pass: the hook of every parameter, last module first."""
        if self.ddp_config.overlap_grad_reduce:
            for param in reversed(list(self.parameters())):
                if param in self.param_to_bucket_group:
                    self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)


@dataclass
class MockOptimizer:
    """Stands for the distributed optimizer: a step leaves other ranks' shards of the parameters stale.

    Attributes:
        model_chunks: the chunks whose parameters it updates.
        calls: names of the methods that were called on it, in order.
    """

    model_chunks: Sequence[MockDDP]
    calls: list[str] = field(default_factory=list)

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def step(self) -> tuple[bool, float, None]:
        """Return whether it succeeded, the gradient norm and no count of zeros, as Megatron's does."""
        self.calls.append("step")
        for chunk in self.model_chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                for group in bucket_groups(chunk):
                    group.is_stale = True
                if not chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync()
        return True, 0.0, None

    def _copy_main_params_to_param_buffer(self) -> None:
        # The mock records the call. The copy for mxfp8 parameters is not mocked.
        self.calls.append("_copy_main_params_to_param_buffer")
