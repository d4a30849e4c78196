"""``reentrant-train`` on unmodified checkouts of the frameworks, on a CPU.

Point ``SLIME_DIR``, ``VIME_DIR``, ``MILES_DIR``, ``MEGATRON_LM_DIR`` at checkouts; see
``docs/frameworks.md``. Without them every test here is skipped.
"""

from __future__ import annotations

import sys

import pytest

from tests.frameworks import import_stubs
from tests.frameworks.rollouts import FINE, KEY_ERROR, NO_SYNC, TIMER, check_rollouts, outcome
from tests.ranks import on_ranks

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.parametrize("framework", ["slime", "vime", "miles", "megatron.training"]),
]


def prepare(paths: list[str]) -> None:
    # Ahead of an installed megatron-core: a checkout's megatron.training goes with its megatron.core.
    sys.path[:0] = paths
    import_stubs.install()


@on_ranks(1, timeout=300)
def test_unpatched_frameworks_fail_as_reported(framework: str, paths: list[str]) -> None:
    prepare(paths)
    from tests.frameworks.real_jobs import JOBS

    job = JOBS[framework]()
    assert outcome(job.train) == FINE
    assert outcome(job.train).startswith(NO_SYNC)
    job.config.no_sync_func = None
    is_megatron = framework == "megatron.training"
    assert outcome(job.train) == (TIMER if is_megatron else KEY_ERROR)
    job = JOBS[framework]()
    job.train()
    assert outcome(job.save) in ((KEY_ERROR, FINE) if is_megatron else (KEY_ERROR,))  # fine from 0.16 on


@pytest.mark.runs("rollouts")
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks, timeout=300)
def test_rollouts_with_saves_between(framework: str, ranks: int, paths: list[str]) -> None:
    prepare(paths)
    from tests.frameworks.real_jobs import JOBS

    check_rollouts(JOBS[framework], framework)


@pytest.mark.runs("mixture of experts", ranks=2)
@on_ranks(2, timeout=300)
def test_rollouts_of_a_mixture_of_experts(framework: str, paths: list[str]) -> None:
    """Each rank has half of the experts, and both overlaps have bucket groups for them."""
    prepare(paths)
    from tests.frameworks.real_jobs import JOBS

    check_rollouts(JOBS[framework], framework, kind="moe", ep=2)
