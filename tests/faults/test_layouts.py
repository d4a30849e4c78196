"""A thousand random microbatches against lists of where each token stands; what four ranks make of such."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import spawn_ranks

from .positions import Microbatch, zigzag
from .split_logits import check_four_ranks


@settings(max_examples=1000)
@given(st.randoms(use_true_random=False))
def test_random_layouts(choose: random.Random) -> None:
    case = Microbatch.random(choose)
    if not case.is_valid:
        for rank in range(case.cp_size):
            with pytest.raises(InvalidInputError, match="keep a prompt token"):
                case.layout(rank)
        return
    numbers = {token: number for number, (token, _, _) in enumerate(case.predictors())}
    tokens = [1000 * sample + torch.arange(total) for sample, total in enumerate(case.totals, 1)]
    full = [torch.randn(response, 2) for response in case.responses]
    gathered = torch.full((sum(case.responses), 2), torch.nan)
    of_zigzag = torch.full((sum(case.responses), 2), torch.nan)
    for rank, stream in enumerate(case.streams()):
        layout = case.layout(rank)
        assert layout.num_rows == len(stream)
        expected = sorted((numbers[token], row) for row, token in enumerate(stream) if token in numbers)
        assert layout.response_index.tolist() == [number for number, _ in expected]
        assert layout.response_rows.tolist() == [row for _, row in expected]
        places = [case.predictors()[number][1:] for number, _ in expected]
        assert layout.samples.tolist() == [sample for sample, _ in places]
        assert layout.positions.tolist() == [place for _, place in places]
        assert layout.response_targets(tokens).tolist() == [
            1000 * (sample + 1) + case.totals[sample] - case.responses[sample] + place
            for sample, place in places
        ]
        local = layout.local_parts(full)
        assert [len(part) for part in local] == list(layout.local_lengths)
        gathered[layout.response_index] = torch.cat(local)
        slice_again(case, layout.to_zigzag(full), rank, of_zigzag)
    assert torch.equal(gathered, torch.cat(full))
    assert torch.equal(of_zigzag, torch.cat(full))


def slice_again(case: Microbatch, parts: list[Tensor], rank: int, into: Tensor) -> None:
    """Put the zigzag parts of a rank where the tokens stand, under zigzag with the least padding."""
    padded = case.padded
    if case.scheme == "all-gather":
        multiple = 2 * case.cp_size if case.cp_size > 1 else 1
        padded = tuple(-(-total // multiple) * multiple for total in case.totals)
    stream = set(zigzag(padded, rank, case.cp_size))
    mine = [number for number, (token, _, _) in enumerate(case.predictors()) if token in stream]
    into[mine] = torch.cat(parts)


@pytest.mark.slow
def test_four_ranks() -> None:
    """TP 4, TP 2 x CP 2 and CP 4; with and without a rank that has nothing to do."""
    first, *others = spawn_ranks(check_four_ranks, 4, 12, timeout=150)
    assert all(other == first for other in others)
    assert set(first) == {"TP 4", "TP 2 x CP 2", "CP 4"}
    assert all(0 < without_rows < cases for name, (cases, without_rows) in first.items() if "CP" in name)
