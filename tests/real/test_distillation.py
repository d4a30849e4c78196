"""On-policy distillation on real megatron-core: a student learns from two teachers, on any layout.

It runs the demo's modules, with another attention under context parallelism, which Megatron's local attention
does not support.
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

TRAIN = "megatron_rl_patches.demo.training:train"
WINDOW = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _distill(sizes: dict[str, int], target: str, way: str, folder: str, count: int) -> dict[str, Any]:
    with cpu_backend(), applied(settings=Settings(train_functions=(TRAIN,))):
        from megatron_rl_patches.demo import distillation, policy, teachers

        policy.initialize(0, **sizes)
        with _attention_for_context_parallelism(policy):
            pool = teachers.Teachers(Path(folder), 0)
            scores = distillation.scores_of_teachers(pool, 0)
            rollouts = list(distillation.rollouts(count, 0, pool, target, way))
        return {
            "teachers": scores,
            "reverse KL": {order: [r.reverse_kl[order] for r in rollouts] for order in scores},
            "score": {order: [r.score[order] for r in rollouts] for order in scores},
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


def run(sizes: dict[str, int], target: str, way: str, folder: str, count: int) -> dict[str, Any]:
    ranks = spawn_ranks(_distill, 2, sizes, target, way, folder, count, timeout=580)
    assert ranks[0] == ranks[1]
    return ranks[0]


def falls(values: list[float]) -> bool:
    """Does the moving average fall from each rollout to the next, but for a hundredth of the first value?"""
    means = torch.tensor(values).unfold(0, WINDOW, 1).mean(1)
    return bool((means.diff() < 0.01 * values[0]).all())


def test_a_student_becomes_as_good_as_each_teacher_at_its_task(teachers_folder: str) -> None:
    result = run({"pipeline_parallel_size": 2}, "routed", "full", teachers_folder, 30)
    for order, teacher in result["teachers"].items():
        assert teacher > 0.95
        assert result["score"][order][0] < 0.25
        assert sum(result["score"][order][-3:]) / 3 > 0.9 * teacher
        assert falls(result["reverse KL"][order])
        assert result["reverse KL"][order][-1] < 0.25 * result["reverse KL"][order][0]


@pytest.mark.parametrize(
    ("sizes", "target", "way"),
    [
        ({}, "mixture", "full"),  # with data parallelism
        ({"tensor_parallel_size": 2}, "routed", "top-k"),
        ({"context_parallel_size": 2}, "routed", "full"),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value) or "data_parallel_size",
)
def test_it_learns_on_other_layouts(
    sizes: dict[str, int], target: str, way: str, teachers_folder: str
) -> None:
    result = run(sizes, target, way, teachers_folder, 10)
    for order in result["teachers"]:
        divergence, score = result["reverse KL"][order], result["score"][order]
        assert sum(divergence[-3:]) < 0.85 * sum(divergence[:3])
        assert sum(score[-3:]) > 2 * sum(score[:3])
