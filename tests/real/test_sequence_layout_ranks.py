"""Layouts on real context-parallel ranks (gloo): gathering, its gradient, and who takes part in backward."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional

from megatron_rl_patches.errors import InvalidInputError
from tests.ranks import everywhere, on_ranks
from tests.unit.losses.sequences.cp_reference import CORNERS, Case

RAGGED: dict[str, Any] = {"prompts": (1, 12, 3, 5), "responses": (9, 2, 0, 17)}
SCHEMES: tuple[dict[str, Any], ...] = (
    {"sample_padding": 1, "tail": 3},
    {"scheme": "padded", "sample_padding": 2},
    {"scheme": "all-gather", "tail": 2},
)


def _cases(cp_size: int) -> list[Case]:
    corners = [case for case in CORNERS.values() if case.cp_size == cp_size]
    return corners + [Case(**RAGGED, cp_size=cp_size, **scheme) for scheme in SCHEMES]


def _counting_all_reduces() -> Any:
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


def _check_gathering(case: Case, group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    layout, generator = case.layout(rank), torch.Generator().manual_seed(1)
    full = [torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in case.responses]
    local = torch.cat(layout.local_parts(full)).requires_grad_()

    with _counting_all_reduces() as all_reduce:
        gathered = layout.gather_responses(local, group)
        assert all_reduce.call_count == (sum(case.responses) > 0)
        # The loss of rank r is (r + 1) times the sum of squares: together 1 + 2 + ... times.
        sum((rank + 1) * (part**2).sum() for part in gathered).backward()
        assert all_reduce.call_count == 2 * (sum(case.responses) > 0)
    assert all(map(torch.equal, gathered, full))
    ranks = case.cp_size * (case.cp_size + 1) // 2
    torch.testing.assert_close(local.grad, 2 * ranks * local.detach())

    with _counting_all_reduces() as all_reduce, torch.no_grad():
        quiet = layout.gather_responses(layout.split_responses(local), group)
        assert all_reduce.call_count == (sum(case.responses) > 0)
    assert all(map(torch.equal, quiet, full))
    assert not any(part.requires_grad for part in quiet)
    ids = [torch.arange(n) for n in case.responses]
    assert all(map(torch.equal, layout.gather_responses(layout.local_parts(ids), group), ids))


def _check_wrong_groups(cp2: dist.ProcessGroup, cp4: dist.ProcessGroup) -> None:
    """What is wrong on one rank alone is in ``tests/unit/losses/sequences``."""
    layout = Case((3, 2), (4, 9), cp_size=2).layout(dist.get_rank(cp2))
    values = torch.zeros(len(layout.response_index))
    with _counting_all_reduces() as all_reduce:
        with pytest.raises(InvalidInputError, match=r"rank \d of 4, but .* rank \d of 2"):
            layout.gather_responses(values, cp4)
        with pytest.raises(InvalidInputError, match="values have the lengths"):
            layout.gather_responses([values], cp2)
        all_reduce.assert_not_called()


@on_ranks(4, megatron=False)
def test_gathering_on_real_ranks() -> None:
    """As one CP group of 4, and as two of 2."""
    assert any(0 in layout.local_lengths for case in _cases(4) for layout in case.layouts())
    assert any(not sum(layout.local_lengths) for case in _cases(4) for layout in case.layouts())
    cp4 = dist.group.WORLD
    cp2, _ = dist.new_subgroups(2)  # 0 1, 2 3
    for cp_size, group in ((2, cp2), (4, cp4)):
        for case in _cases(cp_size):
            _check_gathering(case, group)
    _check_wrong_groups(cp2, cp4)


@on_ranks(2, megatron=False)
def test_backward_does_not_wait_for_ranks_without_gradient() -> None:
    # Rank 0 holds nothing but prompt, rank 1 the response.
    layout = Case((12,), (4,), cp_size=2, scheme="all-gather").layout(dist.get_rank())
    count = len(layout.response_index)
    assert everywhere(count) == [0, 4]
    log_probs = torch.zeros(count, requires_grad=True)
    entropy = torch.ones(count)  # without gradient, its coefficient is zero
    # What says nothing on the rank without tokens, and what says the wrong thing.
    for values, requires_grad in (
        (entropy, False),
        (log_probs * 2 if count else torch.zeros(0), True),
        (entropy if count else torch.zeros(0, requires_grad=True), False),
    ):
        (gathered,) = layout.gather_responses(values, dist.group.WORLD)
        assert gathered.requires_grad == requires_grad
        (log_probs.sum() + gathered.sum()).backward()
    # 1 from each of three losses' own sums, and 2 from the gathered values of the losses of both ranks.
    assert log_probs.grad.tolist() == [3 + 2 * 2] * count
