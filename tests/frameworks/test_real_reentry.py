"""``reentrant-train`` and ``finite-step`` on unmodified checkouts of the frameworks, on a CPU.

``SLIME_DIR``, ``VIME_DIR``, ``MILES_DIR``, ``MEGATRON_LM_DIR`` name them, see ``docs/frameworks.md``.
"""

import importlib
import inspect
import logging
import math
import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import Settings, applied, status
from megatron_rl_patches.reentry import finite_step, training_warnings
from tests.frameworks import rollouts
from tests.frameworks.import_stubs import job_of
from tests.frameworks.rollouts import (
    FINE,
    NO_SYNC,
    TIMER,
    TRANSFORMER_ENGINE,
    check_rollouts,
    outcome,
    with_layers,
)
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.parametrize("framework", ["slime", "vime", "miles", "megatron.training"]),
]


@on_ranks(1, timeout=300)
def test_unpatched_frameworks_fail_as_reported(framework: str, paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    job = job_type()
    assert outcome(job.train) == FINE
    assert outcome(job.train).startswith(NO_SYNC)
    job.config.no_sync_func = None
    is_megatron = framework == "megatron.training"
    no_handle = f"KeyError: {type(job.model[0].module).__name__}"  # for the first module
    assert outcome(job.train) == (TIMER if is_megatron else no_handle)
    job = job_type()
    job.train()
    assert outcome(job.save) in ((no_handle, FINE) if is_megatron else (no_handle,))  # fine from 0.16 on


@with_layers("rollouts")
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks, timeout=300)
def test_rollouts_with_saves_between(framework: str, layers: str, ranks: int, paths: list[str]) -> None:
    """With layers of TransformerEngine, two ranks divide each layer and the tokens of a sequence."""
    divided = {"tp": ranks, "sequence_parallel": ranks > 1} if layers == TRANSFORMER_ENGINE else {}
    check_rollouts(job_of(framework, paths), framework, layers=layers, **divided)


@with_layers("MoE", ranks=2)
@on_ranks(2, timeout=300)
def test_rollouts_of_a_mixture_of_experts(framework: str, layers: str, paths: list[str]) -> None:
    """Each rank has half of the experts, and both overlaps have bucket groups for them."""
    check_rollouts(job_of(framework, paths), framework, layers=layers, kind="moe", ep=2)


@on_ranks(1, timeout=300)
def test_rollouts_that_sample_from_a_part_of_the_vocabulary(framework: str, paths: list[str]) -> None:
    """With the framework's own policy loss, iterator and, where its trainer takes one, mask."""
    if framework == "megatron.training":
        return
    job_type = job_of(framework, paths)
    from tests.frameworks.loss_jobs import LOSSES
    from tests.frameworks.real_jobs import POLICY
    from tests.references.tiny_gpt import VOCABULARY

    keys = getattr(importlib.import_module(LOSSES[framework]), "ROLLOUT_TOP_P_TOKEN_KEYS", ())

    class Job(job_type):  # type: ignore[misc]
        def _rollout_data(self, samples: int) -> dict[str, Any]:
            data: dict[str, Any] = super()._rollout_data(samples)
            if self.args.rollout_top_p == 1.0:
                return data
            offsets = [torch.arange(length + 1) * VOCABULARY for length in data["response_lengths"]]
            ids = [torch.arange(VOCABULARY).repeat(length) for length in data["response_lengths"]]
            return {**data, **dict(zip(keys, (ids, offsets), strict=bool(keys)))}

    def reported(top_p: float, top_k: int) -> list[str]:
        training_warnings.messages.clear()
        Job(POLICY | {"rollout_top_p": top_p, "rollout_top_k": top_k}).train(1)
        return [line.partition(":")[0] for line in training_warnings.reported() if "top_p" in line]

    with applied("reentrant-train"):
        assert reported(1.0, -1) == []
        assert reported(1.0, 20) == ["rollout_top_p=1.0, rollout_top_k=20"]
        assert reported(0.8, -1) == ([] if keys else ["rollout_top_p=0.8, rollout_top_k=-1"])


@on_ranks(1, timeout=300)
def test_the_log_of_each_interval(framework: str, paths: list[str]) -> None:
    """Three calls of two steps; a line per step, and a line per three steps."""
    if framework != "megatron.training":
        pytest.skip("it has a log of its own")
    job_type = job_of(framework, paths)
    logs, checksums = {}, []
    for patched, interval in ((False, 1), (True, 1), (True, 3)):
        with applied("reentrant-train"):
            job = job_type({"log_interval": interval}, overlap_param_gather=False)
            lines, training = [], job.module
            log = training.training_log if patched else inspect.unwrap(training.training_log)
            with (
                mock.patch.multiple(training, training_log=log, print_rank_last=lines.append),
                rollouts.results_of(training, "train_step") as steps,
            ):
                for _ in range(3):
                    job.train(2)
            checksums.append(job.checksum())
        found = re.findall(r" iteration +(\d+)/.* loss: (\S+) \|", "\n".join(lines))
        logs[patched, interval] = {int(step): float(loss) for step, loss in found}
    each = {number: step[0]["loss"].item() for number, step in enumerate(steps, 1)}
    assert logs[True, 1] == pytest.approx(each, rel=1e-5)
    wrong = {**each, 2: (each[1] + each[2]) / 2, 4: (each[3] + each[4]) / 2, 6: (each[5] + each[6]) / 2}
    if logs[False, 1] != pytest.approx(each, rel=1e-5):  # from 0.16 on
        assert logs[False, 1] == pytest.approx(wrong, rel=1e-5)
    assert logs[True, 3][3] == pytest.approx(each[3], rel=1e-5)
    assert logs[True, 3][6] == pytest.approx((each[5] + each[6]) / 2, rel=1e-5)
    assert len(set(checksums)) == 1


# --- finite-step: a NaN in one microbatch of the first step of the second rollout of three


#: What Megatron says before gradients are reduced, unless its check is off.
CHECK = "found NaN in local grad norm for bucket"
UNCHECKED = {"no_check_for_nan_in_loss_and_grad": True}


def _rollouts(job: Any, bad: bool = False, leave_out: bool = False) -> tuple[Any, list[float]]:
    """Train three rollouts of two steps, and return the job and the gradient norms that were reported."""
    from tests.frameworks.jobs import MICROBATCHES

    name, norm = ("train_one_step", 1) if hasattr(job.module, "train_one_step") else ("train_step", -3)
    rollouts.spoil_forward(job.model[0], 2 * MICROBATCHES + 2 if bad else 0)
    with rollouts.results_of(job.module, name) as steps:
        for number in range(3):
            if leave_out and number == 1:
                job.resume(job.steps + 1)
            job.train(1 if leave_out and number == 1 else 2)
    return job, [float(step[norm]) for step in steps]


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks, timeout=400)
def test_a_bad_step_equals_that_step_left_out(framework: str, ranks: int, paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    is_megatron = framework == "megatron.training"
    with applied("reentrant-train"):
        unpatched, _ = _rollouts(job_type(UNCHECKED), bad=True)
        # slime and miles look at the norm themselves, and say nothing.
        assert any(p.isnan().any() for p in unpatched.model[0].parameters()) == is_megatron
        with applied("finite-step"):
            with mock.patch.object(logging.getLogger("megatron_rl_patches"), "log") as log:
                skipped, norms = _rollouts(job_type(UNCHECKED), bad=True)
            [site] = [site for site in status() if site.target.endswith("ChainedOptimizer.step")]
            expected, _ = _rollouts(job_type(UNCHECKED), leave_out=True)
    assert site.detail == "1 of 6 steps skipped"
    lines = [str(call) for call in log.call_args_list if "step 3 skipped: the norm" in str(call)]
    assert len(lines) == (torch.distributed.get_rank() == 0)
    assert skipped.checksum() == expected.checksum()
    assert skipped.scheduler.num_steps == expected.scheduler.num_steps > 0
    assert list(map(math.isnan, norms)) == [False, False, True, False, False, False]


@on_ranks(1, timeout=400)
def test_training_ends_after_the_limit_or_by_the_check_of_megatron(framework: str, paths: list[str]) -> None:
    """With Megatron's check, which is its default, the first bad gradient ends the job before the step."""
    job_type = job_of(framework, paths)
    with applied("reentrant-train", "finite-step", settings=Settings(finite_step_limit=3)):
        for flags, error, steps in ((UNCHECKED, "NonFiniteGradients: 3 steps in a row", 3), ({}, CHECK, 0)):
            job = job_type(flags)
            before = job.checksum()
            job.model[0].module.register_forward_hook(lambda *unused: unused[-1] * math.nan)
            assert error in outcome(job.train, 5)
            assert job.checksum() == before
            assert finite_step.history_of(job.optimizer).skipped == steps
