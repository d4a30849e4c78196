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
FRAMEWORKS, MATERIALIZED = ("slime", "verl"), "the logits are materialized"
IN_TILES = "lean-head: losses of this package compute the logits in tiles; other code gets all of them"
VERL = "verl.utils.megatron.tensor_parallel.vocab_parallel_log_probs_from_logits"


@pytest.mark.parametrize(
    ("model", "slime", "verl", "notes"),
    [
        ("fits", "fits", "fits", [f"{name}: its losses compute the logits in tiles" for name in FRAMEWORKS]),
        ("fits", "drifted", "absent", [f"slime: {MATERIALIZED}: lean-loss: {SLIME}: drifted: why"]),
        ("missing", "absent", "fits", [f"verl: {MATERIALIZED}: lean-head: {MODEL}: missing: why"]),
        ("fits", "absent", "absent", [IN_TILES]),
        ("absent", "absent", "absent", []),
    ],
)
def test_whether_the_logits_are_materialized(model: Any, slime: Any, verl: Any, notes: list[str]) -> None:
    statuses = [
        SiteStatus("lean-head", "megatron.core", MODEL, model, "why"),
        SiteStatus("lean-loss", "slime", SLIME, slime, "why"),
        SiteStatus("lean-loss", "verl", VERL, verl, "why"),
    ]
    assert patch.notes is not None
    assert patch.notes(statuses) == notes


def test_a_model_without_an_output_layer_computes_its_own_loss() -> None:
    """T5 has a head of another kind, and inherits the function that computes the loss."""

    def loss(labels: str, logits: str) -> tuple[str, str]:
        return labels, logits

    call = Call(loss, ("labels",), {"logits": "logits"}, instance=object())
    assert loss_of_labels(call) == ("labels", "logits")
