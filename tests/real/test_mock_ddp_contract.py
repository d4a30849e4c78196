"""MockDDP against megatron-core's own class: the same scripts of calls, and every outcome the same.

The real class runs on one gloo rank. Its model has the shape of the mock's: one parameter per module, so one
bucket group per module. After each call both sides give its outcome and their whole observable state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from megatron_rl_patches.testing import MockDDP, MockModule, cpu_backend, spawn_ranks

Script = tuple[str, ...]
State = dict[str, Any]

STEP: Script = ("zero_grad_buffer", "forward", "backward", "finish_grad_sync")
ACCUMULATE: Script = ("enter_no_sync", "forward", "backward", "exit_no_sync")

OVERLAPPED: dict[str, Script] = {
    "one_training_call": (
        "disable_without_sync",
        *STEP,
        "enable",
        *STEP,
        *STEP,
        "disable",
    ),
    "gradient_accumulation": (
        "zero_grad_buffer",
        *ACCUMULATE,
        "forward",
        "backward",
        "finish_grad_sync",
        *STEP,
    ),
    "disabling_twice": ("disable", "disable", "disable_without_sync"),
    "enabling_twice": ("enable", "disable_without_sync", "enable", "enable", "forward"),
    "a_module_added_later": ("add_module", "disable_without_sync", "enable", "forward"),
    "hooks_gather_one_ahead": ("forward_first_module", "forward", "disable"),
    "forced_sync_waits_for_a_gather": ("start_param_sync", "force_param_sync", "force_param_sync"),
    "dispatching_a_gather_twice": ("start_param_sync", "start_param_sync"),
    "dispatching_a_reduction_twice_at_first": (
        *STEP[:3],
        "start_grad_sync",
        "start_grad_sync",
        "finish_grad_sync",
    ),
    "dispatching_a_reduction_twice_later": (*STEP, *STEP[:3], "start_grad_sync", "finish_grad_sync"),
    "finishing_without_a_backward": (*STEP, "zero_grad_buffer", "forward", "finish_grad_sync"),
    "a_first_batch_cut_short": ("zero_grad_buffer", "forward", "backward_of_last_module", "zero_grad_buffer"),
    "a_gather_left_outstanding": (*STEP, "forward_first_module", *STEP),
    "no_sync_left_open": (
        *STEP,
        "enter_no_sync",
        "forward",
        "backward",
        "finish_grad_sync",
        "zero_grad_buffer",
    ),
}
PLAIN: dict[str, Script] = {
    "training": (*STEP, "start_param_sync", *STEP, "start_param_sync"),
    "hooks_are_refused": ("enable", "disable", "disable_without_sync"),
    "reductions_are_synchronous": ("start_grad_sync", "start_grad_sync", "finish_grad_sync"),
}
CASES = [("overlapped", True, True, name, script) for name, script in OVERLAPPED.items()]
CASES += [("plain", False, False, name, script) for name, script in PLAIN.items()]
CASES += [
    ("gather_only", False, True, name, OVERLAPPED[name]) for name in ("one_training_call", "disabling_twice")
]
CASES += [("reduce_only", True, False, name, OVERLAPPED[name]) for name in ("gradient_accumulation",)]


class Run:
    """A script under way on either class; ``calls`` holds what the two spell differently."""

    def __init__(self, ddp: Any, calls: dict[str, Callable[[], object]]) -> None:
        self.ddp = ddp
        self._no_sync = ExitStack()
        self._calls: dict[str, Callable[[], object]] = {
            "enable": lambda: ddp.enable_forward_pre_hook(),
            "disable": lambda: ddp.disable_forward_pre_hook(),
            "disable_without_sync": lambda: ddp.disable_forward_pre_hook(param_sync=False),
            "start_param_sync": lambda: ddp.start_param_sync(),
            "force_param_sync": lambda: ddp.start_param_sync(force_sync=True),
            "start_grad_sync": lambda: ddp.start_grad_sync(),
            "finish_grad_sync": lambda: ddp.finish_grad_sync(),
            "zero_grad_buffer": lambda: ddp.zero_grad_buffer(),
            "enter_no_sync": lambda: self._no_sync.enter_context(ddp.no_sync()) and None,
            "exit_no_sync": self._no_sync.close,
            **calls,
        }

    def play(self, script: Script) -> list[tuple[str, object, State]]:
        return [(call, self._outcome(call), self._state()) for call in script]

    def _outcome(self, call: str) -> object:
        try:
            return self._calls[call]()
        except KeyError as error:
            # The key is a module: say which.
            return "KeyError", list(self.ddp.module.modules()).index(error.args[0])
        except AssertionError as error:
            return "AssertionError", str(error)

    def _state(self) -> State:
        hooked = self.ddp.remove_forward_pre_hook_handles
        return {
            "hooked modules": [module in hooked for module in self.ddp.module.modules()],
            "groups": [self._group_state(group) for group in self.ddp.bucket_groups],
            "expert groups": len(self.ddp.expert_parallel_bucket_groups),
        }

    @staticmethod
    def _group_state(group: Any) -> State:
        return {
            "params": len(group.params),
            "is_last_microbatch": group.is_last_microbatch,
            "is_first_batch": group.is_first_batch,
            "gather outstanding": group.param_gather_handle is not None,
            "gather dispatched": group.param_gather_dispatched,
            "reduction outstanding": group.grad_reduce_handle is not None,
            "counts": sorted(group.per_param_grad_ready_counts.values()),
            "golden counts": sorted(group.golden_per_param_grad_ready_counts.values()),
        }


def run_mock(overlap_grad_reduce: bool, overlap_param_gather: bool, script: Script) -> Any:
    first, last = MockModule(params=1), MockModule(params=1)
    module = MockModule(first, MockModule(params=1), last)
    ddp = MockDDP(module, overlap_grad_reduce=overlap_grad_reduce, overlap_param_gather=overlap_param_gather)

    def backward_of_last_module() -> None:
        for param in last.parameters():
            ddp.param_to_bucket_group[param].register_grad_ready(param)

    calls: dict[str, Callable[[], object]] = {
        "forward": ddp,
        "backward": ddp.backward,
        "forward_first_module": first,
        "backward_of_last_module": backward_of_last_module,
        "add_module": lambda: module.children.append(MockModule()),
    }
    return Run(ddp, calls).play(script)


def run_real(cases: list[Any]) -> list[Any]:
    """On a rank: every case on the real class."""
    with cpu_backend():
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        return [_run_real_case(reduce, gather, script) for _, reduce, gather, _, script in cases]


def _run_real_case(overlap_grad_reduce: bool, overlap_param_gather: bool, script: Script) -> Any:
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    width = 4
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(3)))
    ddp = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=width, num_attention_heads=1),
        DistributedDataParallelConfig(
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            use_distributed_optimizer=True,
            bucket_size=1,
        ),
        module,
    )
    activations: list[torch.Tensor] = []

    def forward() -> None:
        activations.append(ddp(torch.ones(1, width)))

    def backward() -> None:
        activations.pop().sum().backward()

    def backward_of_last_module() -> None:
        activations.pop()
        module[2](torch.ones(1, width)).sum().backward()

    calls: dict[str, Callable[[], object]] = {
        "forward": forward,
        "backward": backward,
        "forward_first_module": lambda: module[0](torch.ones(1, width)) is None or None,
        "backward_of_last_module": backward_of_last_module,
        "add_module": lambda: module.append(torch.nn.Identity()) is None or None,
    }
    return Run(ddp, calls).play(script)


@pytest.fixture(scope="module")
def real_outcomes() -> dict[tuple[str, str], Any]:
    [outcomes] = spawn_ranks(run_real, 1, CASES, timeout=240)
    return {(case[0], case[3]): outcome for case, outcome in zip(CASES, outcomes, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES])
def test_same_outcomes(case: Any, real_outcomes: dict[tuple[str, str], Any]) -> None:
    options, reduce, gather, name, script = case
    assert run_mock(reduce, gather, script) == real_outcomes[options, name]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("disabling_twice", ("KeyError", 0)),
        ("enabling_twice", ("AssertionError", "")),
        ("a_module_added_later", ("KeyError", 4)),
        ("dispatching_a_gather_twice", ("AssertionError", "")),
        (
            "dispatching_a_reduction_twice_later",
            ("AssertionError", "Should not have multiple communication calls outstanding at once"),
        ),
        (
            "finishing_without_a_backward",
            (
                "AssertionError",
                "Communication call has not been issued for this bucket (0/1 params have grad available)",
            ),
        ),
    ],
)
def test_the_failing_scripts_fail(
    name: str, error: object, real_outcomes: dict[tuple[str, str], Any]
) -> None:
    assert error in [outcome for _, outcome, _ in real_outcomes["overlapped", name]]
