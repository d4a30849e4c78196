"""Replicas that share experts score different numbers of microbatches, and refuse bad input together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.testing import tiny_model
from tests.ranks import on_ranks


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
def test_unequal_numbers(dispatcher: str) -> None:
    rank = torch.distributed.get_rank()
    chunks = model(dispatcher)
    batches = [microbatch(10 * rank + number) for number in range(3)]
    equal = scores(chunks, batches)
    own = batches[: 3 - 2 * rank]
    unequal = scores(chunks, own)
    assert len(unequal) == 2 * len(own)
    torch.testing.assert_close(unequal, equal[: len(unequal)])


@on_ranks(2)
def test_all_replicas_refuse_what_one_refuses() -> None:
    rank = torch.distributed.get_rank()
    chunks = model("alltoall")
    bad = [{**microbatch(0), "lengths": [9, 9]}] if rank == 1 else [microbatch(0)]
    with pytest.raises(InvalidInputError, match=r"microbatch 0: lengths \[9, 9\] do not fit"):
        scores(chunks, bad)
    with pytest.raises(InvalidInputError, match="there are no microbatches to score"):
        scores(chunks, [microbatch(0)][rank:])
    widths = scores(chunks, [microbatch(rank, 8 + 4 * rank)])
    assert [len(one) for one in widths] == [7 + 4 * rank, 5 + 4 * rank]
    with pytest.raises(InvalidInputError, match="needs the same: pad the tokens"):
        scores(model("allgather"), [microbatch(rank, 8 + 4 * rank)])
