"""What one rank alone finds wrong with the teachers is an error on every rank, and no rank waits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from megatron_rl_patches.testing import spawn_ranks


def _scored(folder: Path, fault: str) -> str:
    import torch.distributed as dist

    from megatron_rl_patches.errors import InvalidInputError
    from megatron_rl_patches.frameworks.distillation_teachers import TeacherScorer

    def forward(function: Any) -> NoReturn:
        raise AssertionError("a rank has started a forward pass")

    here = dist.get_rank() == 1
    teachers = {"math": str(folder / ("missing" if here and fault == "folder" else "math"))}
    rollout = {"source_names": ["math", "poetry" if here and fault == "name" else "math"]}
    if here and fault == "names":
        del rollout["source_names"]
    args = SimpleNamespace(opd_teachers=teachers, opd_combine="route", opd_top_k="full")
    actor = SimpleNamespace(args=args, weights_backuper=SimpleNamespace(backup_tags={}))
    try:
        with TeacherScorer(actor).scores_in(rollout, forward):
            return "no error"
    except InvalidInputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("folder", "has no folder"),
        ("name", "samples name ['poetry'], and the teachers are ['math']"),
        ("names", "the rollout has no source_names"),
    ],
)
def test_what_one_rank_finds_wrong_is_an_error_on_all(fault: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    first, second = spawn_ranks(_scored, 2, tmp_path, fault, timeout=60)
    assert first == second
    assert message in first
