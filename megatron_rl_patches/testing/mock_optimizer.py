"""Megatron's optimizer for unit tests, which steps on the gradients of ``MockDDP`` without communication.

While the patch ``finite-step`` is applied, ``MockOptimizer.step`` behaves as that of the patched class does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch

from ..common.chunks import bucket_groups
from ..reentry import finite_step
from .mock_ddp import MockDDP
from .mock_modules import MockProcessGroup, is_patched


def _config() -> Any:
    """Return the part of ``OptimizerConfig`` that frameworks read."""
    absent = dict.fromkeys(("optimizer_cpu_offload", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"), False)
    return SimpleNamespace(optimizer="adam", clip_grad=1.0, overlap_param_gather=True, timers=None, **absent)


@dataclass
class MockOptimizer:
    """Stands for Megatron's optimizer: a step leaves other ranks' shards of the parameters stale.

    It is a chain of one optimizer, as Megatron's ``ChainedOptimizer`` is for a model without experts.

    Attributes:
        model_chunks: the chunks whose parameters it updates.
        calls: names of the methods that were called on it, in order.
        result: what ``step`` returns: success, the gradient norm, and the number of zeros or ``None``.
            A step without a norm fails as Megatron's does when the loss scaler finds a bad gradient.
        unreduced_steps: how many steps have used gradients that no ``finish_grad_sync`` had reduced.
        config: real or mocked.
        param_groups: one group with all parameters, which schedulers write learning rates to.
        optimizer: stands for the optimizer of torch, and has ``param_groups`` and ``state``.
        chained_optimizers: one optimizer, with the chunks, calls, config and groups of this one.
    """

    model_chunks: Sequence[MockDDP]
    calls: list[str] = field(default_factory=list)
    result: tuple[bool, float | None, int | None] = (True, 0.0, None)
    unreduced_steps: int = 0
    config: Any = field(default_factory=_config)

    def __post_init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": self.get_parameters(), "lr": 0.0, "weight_decay": 0.0, "is_expert_parallel": False}
        ]
        self.state: dict[Any, Any] = {}
        self.optimizer = SimpleNamespace(param_groups=self.param_groups, state=self.state)
        self.is_stub_optimizer = not self.get_parameters()
        self.chained_optimizers = [copy(self)]

    def _record(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append(name)

    _constant = staticmethod(lambda value, *unused, **options: value)
    has_grad_norm_group = partialmethod(_constant, False)
    grads_states_parallel_group_is_shared = partialmethod(_constant, True)
    # Nothing but their calls is observable here.
    reload_model_params = partialmethod(_record, "reload_model_params")
    prepare_model_params_for_param_sync = partialmethod(_record, "prepare_model_params_for_param_sync")
    _copy_main_params_to_param_buffer = partialmethod(_record, "_copy_main_params_to_param_buffer")
    save_parameter_state = partialmethod(_record, "save_parameter_state")
    load_parameter_state = partialmethod(_record, "load_parameter_state")
    offload_to_cpu = partialmethod(_record, "offload_to_cpu")
    restore_from_cpu = partialmethod(_record, "restore_from_cpu")
    zero_grad = partialmethod(_record, "zero_grad")

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return [param for chunk in self.model_chunks for param in chunk.param_to_bucket_group]

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        return [param.main_grad for param in self.get_parameters()]  # type: ignore[attr-defined]

    get_main_grads_for_grad_norm = get_grads_for_grad_norm

    def get_grad_stats_parallel_group(self) -> MockProcessGroup:
        return MockProcessGroup()

    def get_loss_scale(self) -> torch.Tensor:
        return torch.ones(1)

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def prepare_grads(self) -> bool:
        """Return whether the loss scaler has met a gradient that is not finite."""
        return not self.result[0] and self.result[1] is None

    def get_grad_norm(self) -> float | None:
        return self.result[1]

    def clip_grad_norm(self, clip_grad: float) -> float | None:
        self.calls.append("clip_grad_norm")
        return self.result[1]

    def count_zeros(self) -> int | None:
        return self.result[2]

    def step_with_ready_grads(self) -> bool:
        self.calls.append("step_with_ready_grads")
        if not self.result[0]:
            return False
        groups = [group for chunk in self.model_chunks for group in bucket_groups(chunk)]
        self.unreduced_steps += any(group.is_unreduced for group in groups)
        for chunk in self.model_chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                for group in bucket_groups(chunk):
                    group.mark("is_stale", group.param_gather_handle)
                if not chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync()
        return True

    def step(self) -> tuple[bool, float | None, int | None]:
        """Return :attr:`result`; a step that fails changes nothing."""
        self.calls.append("step")
        if is_patched("ChainedOptimizer.step"):
            from ..engine.installer import installer

            return finite_step.step(self, self._step, installer.options["finite-step"].finite_step_limit)
        return self._step()

    def _step(self) -> tuple[bool, float | None, int | None]:
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        num_calls = len(self.calls)
        success = self.step_with_ready_grads()
        del self.calls[num_calls:]
        return success, norm, self.count_zeros()

    def state_dict(self) -> dict[str, Any]:
        return {
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        }

    def sharded_state_dict(self, *unused: Any, **options: Any) -> dict[str, Any]:
        return self.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.calls.append("load_state_dict")
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(loaded)
