"""Widths that are refused, and scores as lists; tests/real has the rest."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.scoring.microbatches import Limits, ScoreOptions, parse_microbatches
from megatron_rl_patches.losses.vocab.arguments import LogProbs

PADDED: dict[str, Any] = {"tokens": torch.arange(12).reshape(2, 6), "total_lengths": [6, 4]}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sequence_parallel_size": 4}, "a multiple of 4: .* tensor-parallel size, for"),
        ({"sequence_parallel_size": 2, "cp_size": 2}, "a multiple of 8: 2 × context-parallel size"),
    ],
)
def test_widths_that_parallel_ranks_cannot_share(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"microbatch 0: tokens are 6 wide.*{message}"):
        parse_microbatches([PADDED], ScoreOptions("forward_values"), Limits(50, **sizes))


def test_log_probs_are_a_list_to_those_who_map_over_tensors_or_store_them(tmp_path: Path) -> None:
    halves = tree_map(torch.Tensor.half, {"old": LogProbs([torch.zeros(3)], 7)})["old"]
    assert isinstance(halves, list) and halves[0].dtype == torch.float16 and halves[:1].vocab_size == 7
    torch.save({"old": halves}, tmp_path / "scores")
    loaded = torch.load(tmp_path / "scores")["old"]  # with weights_only=True
    assert loaded[0].equal(halves[0]) and loaded.vocab_size == copy.deepcopy(halves).vocab_size == 7
