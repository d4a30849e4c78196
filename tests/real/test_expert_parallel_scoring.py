"""Mixtures of experts are scored, in different numbers of rounds, and what training reads stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import build_inference_model, forward_log_probs
from megatron_rl_patches.testing import tiny_model
from tests.ranks import on_ranks
from tests.real.test_inference_builder import attributes_of_megatron, is_unchanged
from tests.references import tiny_gpt


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


ROUTERS: dict[str, dict[str, Any]] = {
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "expert bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
    },
}


@pytest.mark.parametrize("router", list(ROUTERS))
@on_ranks(2)
def test_scoring_leaves_no_trace_in_training(router: str) -> None:
    """Two steps with scores between them equal two steps without, statistics of the routers included."""
    tiny = tiny_model(
        "moe", ep=2, config={"moe_router_topk": 2, "moe_router_dtype": "fp32", **ROUTERS[router]}
    )

    def trained(is_scored: bool) -> tuple[list[float], str, Any]:
        policy, optimizer = tiny.build()
        for entry in _tracker().values():
            entry["values"].zero_()
        data = tiny_gpt.data_iterators(tiny)
        losses = tiny_gpt.train(policy, optimizer, data, [1], tiny)
        for chunk in policy:
            chunk.config.no_sync_func = None
        before = _statistics(policy)
        if is_scored:
            teacher = build_inference_model(tiny.provider, tiny.transformer_config(), dtype="fp32")
            for chunk, trained in zip(teacher, policy, strict=True):
                chunk.load_state_dict(trained.module.state_dict())
            for model in (policy, teacher):
                scores(model, [microbatch(1)])
            torch.testing.assert_close(_statistics(policy), before, rtol=0, atol=0)
        for chunk in policy:
            chunk.enable_forward_pre_hook()
            chunk.zero_grad_buffer()
        losses.append(tiny_gpt.train_step(policy, optimizer, data, 1))
        return losses, tiny_gpt.checksum(policy, optimizer), _statistics(policy)

    with_scores, without = trained(True), trained(False)
    assert with_scores[:2] == without[:2]
    torch.testing.assert_close(with_scores[2], without[2], rtol=0, atol=0)


def _statistics(policy: list[Any]) -> dict[str, torch.Tensor]:
    """Return what routers keep from step to step: buffers, and the process's tracker of auxiliary losses."""
    buffers = {name: buffer.clone() for chunk in policy for name, buffer in chunk.named_buffers()}
    tracked = {
        f"{name} {key}": value.clone()
        for name, entry in _tracker().items()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    return {**buffers, **tracked}


def _tracker() -> dict[str, dict[str, Any]]:
    home = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    tracker: dict[str, dict[str, Any]] = home.get_moe_layer_wise_logging_tracker()
    return tracker


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
    before = attributes_of_megatron()
    scores(chunks, [microbatch(number) for number in range(4)])
    after = attributes_of_megatron()
    assert [name for name in before | after if not is_unchanged(name, before, after)] == []
    assert float(scale) == 1024.0
