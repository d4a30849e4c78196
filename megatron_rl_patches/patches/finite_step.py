"""A step whose gradient norm is not finite does not reach the weights, and does not end the job.

A site is left alone where the code does so itself. The distributed and the layer-wise optimizer inherit
``step``. What happens is in :mod:`..reentry.finite_step` and :mod:`..frameworks.optimizer_steps`.

Not patched: Megatron-LM and Megatron-Bridge, whose loops count a skipped iteration and let the schedule
wait; AReaL, which reports success as a metric; verl before its engine, which raises.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..errors import PatchError
from ..frameworks import megatron_utils

_OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
#: A test that is true of each gradient norm that is not finite.
_NOT_FINITE = re.compile(
    r"not \w+\.isfinite\(\w*norm\)( or .*)?|\w+\.isnan\(\w*norm\) or \w+\.isinf\(\w*norm\)( or .*)?"
)
_NEMO_RL = "nemo_rl.models.policy.workers.megatron_policy_worker"
_NEMO_RL_VALUES = "nemo_rl.models.value.workers.megatron_value_worker"


@dataclass(frozen=True)
class FiniteStepOptions:
    """Options of the patch.

    Attributes:
        finite_step_limit: after so many skipped steps in a row, training ends with ``NonFiniteGradients``;
            0: never.

    Raises:
        PatchError: it is negative.
    """

    finite_step_limit: int = 10

    def __post_init__(self) -> None:
        if self.finite_step_limit < 0:
            raise PatchError(f"finite_step_limit is {self.finite_step_limit}; expected 0 (never) or more")


# --- reasons why a site is left alone, judged from the target's code


def _looks_at_the_norm(target: TargetSource) -> str | None:
    steps = target.tests_before("step_with_ready_grads")
    skips = steps and all(
        any(_NOT_FINITE.fullmatch(test) and not outcome for test, outcome in tests.items()) for tests in steps
    )
    return "upstream itself skips a step whose gradient norm is not finite" if skips else None


def _does_not_raise(target: TargetSource) -> str | None:
    return None if target.mentions("NotImplementedError") else "it does not raise where a step fails"


def _does_not_advance(target: TargetSource) -> str | None:
    advances = any("scheduler" in call.function for call in target.calls("step"))
    return None if advances else "it does not advance the schedule"


def _skips_are_counted() -> str:
    counts = sys.modules.get("megatron_rl_patches.reentry.finite_step")  # which the first step imports
    return counts.summary() if counts else ""


# --- sites

patch = Patch(
    name="finite-step",
    summary="a step whose gradient norm is NaN or infinite is skipped, and training continues",
    upstream=("radixark/miles#2198", "THUDM/slime#1762", "NVIDIA/Megatron-LM#3460"),
    options=FiniteStepOptions,
)

for _name in _OPTIMIZERS:
    patch.wrap(
        "megatron.core.optimizer.optimizer",
        f"{_name}.step",
        ".frameworks.optimizer_steps:step",
        requires_names=("step_with_ready_grads",),
        skip_if=_looks_at_the_norm,
        detail=_skips_are_counted if _name == "ChainedOptimizer" else None,
    )
patch.wrap(
    "megatron.core.optimizer",
    "get_megatron_optimizer",
    ".frameworks.optimizer_steps:get_megatron_optimizer",
    parameters=("model_chunks",),
    helps=tuple(f"{name}.step" for name in _OPTIMIZERS),
)
patch.wrap(
    megatron_utils("model"),
    "train_one_step",
    ".frameworks.optimizer_steps:train_one_step",
    parameters=("optimizer", "opt_param_scheduler"),
    skip_if=lambda code: (
        None if code.asserts("update_successful") else "it does not assert that a step succeeds"
    ),
)
for _stepped, _skip_if in (("optimizer", _does_not_raise), ("lr_scheduler", _does_not_advance)):
    patch.wrap(
        "verl.workers.engine.megatron.transformer_impl",
        f"MegatronEngine.{_stepped}_step",
        f".frameworks.optimizer_steps:verl_{_stepped}_step",
        requires_names=(_stepped,),
        skip_if=_skip_if,
        optional_module=True,
    )
for _module, _method in (
    (_NEMO_RL, "MegatronPolicyWorkerImpl.train"),
    (_NEMO_RL, "MegatronPolicyWorkerImpl._finish_train_step_body"),
    (_NEMO_RL_VALUES, "MegatronValueWorkerImpl.train"),
):
    patch.wrap(
        _module,
        _method,
        ".frameworks.optimizer_steps:nemo_rl_train",
        requires_names=("scheduler", "optimizer"),
        skip_if=_does_not_advance,
        introduced_with=_method.rpartition(".")[2],
        optional_module=_module == _NEMO_RL_VALUES,
    )
