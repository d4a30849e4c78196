"""Megatron's distributed data parallelism without Megatron: for unit tests of the code around it.

Pure Python. What a pipeline can observe is kept: which call raises what, which hooks are installed, which
collectives would be outstanding, and whether a forward pass would have used stale parameters. The behaviour
is that of megatron-core 0.16 to 0.19; a contract test runs the same scripts of calls against the real class.
Nothing is computed or communicated: ``ddp()`` is a forward pass, ``ddp.backward()`` a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .mock_modules import MockConfig, MockDDPConfig, MockHandle, MockModule, MockParameter


def _require(condition: bool, message: str = "") -> None:
    # Megatron asserts. Not an assert statement here: pytest would put its own message in it.
    if not condition:
        raise AssertionError(*([message] if message else []))


class MockBucketGroup:
    """Stands for ``_ParamAndGradBucketGroup``: the book-keeping of outstanding collectives.

    ``is_stale`` is extra: the optimizer has stepped and no parameter gather has been completed since.
    """

    def __init__(self, params: Sequence[MockParameter], ddp_config: MockDDPConfig) -> None:
        self.params = set(params)
        self.ddp_config = ddp_config
        self.next_param_gather_bucket_group: MockBucketGroup | None = None
        self.golden_per_param_grad_ready_counts: dict[MockParameter, int] = {}
        self.per_param_grad_ready_counts: dict[MockParameter, int] = {}
        self.is_last_microbatch = True
        self.is_first_batch = True
        self.param_gather_handle: MockHandle | None = None
        self.param_gather_dispatched = False
        self.grad_reduce_handle: MockHandle | None = None
        self.is_stale = False

    def reset(self) -> None:
        if self.is_first_batch and self.per_param_grad_ready_counts:
            _require(len(self.per_param_grad_ready_counts) == len(self.params))
            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts
            self.is_first_batch = False
        self.per_param_grad_ready_counts = {}
        self.is_last_microbatch = True

    def start_param_sync(self, force_sync: bool = False) -> None:
        _require(self.ddp_config.use_distributed_optimizer)
        if not force_sync:
            _require(self.param_gather_handle is None)
        elif self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            return
        if self.ddp_config.overlap_param_gather and not force_sync:
            self.param_gather_handle = MockHandle(self._gathered)
        else:
            self._gathered()
        self.param_gather_dispatched = True

    def _gathered(self) -> None:
        self.is_stale = False

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        _require(self.ddp_config.use_distributed_optimizer)
        _require(self.ddp_config.overlap_param_gather)
        if not self.param_gather_dispatched:
            self.start_param_sync()
        if self.param_gather_handle is not None:
            self.param_gather_handle.wait()
            self.param_gather_handle = None
            following = self.next_param_gather_bucket_group
            if following is None or skip_next_bucket_dispatch or following.param_gather_dispatched:
                return
            following.start_param_sync()

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        _require(
            self.grad_reduce_handle is None,
            "Should not have multiple communication calls outstanding at once",
        )
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = MockHandle(lambda: None)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.param_gather_dispatched = False
        if not self.ddp_config.overlap_grad_reduce:
            self.start_grad_sync(force_all_reduce)
            return
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce)
        if self.grad_reduce_handle is None:
            raise AssertionError(
                "Communication call has not been issued for this bucket "
                f"({len(self.per_param_grad_ready_counts)}/{len(self.params)} params have grad available)"
            )
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None

    def register_grad_ready(self, param: MockParameter, force_all_reduce: bool = False) -> None:
        _require(
            self.ddp_config.overlap_grad_reduce,
            "register_grad_ready() should only be called when overlap_grad_reduce is True",
        )
        if not self.is_last_microbatch:
            return
        _require(param in self.params, "Param is not in the bucket group")
        counts = self.per_param_grad_ready_counts
        counts[param] = counts.get(param, 0) + 1
        if not self.is_first_batch and counts == self.golden_per_param_grad_ready_counts:
            self.start_grad_sync(force_all_reduce)


class MockDDP(MockModule):
    """Stands for ``megatron.core.distributed.DistributedDataParallel``.

    Parameters of one module share a bucket group, and groups are in the order of the backward pass; without
    overlapped reduction all share one. The other keyword arguments are those of :class:`MockDDPConfig`.
    Chunks of an interleaved pipeline share ``config``.

    ``calls`` lists the names and keyword arguments of the methods called on it, in order;
    ``stale_forwards`` counts the forward passes that used a parameter before its gather.
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
        self.param_to_bucket_group: dict[MockParameter, MockBucketGroup] = {}
        self.bucket_groups = self._group(expert=False)
        self.expert_parallel_bucket_groups = self._group(expert=True)
        self.use_forward_hook = (
            self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather
        )
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
        groups = [MockBucketGroup(params, self.ddp_config) for params in reversed(per_module) if params]
        for group in groups:
            self.param_to_bucket_group.update(dict.fromkeys(group.params, group))
        if self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather:
            for group, following in zip(groups[1:], groups, strict=False):
                group.next_param_gather_bucket_group = following
        return groups

    def _all_groups(self) -> list[MockBucketGroup]:
        return self.bucket_groups + self.expert_parallel_bucket_groups

    def _install_hooks(self) -> None:
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module] = module.register_forward_pre_hook(self._pre_hook)

    def _pre_hook(self, module: MockModule, *unused: Any) -> None:
        _require(self.use_forward_hook, "Should use pre-hook only when overlap_param_gather is True")
        skip_next = self.ddp_config.align_param_gather or self.overlap_param_gather_with_optimizer_step
        for param in module.parameters(recurse=False):
            if param in self.param_to_bucket_group:
                self.param_to_bucket_group[param].finish_param_sync(skip_next_bucket_dispatch=skip_next)

    def enable_forward_pre_hook(self) -> None:
        """Raise AssertionError without overlapped gather, or when any hook is installed."""
        self.calls.append(("enable_forward_pre_hook", {}))
        _require(self.use_forward_hook)
        _require(len(self.remove_forward_pre_hook_handles) == 0)
        self._install_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Raise KeyError at the first module without a hook; those before it have lost theirs by then."""
        self.calls.append(("disable_forward_pre_hook", {"param_sync": param_sync}))
        _require(self.use_forward_hook)
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module].remove()
            del self.remove_forward_pre_hook_handles[module]
        _require(len(self.remove_forward_pre_hook_handles) == 0)
        if param_sync:
            self.start_param_sync(force_sync=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.calls.append(("no_sync", {}))
        for group in self._all_groups():
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in self._all_groups():
                group.is_last_microbatch = True

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        self.calls.append(("start_param_sync", {"force_sync": force_sync, "force_dispatch": force_dispatch}))
        if self.overlap_param_gather_with_optimizer_step and not (force_sync or force_dispatch):
            return
        for group in self._all_groups():
            group.start_param_sync(force_sync=force_sync)

    def start_grad_sync(self, *unused: Any) -> None:
        self.calls.append(("start_grad_sync", {}))
        for group in self._all_groups():
            group.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.calls.append(("finish_grad_sync", {"force_all_reduce": force_all_reduce}))
        for group in self._all_groups():
            group.finish_grad_sync(force_all_reduce)

    def zero_grad_buffer(self) -> None:
        self.calls.append(("zero_grad_buffer", {}))
        for group in self._all_groups():
            group.reset()

    def __call__(self, *args: Any) -> None:
        """A forward pass: every module's hooks, in order."""
        super().__call__(*args)
        if any(group.is_stale for group in self._all_groups()):
            self.stale_forwards += 1

    def backward(self) -> None:
        """A backward pass: every parameter's hook, last module first."""
        if self.ddp_config.overlap_grad_reduce:
            for param in reversed(list(self.parameters())):
                if param in self.param_to_bucket_group:
                    self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)


@dataclass
class MockOptimizer:
    """Stands for the distributed optimizer: a step leaves other ranks' shares of the parameters stale."""

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
                for group in chain(chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
                    group.is_stale = True
                if not chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync()
        return True, 0.0, None
