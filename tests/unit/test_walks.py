"""How often the package's modules call each other in a walk does not grow, nor do calls of a policy loss."""

import subprocess
import sys

import pytest
import torch

from megatron_rl_patches import losses
from tests.lab.walks import MOST, WALKS, calls_of, stays_of
from tests.worlds.program import ROOT


@pytest.mark.filterwarnings("ignore")  # those of Megatron, which may be imported here first
@pytest.mark.parametrize("name", [name for name in WALKS if name != "apply"])
def test_walks_stay_short(name: str) -> None:
    assert len(stays_of(WALKS[name])) <= MOST[name]


def test_the_walk_of_apply_stays_short() -> None:
    """In a process of its own, as it takes more if frameworks are imported already."""
    program = "from tests.lab.walks import *; print(len(stays_of(WALKS['apply'])))"
    stays = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT)
    assert int(stays) <= MOST["apply"]


TOTALS, RESPONSES = [6, 4, 9, 5, 7, 3, 8, 6], [3, 2, 8, 1, 4, 2, 5, 3]


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
    """Those of comprehensions and generators count, too."""
    assert len(calls_of(_loss_of_eight_responses)) <= 260  # 531 before each argument was checked once
