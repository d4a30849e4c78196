"""``reentrant-train`` on unmodified checkouts of the frameworks, on a CPU.

Point ``SLIME_DIR``, ``VIME_DIR``, ``MILES_DIR``, ``MEGATRON_LM_DIR`` at checkouts; see
``docs/frameworks.md``. Without them every test here is skipped.
"""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks import import_stubs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.test_reentry import FINE, KEY_ERROR, NO_SYNC, PATCH, TIMER, outcome

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

FORWARD_ONLY = ("slime", "vime", "miles")
MICROBATCHES = 2  # per step


def prepare(paths: list[str]) -> None:
    # Ahead of an installed megatron-core: a checkout's megatron.training goes with its megatron.core.
    sys.path[:0] = paths
    import_stubs.install()


def _unpatched(framework: str, paths: list[str]) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks.real_jobs import JOBS

        job = JOBS[framework]()
        seen: dict[str, Any] = {"first train": outcome(job.train), "second train": outcome(job.train)}
        job.config.no_sync_func = None
        seen["without the assertion"] = outcome(job.train)
        job = JOBS[framework]()
        job.train()
        seen["save after train"] = outcome(job.save)
        return seen


@pytest.mark.parametrize("framework", ["slime", "vime", "miles", "megatron.training"])
def test_unpatched_frameworks_fail_as_reported(framework: str, checkouts: Checkouts) -> None:
    [seen] = spawn_ranks(_unpatched, 1, framework, checkouts(framework), timeout=300)
    assert seen["first train"] == FINE
    assert seen["second train"].startswith(NO_SYNC)
    if framework == "megatron.training":
        assert seen["without the assertion"] == TIMER
        assert seen["save after train"] in (KEY_ERROR, FINE)  # fine from 0.16 on
    else:
        assert seen["without the assertion"] == KEY_ERROR
        assert seen["save after train"] == KEY_ERROR


def _rollouts(framework: str, paths: list[str]) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks.real_jobs import JOBS
        from tests.real.tiny_gpt import counting_overlap

        functions = JOBS[framework].functions()
        originals = {name: getattr(homes[0], name) for name, homes in functions.items()}
        uninterrupted = JOBS[framework]()
        before = uninterrupted.checksum()
        uninterrupted.train(6)
        gc.enable()  # unpatched, train() leaves it off
        apply(PATCH)
        job = JOBS[framework]()
        hooks = []
        with counting_overlap() as overlap:
            for _ in range(3):
                if framework in FORWARD_ONLY:
                    job.log_probs()
                job.train(2)
                job.save()
                hooks.append(job.hooks_on)
        seen = {
            "trained": job.checksum() != before,
            "same weights": job.checksum() == uninterrupted.checksum(),
            "gathers, reductions": (overlap.param_gathers > 0, overlap.grad_reduces > 0),
            "saved": job.disk.checksums,
            "hooks": hooks,
            "collecting": gc.isenabled(),
            "states": {
                site.target: site.state for site in status() if site.framework in (framework, "megatron.core")
            },
        }
        if framework in FORWARD_ONLY:
            pairs = list(zip(job.log_probs(), uninterrupted.log_probs(), strict=True))
            seen["same log-probabilities"] = [same.equal(other) for same, other in pairs]
        job.config.no_sync_func = nullcontext
        seen["foreign"] = outcome(job.train)
        revert(PATCH)
        seen["restored"] = all(
            getattr(homes[0], name) is originals[name] for name, homes in functions.items()
        )
        return seen


@pytest.mark.runs("rollouts")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", ["slime", "vime", "miles", "megatron.training"])
def test_rollouts_with_saves_between(framework: str, ranks: int, checkouts: Checkouts) -> None:
    results = spawn_ranks(_rollouts, ranks, framework, checkouts(framework), timeout=300)
    for seen in results:
        assert set(seen["states"].values()) <= {"applied", "not needed"}
        assert [state for target, state in seen["states"].items() if target.endswith(".train")] == ["applied"]
        assert seen["trained"]
        assert seen["same weights"]
        if framework in FORWARD_ONLY:
            assert seen["same log-probabilities"] == [True] * MICROBATCHES
        assert seen["gathers, reductions"] == (True, True)
        assert seen["hooks"] == [False] * 3
        assert seen["collecting"]
        assert seen["foreign"].startswith(NO_SYNC)
        assert seen["restored"]
    assert len({tuple(seen["saved"]) for seen in results}) == 1
    assert len(set(results[0]["saved"])) == 3
