"""A policy in DDP, or with experts, is scored at any moment of a step, and trains on as if nobody had."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt
from tests.worlds.scoring import scores_of
from tests.worlds.unchanged import megatron_unchanged

pytestmark = pytest.mark.runs("inference-only", ranks=[2])

#: Moments at which one run is scored. In those of the last group all parameters have been gathered.
MOMENTS = (
    {"before zero_grad"},
    {"after zero_grad"},
    {"after the step"},
    {"in flight"},
    {"between microbatches", "between forward and backward", "before the step"},
)
PLAIN = {"overlap_param_gather": False, "use_distributed_optimizer": False}
EXPERTS = {"kind": "moe", "ep": 2}
ROUTER: dict[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
}
EXPERT_BIAS: dict[str, Any] = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
#: Options of the model. Where a name ends in "aligned", pipeline stages gather at the same moments.
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2": {},
    "DP 2, bf16": {"bf16": True},
    "DP 2, no overlap of gradients": {"overlap_grad_reduce": False},
    "DP 2, no distributed optimizer": PLAIN,
    "DP 2, aligned": {},
    "EP 2, auxiliary loss": {**EXPERTS, "config": ROUTER | {"moe_aux_loss_coeff": 0.1}},
    "EP 2, expert bias": {**EXPERTS, "config": ROUTER | EXPERT_BIAS},
    "DP 2, MTP": {"kind": "mtp"},
    "PP 2, VPP 2, DP 2": {"pp": 2, "vpp": 2},
    "PP 2, VPP 2, DP 2, aligned": {"pp": 2, "vpp": 2},
}


class Run:
    """Three steps of training, with hooks on but for the first step, scored at some moments of each."""

    def __init__(self, options: TinyModel, moments: Collection[str], is_aligned: bool) -> None:
        self.options, self.moments = options, moments
        self.model, self.optimizer = options.build()
        self.scores: dict[str, list[list[torch.Tensor]]] = {moment: [] for moment in moments}
        self.has_hooks = self.model[0].use_forward_hook
        self.config = self.model[0].config
        self.config.finalize_model_grads_func = finalize_model_grads
        if options.overlap_grad_reduce:
            self.config.no_sync_func = one_or_all([chunk.no_sync for chunk in self.model])
        self.is_aligned = is_aligned and self.has_hooks
        if self.is_aligned:
            self.model[0].ddp_config.align_param_gather = True

    def at(self, moment: str) -> None:
        if moment in self.moments:
            before = self.statistics()
            self.scores[moment].append(scores_of(self.model, microbatches()))
            assert self.statistics() == before

    def statistics(self) -> dict[str, Any]:
        """Return what routers keep from step to step: buffers, and the process's tracker of losses."""
        buffers = {name: buffer.tolist() for chunk in self.model for name, buffer in chunk.named_buffers()}
        return buffers | {name: entry["values"].tolist() for name, entry in tracked_losses().items()}

    def train(self) -> tuple[str, dict[str, Any]]:
        for entry in tracked_losses().values():
            entry["values"].zero_()
        data = tiny_gpt.data_iterators(self.options)
        if self.has_hooks:
            tiny_gpt.disable_forward_pre_hook(self.model, param_sync=False)
        for step in range(3):
            self.at("before zero_grad")
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.at("after zero_grad")
            self.forward_and_backward(data)
            self.at("before the step")
            assert self.optimizer.step()[0]
            self.at("after the step")
            if step == 0 and self.has_hooks:
                tiny_gpt.enable_forward_pre_hook(self.model)
                if self.is_aligned:
                    self.config.param_sync_func = one_or_all([each.start_param_sync for each in self.model])
            if "in flight" in self.moments and self.has_hooks:
                for chunk in self.model:
                    chunk.start_param_sync()
            self.at("in flight")
            for group in (group for chunk in self.model for group in chunk.bucket_groups):
                assert group.param_gather_handle is None, "the schedule could not dispatch it"
        if self.has_hooks:
            tiny_gpt.disable_forward_pre_hook(self.model)
        return tiny_gpt.checksum(self.model, self.optimizer), self.statistics()

    def forward_and_backward(self, data: list[Any]) -> None:
        if self.options.pp == 1:  # so that there is a moment between microbatches
            [chunk], [batches] = self.model, data
            with chunk.no_sync():
                self.microbatch(chunk, batches)
                self.at("between microbatches")
            self.microbatch(chunk, batches)
            finalize_model_grads(self.model)
            return
        tiny_gpt.run_schedule(self.model, data, 2)

    def microbatch(self, chunk: Any, batches: Any) -> None:
        output, loss = tiny_gpt.forward_step(batches, chunk)
        self.at("between forward and backward")
        loss(output)[0].backward()


def tracked_losses() -> dict[str, dict[str, Any]]:
    home = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    tracker: dict[str, dict[str, Any]] = home.get_moe_layer_wise_logging_tracker()
    return tracker


def one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def microbatch(number: int, width: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"tokens": torch.randint(32, (2, width), generator=generator), "lengths": [width, width - 2]}


def microbatches() -> list[dict[str, Any]]:
    """Return microbatches of this replica."""
    rank = parallel_state.get_data_parallel_rank()
    return [microbatch(rank), microbatch(10 + rank, 12)]


@pytest.mark.parametrize(
    ("layout", "moments"),
    [
        ("DP 2", MOMENTS),
        pytest.param("EP 2, expert bias", ({"between microbatches"},), marks=pytest.mark.slow),
        *(
            pytest.param(name, MOMENTS if "aligned" in name else MOMENTS[2::2], marks=pytest.mark.nightly)
            for name in LAYOUTS
            if name != "DP 2"
        ),
    ],
)
@on_ranks(lambda layout: 4 if layout.startswith("PP") else 2)
def test_training_goes_on_bit_for_bit(layout: str, moments: tuple[set[str], ...]) -> None:
    is_aligned = layout.endswith("aligned")
    options = TinyModel(**LAYOUTS[layout])
    complete = replace(options, overlap_param_gather=False)  # the optimizer gathers
    unscored = Run(options, (), is_aligned).train()
    expected = Run(complete, {moment for group in moments for moment in group}, is_aligned)
    expected.train()
    for group in moments:
        of_run = {moment for moment in group if options.pp == 1 or not moment.startswith("between")}
        run = Run(options, of_run, is_aligned)
        assert everywhere(run.train() == unscored) == [True] * torch.distributed.get_world_size(), of_run
        for moment, scores in run.scores.items():
            assert len(scores) == (6 if moment == "between forward and backward" else 3)
            for mine, right in zip(scores, expected.scores[moment], strict=True):
                assert all(map(torch.equal, mine, right)), f"scored {moment} with incomplete weights"


@on_ranks(2)
def test_gathering_that_would_destroy_gradients_is_refused() -> None:
    model, optimizer = TinyModel().build()
    [chunk] = model
    data = tiny_gpt.data_iterators(TinyModel())
    rank = torch.distributed.get_rank()

    def refused(why: str, only_rank: int | None = None) -> None:
        start = "the" if only_rank in (None, rank) else f"rank {only_rank}: the"
        with pytest.raises(InvalidInputError, match=f"^{start} parameters .* {why} uses the gradient buffer"):
            forward_log_probs(model, microbatches(), progress=False)

    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = True
    refused("reuse_grad_buf_for_mxfp8_param_ag")
    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = rank == 1
    refused("reuse_grad_buf_for_mxfp8_param_ag", only_rank=1)
    chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag = False
    model[0].config.finalize_model_grads_func = finalize_model_grads
    tiny_gpt.train_step(model, optimizer, data, 1)
    chunk.ddp_config.use_distributed_optimizer = False
    refused("the layer-wise optimizer")
    chunk.ddp_config.use_distributed_optimizer = rank == 0
    refused("the layer-wise optimizer", only_rank=1)


@on_ranks(2)
def test_replicas_have_batches_of_their_own() -> None:
    """In other numbers, and where the dispatcher allows it, of other widths; what one refuses, all refuse."""
    rank = torch.distributed.get_rank()
    for dispatcher in ("alltoall", "allgather"):
        tiny = tiny_model("moe", ep=2, config={"moe_token_dispatcher_type": dispatcher})
        tiny.initialize()
        chunks = tiny.chunks()
        batches = [microbatch(10 * rank + number) for number in range(3)]
        equal = scores_of(chunks, batches)
        own = batches[: 3 - 2 * rank]
        unequal = scores_of(chunks, own)
        assert len(unequal) == 2 * len(own)
        torch.testing.assert_close(unequal, equal[: len(unequal)])
        wider = [microbatch(rank, 8 + 4 * rank)]
        if dispatcher == "allgather":
            with pytest.raises(InvalidInputError, match="needs the same: pad the tokens"):
                scores_of(chunks, wider)
        else:
            assert [len(one) for one in scores_of(chunks, wider)] == [7 + 4 * rank, 5 + 4 * rank]
    bad = [{**microbatch(0), "lengths": [9, 9]}] if rank == 1 else [microbatch(0)]
    with pytest.raises(InvalidInputError, match=r"microbatch 0: lengths \[9, 9\] do not fit"):
        scores_of(chunks, bad)
    with pytest.raises(InvalidInputError, match="there are no microbatches to score"):
        scores_of(chunks, [microbatch(0)][rank:])


@pytest.mark.parametrize("kind", ["moe", pytest.param("mtp", marks=pytest.mark.slow)])
@on_ranks(1)
def test_scoring_leaves_the_process_as_it_was(kind: str) -> None:
    """Between a forward pass and its backward pass, which reads the scales of auxiliary losses."""
    tiny = tiny_model(kind)
    tiny.initialize()
    chunks = tiny.chunks()
    scores_of(chunks, [microbatch(0)])  # what the first pass of a process makes is left
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = scale = torch.full((1,), 1024.0)
    MTPLossAutoScaler.main_loss_backward_scale = torch.full((1,), 512.0)
    with megatron_unchanged():
        scores_of(chunks, [microbatch(number) for number in range(4)])
    assert float(scale) == 1024.0
