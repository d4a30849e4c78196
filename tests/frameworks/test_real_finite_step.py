"""``finite-step`` on unmodified checkouts: a NaN in one microbatch of the second rollout of three.

``SLIME_DIR``, ``VIME_DIR``, ``MILES_DIR``, ``MEGATRON_LM_DIR`` name checkouts, see ``docs/frameworks.md``.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from megatron_rl_patches import applied
from tests.frameworks.import_stubs import prepare
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.parametrize("framework", ["slime", "vime", "miles", "megatron.training"]),
]
BAD_STEP = 2  # the first of the second rollout


def rollouts(framework: str, bad: bool = False, leave_out: bool = False) -> tuple[Any, list[Any]]:
    """Train three rollouts of two steps, and return the job and the gradient norms that were reported."""
    from tests.frameworks.jobs import MICROBATCHES
    from tests.frameworks.real_jobs import JOBS

    job = JOBS[framework]()
    forwards, reported = 0, []

    def spoil(module: Any, arguments: Any, output: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return output * math.nan if bad and forwards == BAD_STEP * MICROBATCHES + 2 else output

    for chunk in job.model:
        chunk.ddp_config.check_for_nan_in_grad = False
        chunk.module.register_forward_hook(spoil)
    module = sys.modules[job.homes[0]]
    name = "train_step" if framework == "megatron.training" else "train_one_step"
    train_one_step = getattr(module, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        result = train_one_step(*args, **kwargs)
        reported.append(result[-3] if name == "train_step" else result[1])
        return result

    setattr(module, name, noting)
    try:
        for steps in (2, 2, 2):
            if leave_out and job.steps == BAD_STEP:
                job.steps += 1
                job.batches.seek(job.steps * MICROBATCHES)
                steps = 1
            job.train(steps)
    finally:
        setattr(module, name, train_one_step)
    return job, reported


@on_ranks(1, timeout=400)
def test_a_bad_step_equals_that_step_left_out(framework: str, paths: list[str]) -> None:
    prepare(paths)
    with applied("reentrant-train"):
        spoilt, _ = rollouts(framework, bad=True)
        assert any(parameter.isnan().any() for parameter in spoilt.model[0].parameters())
        with applied("finite-step"):
            skipped, norms = rollouts(framework, bad=True)
            expected, _ = rollouts(framework, leave_out=True)
    assert skipped.checksum() == expected.checksum()
    assert skipped.scheduler.num_steps == expected.scheduler.num_steps > 0
    assert [math.isnan(float(norm)) for norm in norms] == [step == BAD_STEP for step in range(6)]
