"""What ``doctor`` says of ``lean-head``; that it trains as without is tested in ``tests/real``."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.engine.statuses import SiteStatus
from megatron_rl_patches.frameworks.megatron_models import loss_of_labels
from megatron_rl_patches.patches.lean_head import patch

MODEL = "megatron.core.models.gpt.gpt_model.GPTModel.forward"
SLIME = "slime.backends.megatron_utils.loss.get_log_probs_and_entropy"
VERL = "verl.utils.megatron.tensor_parallel.vocab_parallel_log_probs_from_logits"


def statuses(**states: Any) -> list[SiteStatus]:
    sites = [
        ("lean-head", "megatron.core", MODEL),
        ("lean-loss", "slime", SLIME),
        ("lean-loss", "verl", VERL),
    ]
    return [
        SiteStatus(name, framework, target, states.get(framework.partition(".")[0], "fits"), "why")
        for name, framework, target in sites
    ]


@pytest.mark.parametrize(
    ("states", "notes"),
    [
        (
            {},
            ["slime: its losses compute the logits in tiles", "verl: its losses compute the logits in tiles"],
        ),
        (
            {"slime": "drifted", "verl": "absent"},
            [f"slime: the logits are materialized: lean-loss: {SLIME}: drifted: why"],
        ),
        (
            {"megatron": "missing", "slime": "absent"},
            [f"verl: the logits are materialized: lean-head: {MODEL}: missing: why"],
        ),
        (
            {"slime": "absent", "verl": "absent"},
            ["the logits are materialized, but for losses of this package; no others are known"],
        ),
        ({"megatron": "absent", "slime": "absent", "verl": "absent"}, []),
    ],
)
def test_whether_the_logits_are_materialized(states: dict[str, str], notes: list[str]) -> None:
    assert patch.notes is not None
    assert patch.notes(statuses(**states)) == notes


def test_a_model_without_an_output_layer_computes_its_own_loss() -> None:
    """T5 has a head of another kind, and inherits the function that computes the loss."""

    def loss(labels: str, logits: str) -> tuple[str, str]:
        return labels, logits

    call = Call(loss, ("labels",), {"logits": "logits"}, instance=object())
    assert loss_of_labels(call) == ("labels", "logits")
