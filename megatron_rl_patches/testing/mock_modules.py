"""The parts of :class:`~megatron_rl_patches.testing.MockDDP`: modules, configuration, bucket groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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
    align_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False


@dataclass(eq=False)
class MockParameter:
    """A parameter; ``allreduce`` is False for those of experts, as in Megatron."""

    allreduce: bool = True
    requires_grad: bool = True


class MockProcessGroup:
    """A process group of this rank alone: there is nobody to communicate with."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class MockHandle:
    """What ``register_forward_pre_hook`` and asynchronous collectives return."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def wait(self) -> None:
        self._action()

    remove = wait


class MockModule:
    """A node of a module tree, which may be changed through ``children``.

    Args:
        children: the modules below it.
        params: how many parameters it holds itself.
        expert: whether these belong to an expert, and so to a bucket group of experts.
    """

    def __init__(self, *children: MockModule, params: int = 0, expert: bool = False) -> None:
        self.children = list(children)
        self.training = True
        self.forward_pre_hooks: list[Callable[..., None]] = []
        self._parameters = [MockParameter(allreduce=not expert) for _ in range(params)]

    @property
    def _modules(self) -> dict[str, MockModule]:
        # torch modules keep their children under this name.
        return {str(number): child for number, child in enumerate(self.children)}

    @classmethod
    def tiny(cls) -> MockModule:
        """Return an embedding, two layers in a decoder, and a head: six parameters in four bucket groups."""
        return cls(cls(params=1), cls(cls(params=2), cls(params=2)), cls(params=1))

    def modules(self) -> Iterator[MockModule]:
        """Yield this module, then all modules below it."""
        yield self
        for child in self.children:
            yield from child.modules()

    def parameters(self, recurse: bool = True) -> Iterator[MockParameter]:
        for module in self.modules() if recurse else [self]:
            yield from module._parameters

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> MockHandle:
        self.forward_pre_hooks.append(hook)
        return MockHandle(lambda: self.forward_pre_hooks.remove(hook))

    def train(self, mode: bool = True) -> MockModule:
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> MockModule:
        return self.train(False)

    def __call__(self, *args: Any) -> None:
        for hook in list(self.forward_pre_hooks):
            hook(self, args)
        for child in self.children:
            child(*args)


class MockFloat16Module(MockModule):
    """The wrapper that sits between DDP and the model in half precision."""

    def __init__(self, module: MockModule) -> None:
        super().__init__(module)
        self.module = module


def require(condition: bool, message: str = "") -> None:
    """Raise an AssertionError, as Megatron does, with a message that pytest leaves as it is."""
    if not condition:
        raise AssertionError(*([message] if message else []))


class MockBucketGroup:
    """Stands for ``_ParamAndGradBucketGroup``, which keeps track of outstanding collectives.

    The real class has no ``is_stale``, which is true when the optimizer has stepped and no parameter gather
    has been completed since.
    """

    def __init__(
        self, params: Sequence[MockParameter], ddp_config: MockDDPConfig, process_group: MockProcessGroup
    ) -> None:
        self.params = set(params)
        self.ddp_config = ddp_config
        if ddp_config.use_distributed_optimizer:
            self.intra_distributed_optimizer_instance_group = process_group
        else:
            self.data_parallel_group = process_group
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
            require(len(self.per_param_grad_ready_counts) == len(self.params))
            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts
            self.is_first_batch = False
        self.per_param_grad_ready_counts = {}
        self.is_last_microbatch = True

    def start_param_sync(self, force_sync: bool = False) -> None:
        require(self.ddp_config.use_distributed_optimizer)
        if not force_sync:
            require(self.param_gather_handle is None)
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
        require(self.ddp_config.use_distributed_optimizer)
        require(self.ddp_config.overlap_param_gather)
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
        require(
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
        require(
            self.ddp_config.overlap_grad_reduce,
            "register_grad_ready() should only be called when overlap_grad_reduce is True",
        )
        if not self.is_last_microbatch:
            return
        require(param in self.params, "Param is not in the bucket group")
        counts = self.per_param_grad_ready_counts
        counts[param] = counts.get(param, 0) + 1
        if not self.is_first_batch and counts == self.golden_per_param_grad_ready_counts:
            self.start_grad_sync(force_all_reduce)
