"""On-policy distillation on real megatron-core: a student learns from two teachers, on any layout.

``benchmarks/students.py`` does the same on all layouts, and to the end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.references.distillation_task import distill

WINDOW = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def falls(values: list[float]) -> bool:
    """Does the moving average fall from each rollout to the next, but for a hundredth of the first value?"""
    means = torch.tensor(values).unfold(0, WINDOW, 1).mean(1)
    return bool((means.diff() < 0.01 * values[0]).all())


def test_a_student_becomes_as_good_as_each_teacher_at_its_task(tmp_path: Path) -> None:
    student = distill({"pipeline_model_parallel_size": 2}, "routed", "full", str(tmp_path), 30)
    for order, teacher in student.teachers.items():
        assert teacher > 0.95
        score, divergence = student.score[order], student.reverse_kl[order]
        assert score[0] < 0.25
        assert sum(score[-3:]) / 3 > 0.9 * teacher
        assert falls(divergence)
        assert divergence[-1] < 0.25 * divergence[0]
