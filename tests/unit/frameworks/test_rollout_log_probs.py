"""Which tokens of a rollout are compared; ``tests/real/test_training_warnings.py`` has real megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches.frameworks.rollout_log_probs import check_rollout_log_probs
from megatron_rl_patches.reentry import training_warnings


@pytest.fixture(autouse=True)
def nothing_found() -> Iterator[None]:
    training_warnings.messages.clear()
    yield
    training_warnings.messages.clear()


def check(**rollout: Any) -> list[str]:
    check_rollout_log_probs([SimpleNamespace(rollout_data=rollout)])
    return training_warnings.reported()


def test_tokens_that_the_loss_leaves_out_do_not_count() -> None:
    trained, sampled = torch.tensor([-1.0, -9.0, -1.0, -9.0]), torch.tensor([-1.0, 0.0, -1.0, 0.0])
    mask = torch.tensor([1, 0, 1, 0])
    assert check(log_probs=[trained], rollout_log_probs=[sampled], loss_masks=[mask]) == []
    [message] = check(log_probs=[trained], rollout_log_probs=[sampled], loss_masks=[1 - mask])
    assert "differ by 9 nats per token on average and 9 at most, on 2 tokens" in message


def test_a_context_parallel_rank_compares_its_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    # Of eight tokens the second rank predicts from rows 2 to 5, and so has the response's tokens 1 to 4 of 6.
    rollout = {
        "total_lengths": [8],
        "response_lengths": [6],
        "log_probs": [torch.tensor([-1.0, -5.0, -1.0, -1.0])],
        "rollout_log_probs": [torch.full((4,), -1.0)],
    }
    assert check(**rollout, loss_masks=[torch.tensor([1, 1, 0, 1, 1, 1])]) == []
    [message] = check(**rollout, loss_masks=[torch.tensor([1, 1, 1, 1, 1, 1])])
    assert "differ by 1 nats per token on average and 4 at most, on 4 tokens" in message


APART = {"log_probs": [torch.zeros(3)], "rollout_log_probs": [torch.ones(3)]}
NOT_COMPARABLE: dict[str, dict[str, Any]] = {
    "empty": {},
    "not sampled here": {"log_probs": [torch.zeros(3)]},
    "other tokens": {**APART, "rollout_log_probs": [torch.ones(2)]},
    "no token counts": {**APART, "loss_masks": [torch.zeros(3)]},
    "not finite": {**APART, "rollout_log_probs": [torch.full((3,), -torch.inf)]},
    "masks of other tokens": {**APART, "loss_masks": [torch.ones(5)]},
    "not log-probs": {**APART, "log_probs": [None]},
}


def test_what_cannot_be_compared_is_left_alone() -> None:
    assert {name for name, rollout in NOT_COMPARABLE.items() if check(**rollout)} == set()
    for data_iterator in (None, [], [iter([])], iter([])):
        check_rollout_log_probs(data_iterator)
    assert training_warnings.reported() == []
    assert len(check(**APART)) == len(check(**APART)) == 1  # it is said once
