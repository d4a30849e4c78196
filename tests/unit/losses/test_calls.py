"""How many Python calls into the package a policy loss makes does not grow: most of them were checks once."""

import sys
from types import FrameType
from typing import Any

import torch

from megatron_rl_patches import losses
from tests.lab.walks import PACKAGE

TOTALS, RESPONSES = [6, 4, 9, 5, 7, 3, 8, 6], [3, 2, 8, 1, 4, 2, 5, 3]
MOST = 260  # 531 before lengths were checked together, and each argument once


def _loss_of_eight_responses() -> None:
    """From the layout to backward."""
    tokens = [torch.zeros(total, dtype=torch.int64) for total in TOTALS]
    values = [torch.zeros(response) for response in RESPONSES]
    layout = losses.SequenceLayout.build(TOTALS, RESPONSES)
    batch = losses.PolicyBatch(values, [torch.ones_like(value) for value in values], values, values, values)
    options = losses.PolicyOptions(entropy_coef=0.1, kl_coef=0.1)
    logits = torch.randn(1, sum(TOTALS), 32, requires_grad=True)
    losses.make_loss_func(tokens, layout, batch, options)(logits)[0].backward()


def test_a_policy_loss_makes_few_calls() -> None:
    """Those of comprehensions and generators, too."""
    _loss_of_eight_responses()
    calls = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        _loss_of_eight_responses()
    finally:
        sys.setprofile(None)
    assert len(calls) <= MOST
