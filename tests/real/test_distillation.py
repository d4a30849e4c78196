"""On-policy distillation on real megatron-core: a student learns from two teachers, on any layout.

The demo's own modules, but for attention under context parallelism, which Megatron's local one refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

LAYOUTS: dict[str, dict[str, int]] = {
    "DP 2": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "CP 2": {"context_parallel_size": 2},
}
TRAIN = "megatron_rl_patches.demo.training:train"
ROLLOUTS, WINDOW = 30, 10


def _distil(sizes: dict[str, int], target: str, folder: str) -> dict[str, Any]:
    with cpu_backend(), applied(settings=Settings(train_functions=(TRAIN,))):
        from megatron_rl_patches.demo import distillation, policy, teachers

        policy.initialize(0, **sizes)
        with _attention_for_context_parallelism(policy):
            of_orders = teachers.Teachers(Path(folder), 0)
            alone = distillation.scores_of_teachers(of_orders, 0)
            rollouts = list(distillation.rollouts(ROLLOUTS, 0, of_orders, target))
        return {
            "teachers": alone,
            "divergence": {order: [r.divergence[order] for r in rollouts] for order in alone},
            "score": {order: [r.score[order] for r in rollouts] for order in alone},
        }


@contextmanager
def _attention_for_context_parallelism(policy: Any) -> Iterator[None]:
    from tests.real.tiny_gpt import GatheredAttention

    plain = policy.get_gpt_layer_local_spec

    def spec() -> Any:
        spec = plain()
        if policy.parallel_state.get_context_parallel_world_size() > 1:
            spec.submodules.self_attention.submodules.core_attention = GatheredAttention
        return spec

    with mock.patch.object(policy, "get_gpt_layer_local_spec", spec):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the teachers, which the first layout trains and saves, and the others load."""
    return str(tmp_path_factory.mktemp("teachers"))


def run(layout: str, target: str, folder: str) -> dict[str, Any]:
    ranks = spawn_ranks(_distil, 2, LAYOUTS[layout], target, folder, timeout=280)
    assert ranks[0] == ranks[1]
    return ranks[0]


def falls(values: list[float]) -> bool:
    """Does the moving average fall from each rollout to the next?"""
    means = torch.tensor(values).unfold(0, WINDOW, 1).mean(1)
    return bool((means.diff() < 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_student_becomes_as_good_as_each_teacher_at_its_task(layout: str, folder: str) -> None:
    found = run(layout, "routed", folder)
    for order, teacher in found["teachers"].items():
        assert teacher > 0.95
        assert found["score"][order][0] < 0.25
        assert sum(found["score"][order][-3:]) / 3 > 0.9 * teacher
        assert falls(found["divergence"][order])
        assert found["divergence"][order][-1] < 0.25 * found["divergence"][order][0]


@pytest.mark.slow
def test_a_mixture_of_teachers_is_learned(folder: str) -> None:
    found = run("DP 2", "mixture", folder)
    for order in found["teachers"]:
        assert falls(found["divergence"][order])
        assert found["divergence"][order][-1] < 0.3 * found["divergence"][order][0]
        assert found["score"][order][-1] > 2 * found["score"][order][0]
