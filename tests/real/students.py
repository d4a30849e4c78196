"""A student of the demo's two teachers on real megatron-core, on any layout of two ranks.

It runs the demo's modules, with another attention under context parallelism, which Megatron's local attention
does not support.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

TRAIN = "megatron_rl_patches.demo.training:train"


class Student(NamedTuple):
    """Results by order: of the teachers, and of the student before each rollout."""

    teachers: dict[str, float]
    reverse_kl: dict[str, list[float]]
    score: dict[str, list[float]]


def distill(
    sizes: dict[str, int], target: str, way: str, teachers_folder: str, rollouts: int, timeout: float = 580
) -> Student:
    """Distill a student for some rollouts on two ranks.

    Args:
        sizes: what the demo's ``policy.initialize`` takes, such as ``{"tensor_parallel_size": 2}``.
        target: ``"routed"`` or ``"mixture"``.
        way: ``"top-k"`` or ``"full"``.
        teachers_folder: the teachers are trained by the first call and loaded by the others.
        timeout: in seconds.
    """
    first, second = spawn_ranks(_on_a_rank, 2, sizes, target, way, teachers_folder, rollouts, timeout=timeout)
    assert first == second
    return first


def _on_a_rank(sizes: dict[str, int], target: str, way: str, folder: str, count: int) -> Student:
    with cpu_backend(), applied(settings=Settings(train_functions=(TRAIN,))):
        from megatron_rl_patches.demo import policy, program, teachers

        policy.initialize(0, **sizes)
        with _attention_for_context_parallelism(policy):
            pool = teachers.Teachers(Path(folder), 0)
            scores = program.scores_of_teachers(pool, 0)
            rollouts = list(program.distill(count, 0, pool, target, way))
    return Student(
        scores,
        {order: [rollout.reverse_kl[order] for rollout in rollouts] for order in scores},
        {order: [rollout.score[order] for rollout in rollouts] for order in scores},
    )


@contextmanager
def _attention_for_context_parallelism(policy: Any) -> Iterator[None]:
    from megatron_rl_patches.testing.tiny_models import GatheredAttention

    plain = policy.get_gpt_layer_local_spec

    def spec() -> Any:
        spec = plain()
        if policy.parallel_state.get_context_parallel_world_size() > 1:
            spec.submodules.self_attention.submodules.core_attention = GatheredAttention
        return spec

    with mock.patch.object(policy, "get_gpt_layer_local_spec", spec):
        yield
