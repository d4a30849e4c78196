"""The modules, parameters, configuration and process groups that :mod:`.mock_ddp` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
