"""Which rows of a microbatch predict what, and widths; tests/real has what else is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.scoring.microbatches import Limits, ScoreOptions, parse_microbatches
from megatron_rl_patches.losses.vocab.arguments import LogProbs

PADDED: dict[str, Any] = {"tokens": torch.arange(12).reshape(2, 6), "lengths": [6, 4]}
PACKED: dict[str, Any] = {"tokens": torch.arange(8)[None], "lengths": [3, 4], "response_lengths": [1, 2]}


@pytest.mark.parametrize(
    ("batch", "packing", "rows", "targets"),
    [
        (PADDED, False, [0, 1, 2, 3, 4, 6, 7, 8], [1, 2, 3, 4, 5, 7, 8, 9]),  # all but the first token
        (PADDED | {"response_lengths": torch.tensor([2, 0])}, False, [3, 4], [4, 5]),
        (PACKED, True, [1, 4, 5], [2, 5, 6]),
    ],
)
def test_rows_that_predict(batch: dict[str, Any], packing: bool, rows: list[int], targets: list[int]) -> None:
    options = ScoreOptions("forward_values", forward=torch.nn.Module.__call__ if packing else None)
    first, second = parse_microbatches([batch, batch], options, Limits(50))
    assert first.layout.response_rows.tolist() == rows
    assert first.targets_n.tolist() == targets
    assert (first.first, second.first) == (0, 2)


@pytest.mark.parametrize(
    ("batches", "sizes", "message"),
    [
        ([], {}, "no microbatches"),
        ([PADDED, PADDED | {"lengths": [7, 4]}], {}, "microbatch 1: lengths"),
        (
            [PADDED | {"position_ids": torch.zeros(2, 4)}],
            {},
            "position_ids would not be read: pass a `forward`",
        ),
        ([PADDED | {"indices": [1, 0]}], {}, "results are in the order of the microbatches"),
        ([PADDED], {"sequence_parallel_size": 4}, "a multiple of 4: .* tensor-parallel size, for"),
        ([PADDED], {"sequence_parallel_size": 2, "cp_size": 2}, "a multiple of 8: 2 × context-parallel size"),
    ],
)
def test_what_is_refused(batches: list[dict[str, Any]], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        parse_microbatches(batches, ScoreOptions("forward_values"), Limits(50, **sizes))


def test_log_probs_are_a_list_to_those_who_map_over_tensors_or_store_them(tmp_path: Path) -> None:
    halves = tree_map(torch.Tensor.half, {"old": LogProbs([torch.zeros(3)], 7)})["old"]
    assert isinstance(halves, list) and halves[0].dtype == torch.float16 and halves[:1].vocab_size == 7
    torch.save({"old": halves}, tmp_path / "scores")
    loaded = torch.load(tmp_path / "scores")["old"]  # with weights_only=True
    assert loaded[0].equal(halves[0]) and loaded.vocab_size == copy.deepcopy(halves).vocab_size == 7
