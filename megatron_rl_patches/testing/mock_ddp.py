"""Megatron's distributed data parallelism without communication, for unit tests of the code around it.

``MockDDP`` keeps what a pipeline can observe: which call raises what, which hooks are installed, which
collectives would be outstanding, and which parameters are stale, as in megatron-core 0.16 to 0.19. While the
patch ``reentrant-train`` is applied, the hook methods behave as those of the patched class do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch

from ..common.chunks import bucket_groups
from ..errors import InvalidInputError
from ..reentry import forward_pre_hooks
from .mock_modules import MockBucketGroup, MockConfig, MockDDPConfig, MockModule, MockProcessGroup, is_patched


class _BaseDataParallel(torch.nn.Module):
    """Stands for Megatron's class of this name, by which wrappers are recognized."""


class MockDDP(_BaseDataParallel):
    """Stands for ``megatron.core.distributed.DistributedDataParallel``, and takes its arguments.

    So ``mocker.patch("my_rl.setup.DDP", MockDDP)`` does for code that wraps models in DDP. It has the public
    methods of the real class; those that communicate are recorded in ``calls``, and no data moves.

    Parameters of one module share a bucket group, and groups are in the order of the backward pass; without
    overlapped reduction, or with bucketing disabled, all parameters share one group.

    Args:
        config: the model's config, which chunks of an interleaved pipeline share.
        ddp_config: real or mocked; by default :class:`MockDDPConfig`.
        module: the model, any ``torch.nn.Module``; by default :meth:`MockModule.tiny`.
        disable_bucketing: all parameters share one bucket group.
        pg_collection: not used, as all further arguments of the real class in some release.
        ddp_options: fields of ``ddp_config`` that differ from it.

    Attributes:
        buffers, expert_parallel_buffers: for each dtype, ``params`` and their flat memory: ``grad_data``, of
            which every ``main_grad`` is a view, and ``param_data``, with a distributed optimizer alone.
        calls: names and keyword arguments of the methods that were called on it, in order.
        stale_forwards: how many forward passes of modules have used parameters that were not gathered; each
            module in the chunk with such parameters of its own counts.

    Raises:
        InvalidInputError: ``config`` is a module: the order of arguments is that of the real class.
    """

    def __init__(
        self,
        config: Any = None,
        ddp_config: Any = None,
        module: torch.nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        *,
        full_param_layout: Any = None,
        grad_comm_pgs: Any = None,
        model_comm_pgs: Any = None,
        **ddp_options: Any,
    ) -> None:
        if isinstance(config, torch.nn.Module):
            raise InvalidInputError(
                f"config is a module, {type(config).__name__}; expected MockDDP(config, ddp_config, module), "
                "or MockDDP(module=module)"
            )
        super().__init__()
        self.module = MockModule.tiny() if module is None else module
        self.config = MockConfig() if config is None else config
        base = MockDDPConfig() if ddp_config is None else ddp_config
        self.ddp_config = replace(base, **ddp_options) if ddp_options else base
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.stale_forwards = 0
        self.force_all_reduce = False
        self.use_forward_hook = (
            self.ddp_config.use_distributed_optimizer and self.ddp_config.overlap_param_gather
        )
        one_group = disable_bucketing or not self.ddp_config.overlap_grad_reduce
        self.param_to_bucket_group: dict[torch.nn.Parameter, MockBucketGroup] = {}
        self.expert_parallel_bucket_groups, self.expert_parallel_buffers = self._divide(one_group, True)
        # As in Megatron's class, a list takes the place of the method of torch's Module.
        self.bucket_groups, self.buffers = self._divide(one_group, False)  # type: ignore[assignment]
        for param in self.param_to_bucket_group:
            param.register_post_accumulate_grad_hook(self._accumulate)  # type: ignore[no-untyped-call]
        for module in self.module.modules():
            module.register_forward_pre_hook(self._count)
        self.remove_forward_pre_hook_handles: dict[torch.nn.Module, Any] = {}
        if self.use_forward_hook:
            self._install_hooks()

    def _divide(self, one_group: bool, expert: bool) -> tuple[list[MockBucketGroup], list[SimpleNamespace]]:
        modules: dict[torch.nn.Parameter, int] = {}  # the first that has it, as several may share one
        for number, module in enumerate(self.module.modules()):
            for param in module.parameters(recurse=False):
                if param.requires_grad and getattr(param, "allreduce", True) is not expert:
                    modules.setdefault(param, 0 if one_group else number)
        process_group, groups = MockProcessGroup(), []
        for number in sorted(set(modules.values()), reverse=True):
            params = [param for param in modules if modules[param] == number]
            groups.append(MockBucketGroup(params, self.ddp_config, process_group))
            self.param_to_bucket_group.update(dict.fromkeys(params, groups[-1]))
        if self.use_forward_hook:
            for group, following in zip(groups[1:], groups, strict=False):
                group.next_param_gather_bucket_group = following
        dtypes = dict.fromkeys(param.dtype for param in modules)
        return groups, [self._buffer([p for p in modules if p.dtype == dtype]) for dtype in dtypes]

    def _buffer(self, params: list[torch.nn.Parameter]) -> SimpleNamespace:
        flat = torch.cat([param.detach().reshape(-1) for param in params])
        grads = torch.zeros_like(flat, dtype=torch.float32 if self.ddp_config.grad_reduce_in_fp32 else None)
        is_distributed, sizes = self.ddp_config.use_distributed_optimizer, [x.numel() for x in params]
        views = zip(params, torch.split(grads, sizes), torch.split(flat, sizes), strict=True)
        for param, grad, part in views:
            param.main_grad = grad.view(param.shape)  # type: ignore[attr-defined]
            if is_distributed:
                param.data = part.view(param.shape)
        param_data = flat if is_distributed else None
        return SimpleNamespace(params=params, grad_data=grads, param_data=param_data)

    def _install_hooks(self) -> None:
        for module in self.module.modules():  # each hook gathers before ``_count`` looks
            handle = module.register_forward_pre_hook(self._pre_hook, prepend=True)
            self.remove_forward_pre_hook_handles[module] = handle

    def _pre_hook(self, module: torch.nn.Module, *unused: Any) -> None:
        assert self.use_forward_hook, "Should use pre-hook only when overlap_param_gather is True"
        for param in module.parameters(recurse=False):
            if param in self.param_to_bucket_group:
                self.param_to_bucket_group[param].finish_param_sync(self.ddp_config.align_param_gather)

    def _count(self, module: torch.nn.Module, *unused: Any) -> None:
        groups = map(self.param_to_bucket_group.get, module.parameters(recurse=False))
        self.stale_forwards += any(group is not None and group.is_stale for group in groups)

    def _accumulate(self, param: torch.nn.Parameter) -> None:
        """Move a gradient to ``main_grad`` and tell the bucket group, as Megatron's hook does."""
        if param.grad is not None:
            param.main_grad += param.grad  # type: ignore[attr-defined]
            param.grad = None
        group = self.param_to_bucket_group[param]
        group.mark("is_unreduced", group.grad_reduce_handle)
        if self.ddp_config.overlap_grad_reduce:
            group.register_grad_ready(param, self.force_all_reduce)

    def _record(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append((name, kwargs))

    # Nothing but their calls is observable here.
    broadcast_params = partialmethod(_record, "broadcast_params")
    free_overlap_buffers = partialmethod(_record, "free_overlap_buffers")
    offload_grad_buffers = partialmethod(_record, "offload_grad_buffers")
    restore_grad_buffers = partialmethod(_record, "restore_grad_buffers")
    set_is_first_microbatch = partialmethod(_record, "set_is_first_microbatch")
    set_symmetric_ar = partialmethod(_record, "set_symmetric_ar")

    def enable_forward_pre_hook(self) -> None:
        """Raise AssertionError without overlapped gather, or when any hook is installed."""
        self._record("enable_forward_pre_hook")
        if self.remove_forward_pre_hook_handles and is_patched("enable_forward_pre_hook"):
            forward_pre_hooks.enable(self._enable_forward_pre_hook, self)
        else:
            self._enable_forward_pre_hook()

    def _enable_forward_pre_hook(self) -> None:
        assert self.use_forward_hook
        assert len(self.remove_forward_pre_hook_handles) == 0
        self._install_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Raise KeyError at the first module without a hook; those before it have lost theirs by then."""
        self._record("disable_forward_pre_hook", param_sync=param_sync)
        all_hooked = self.remove_forward_pre_hook_handles.keys() == set(self.module.modules())
        if not all_hooked and is_patched("disable_forward_pre_hook"):
            forward_pre_hooks.disable(self._disable_forward_pre_hook, self, param_sync)
        else:
            self._disable_forward_pre_hook(param_sync)

    def _disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert self.use_forward_hook
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module].remove()
            del self.remove_forward_pre_hook_handles[module]
        assert len(self.remove_forward_pre_hook_handles) == 0
        if param_sync:
            self.start_param_sync(force_sync=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._record("no_sync")
        for group in bucket_groups(self):
            group.is_last_microbatch = False
        try:
            yield
        finally:
            for group in bucket_groups(self):
                group.is_last_microbatch = True

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        self._record("start_param_sync", force_sync=force_sync, force_dispatch=force_dispatch)
        for group in bucket_groups(self):
            group.start_param_sync(force_sync=force_sync)

    def start_grad_sync(self, *unused: Any) -> None:
        self._record("start_grad_sync")
        for group in bucket_groups(self):
            group.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self._record("finish_grad_sync", force_all_reduce=force_all_reduce)
        for group in bucket_groups(self):
            group.finish_grad_sync(force_all_reduce)

    def zero_grad_buffer(self) -> None:
        self._record("zero_grad_buffer")
        for buffer in self.buffers + self.expert_parallel_buffers:  # type: ignore[operator]
            buffer.grad_data.zero_()
        for group in bucket_groups(self):
            group.reset()

    def scale_gradients(self, scaling_factor: float) -> None:
        self._record("scale_gradients", scaling_factor=scaling_factor)
        for buffer in self.buffers + self.expert_parallel_buffers:  # type: ignore[operator]
            buffer.grad_data *= scaling_factor

    def reset_param_sync_dispatch_state(self) -> None:
        self._record("reset_param_sync_dispatch_state")
        for group in bucket_groups(self):
            group.param_gather_dispatched = False

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:
        """Return the state of the module, under names without a prefix for DDP, as Megatron does."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)

    state_dict_for_save_checkpoint = state_dict

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the module; there is one shard of everything."""
        sharded = getattr(self.module, "sharded_state_dict", None)
        return sharded(prefix, *args, **kwargs) if sharded else self.state_dict(prefix=prefix)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        self.module.load_state_dict(state_dict, strict=strict)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass of the module, whose hooks gather parameters."""
        return self.module(*args, **kwargs)

    def backward(self) -> None:
        """Run a backward pass without gradients: the hook of every parameter, last module first."""
        for param in reversed(list(self.parameters())):
            if param in self.param_to_bucket_group:
                self._accumulate(param)
