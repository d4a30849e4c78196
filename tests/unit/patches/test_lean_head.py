"""What ``doctor`` says of ``lean-head``; that it trains as without is tested in ``tests/real``."""

from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.engine.statuses import SiteStatus
from megatron_rl_patches.frameworks import own_options
from megatron_rl_patches.frameworks.log_probs import loss_of_labels, model_forward
from megatron_rl_patches.losses.output_layer import _deferral
from megatron_rl_patches.patches.lean_head import LeanHeadOptions, patch

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
        # This release has the function in another module.
        ("fits", "not needed", "fits", ["verl: its losses compute the logits in tiles"]),
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


class HybridModel:
    """In the shape of NVIDIA/Megatron-LM#7008: what the hidden states become is the caller's business."""

    output_layer = object()

    def forward(self, hidden: str, labels: Any = None, output_processor: Any = None) -> str:
        def logits() -> str:
            deferral = _deferral.get()
            return "deferred" if deferral and deferral.layer is self.output_layer else "logits"

        return output_processor(hidden, logits) if output_processor else logits()


def test_a_call_with_an_output_processor_is_left_alone_and_status_says_so() -> None:
    """So do verl with its fused kernels, and slime and miles with ``--compact-actor-logits``."""
    model, options = HybridModel(), LeanHeadOptions()
    [site] = [site for site in patch.sites if site.qualname == "HybridModel.forward"]
    with mock.patch.dict(own_options, clear=True):
        for arguments, expected, detail in (
            ({}, "deferred", ""),
            (
                {"output_processor": lambda hidden, logits: f"{hidden}, {logits()}"},
                "hidden, logits",
                "not needed in calls with an output_processor (of verl with use_fused_kernels)",
            ),
        ):
            call = Call(model.forward, ("hidden",), arguments, instance=model, options=options)
            assert model_forward(call) == expected
            assert site.detail is not None and site.detail() == detail


def test_a_model_without_an_output_layer_computes_its_own_loss() -> None:
    """T5 has a head of another kind, and inherits the function that computes the loss."""

    def loss(labels: str, logits: str) -> tuple[str, str]:
        return labels, logits

    call = Call(loss, ("labels",), {"logits": "logits"}, instance=object())
    assert loss_of_labels(call) == ("labels", "logits")
