"""Mixtures of experts are scored, in different numbers of rounds, and leave the process as it was.

That training goes on as if there had been no score is in ``test_scoring_policy.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.testing import tiny_model
from tests.ranks import on_ranks
from tests.worlds.unchanged import megatron_unchanged


def microbatch(number: int, width: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"tokens": torch.randint(32, (2, width), generator=generator), "lengths": [width, width - 2]}


def model(dispatcher: str) -> list[Any]:
    tiny = tiny_model("moe", ep=2, config={"moe_token_dispatcher_type": dispatcher})
    tiny.initialize()
    return tiny.chunks()


def scores(chunks: list[Any], batches: list[Any]) -> list[torch.Tensor]:
    found = forward_log_probs(chunks, batches, progress=False)
    assert found is not None
    return found.log_probs


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@on_ranks(2)
def test_replicas_have_batches_of_their_own(dispatcher: str) -> None:
    """In other numbers, and where the dispatcher allows it, of other widths; what one refuses, all refuse."""
    rank = torch.distributed.get_rank()
    chunks = model(dispatcher)
    batches = [microbatch(10 * rank + number) for number in range(3)]
    equal = scores(chunks, batches)
    own = batches[: 3 - 2 * rank]
    unequal = scores(chunks, own)
    assert len(unequal) == 2 * len(own)
    torch.testing.assert_close(unequal, equal[: len(unequal)])
    wider = [microbatch(rank, 8 + 4 * rank)]
    if dispatcher == "allgather":
        with pytest.raises(InvalidInputError, match="needs the same: pad the tokens"):
            scores(chunks, wider)
    else:
        assert [len(one) for one in scores(chunks, wider)] == [7 + 4 * rank, 5 + 4 * rank]
    bad = [{**microbatch(0), "lengths": [9, 9]}] if rank == 1 else [microbatch(0)]
    with pytest.raises(InvalidInputError, match=r"microbatch 0: lengths \[9, 9\] do not fit"):
        scores(chunks, bad)
    with pytest.raises(InvalidInputError, match="there are no microbatches to score"):
        scores(chunks, [microbatch(0)][rank:])


@pytest.mark.parametrize("kind", ["moe", pytest.param("mtp", marks=pytest.mark.slow)])
@on_ranks(1)
def test_scoring_leaves_the_process_as_it_was(kind: str) -> None:
    """Between a forward pass and its backward pass, which reads the scales of auxiliary losses."""
    tiny = tiny_model(kind)
    tiny.initialize()
    chunks = tiny.chunks()
    scores(chunks, [microbatch(0)])  # what the first pass of a process makes is left
    MoEAuxLossAutoScaler.main_loss_backward_scale = scale = torch.full((1,), 1024.0)
    MTPLossAutoScaler.main_loss_backward_scale = torch.full((1,), 512.0)
    with megatron_unchanged():
        scores(chunks, [microbatch(number) for number in range(4)])
    assert float(scale) == 1024.0
