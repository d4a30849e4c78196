"""Which tokens of a rollout are compared, and which settings of the sampler are reported.

``tests/real/test_training_warnings.py`` has real megatron-core.
"""

import re
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks.rollout_log_probs import check_rollout
from megatron_rl_patches.frameworks.training import score, update_verl_actor
from megatron_rl_patches.reentry import guard, training_warnings

pytestmark = pytest.mark.usefixtures("nothing_reported")


def check(**rollout: Any) -> list[str]:
    check_rollout([SimpleNamespace(rollout_data=rollout)])
    return training_warnings.reported()


def test_a_context_parallel_rank_compares_those_of_its_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    for name in ("get_context_parallel_group", "get_tensor_model_parallel_group"):
        monkeypatch.setattr(parallel_state, name, lambda: None)
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
        check_rollout(data_iterator)
    assert training_warnings.reported() == []
    assert len(check(**APART)) == len(check(**APART)) == 1  # it is said once


# --- rollouts that sample from a part of the vocabulary


#: Arguments, data of the rollout, and whether the trainer's log-probs are of more ids than were sampled from.
OF_SLIME: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "whole vocabulary": ({}, {}, False),
    "in other words": ({"rollout_top_p": None, "rollout_top_k": 0}, {}, False),
    "top-p": ({"rollout_top_p": 0.8}, {}, True),
    "top-k": ({"rollout_top_k": 20}, {}, True),
    "mask of slime": ({"rollout_top_p": 0.8}, {"rollout_top_p_token_ids": [[1, 2]]}, False),
    "mask of miles": ({"rollout_top_k": 20}, {"rollout_sampling_mask_ids": [[1, 2]]}, False),
    "evaluation": ({"eval_top_p": 0.8, "eval_top_k": 20}, {}, False),
    "own loss": ({"rollout_top_p": 0.8, "loss_type": "custom_loss"}, {}, False),
}


def _in_slime(monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
    args = {"loss_type": "policy_loss", "rollout_top_p": 1.0, "rollout_top_k": -1, **args}
    module = SimpleNamespace(get_args=lambda: SimpleNamespace(**args))
    for name in ("megatron.training", "megatron.training.global_vars"):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[misc]


@pytest.mark.parametrize("case", OF_SLIME)
def test_what_slime_samples_from(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args, rollout, is_reported = OF_SLIME[case]
    _in_slime(monkeypatch, **args)
    assert len(check(tokens=[], **rollout)) == len(check(tokens=[], **rollout)) == is_reported


def test_the_message_says_what_is_set(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    _in_slime(monkeypatch, rollout_top_p=0.8)
    [message] = check()
    assert message.startswith("rollout_top_p=0.8, rollout_top_k=-1: rollouts sample from a part of the vocab")
    assert [record.getMessage() for record in caplog.records] == [f"megatron_rl_patches: {message}"]
    training_warnings.messages.clear()
    monkeypatch.setenv("RANK", "1")
    assert check() == [message] and len(caplog.records) == 1  # status() has it on every rank


@pytest.mark.parametrize(
    ("changes", "is_reported"),
    [({}, True), ({"warn": False}, False), ({"strategy": "fsdp2"}, False), ({"rollout": None}, False)],
)
def test_what_verl_samples_from(
    changes: dict[str, Any], is_reported: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Real verl shows its message; a worker of another shape trains all the same. Ranks compare first."""
    monkeypatch.setattr(guard, "before_calls", [compare := mock.Mock()])
    options: dict[str, Any] = {"warn": True, "strategy": "megatron", **changes}
    rollout = options.get("rollout", SimpleNamespace(top_p=0.8, top_k=-1))
    config = SimpleNamespace(actor=SimpleNamespace(strategy=options["strategy"]), rollout=rollout)
    settings = SimpleNamespace(warn=options["warn"], memory_phases=True)
    chunk = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(module=[chunk], optimizer=None)
    worker = SimpleNamespace(config=config, actor=SimpleNamespace(engine=engine))
    call = Call(lambda data: chunk(data).shape, (torch.ones(2),), {}, worker, options=settings)
    assert score(call) == update_verl_actor(call) == (2,)
    assert (len(training_warnings.reported()), compare.call_count) == (is_reported, 1)
    assert re.search(r'"scoring": .*"forward": ', caplog.messages[-1])
