"""A policy in DDP is scored at any moment of a step, and trains on as if nobody had scored it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt

pytestmark = pytest.mark.runs("inference-only", ranks=[2])

MOMENTS = (
    "before zero_grad",
    "after zero_grad",
    "between microbatches",
    "between forward and backward",
    "before the step",
    "after the step",
    "in flight",
)
#: Ranks, options of the model, and whether pipeline stages gather at the same moments.
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "DP 2": (2, {}, False),
    "DP 2, bf16": (2, {"bf16": True}, False),
    "DP 2, no overlap of gradients": (2, {"overlap_grad_reduce": False}, False),
    "DP 2, no overlap of parameters": (2, {"overlap_param_gather": False}, False),
    "DP 2, no distributed optimizer": (
        2,
        {"overlap_param_gather": False, "use_distributed_optimizer": False},
        False,
    ),
    "DP 2, tied": (2, {"tied": True}, False),
    "DP 2, aligned": (2, {}, True),
    "EP 2": (2, {"kind": "moe", "ep": 2, "config": {"moe_token_dispatcher_type": "alltoall"}}, False),
    "DP 2, MTP": (2, {"kind": "mtp"}, False),
    "PP 2, DP 2": (4, {"pp": 2}, False),
    "PP 2, DP 2, aligned": (4, {"pp": 2}, True),
    "PP 2, VPP 2, DP 2": (4, {"pp": 2, "vpp": 2}, False),
    "PP 2, VPP 2, DP 2, aligned": (4, {"pp": 2, "vpp": 2}, True),
}
_FAST = ("DP 2",)

Scores = list[torch.Tensor]


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout][0]


class Run:
    """Three steps of training, with hooks on but for the first step, scored at one moment of each."""

    def __init__(self, options: TinyModel, moment: str | None, is_aligned: bool) -> None:
        self.options, self.moment = options, moment
        self.model, self.optimizer = options.build()
        self.config = self.model[0].config
        self.scores: list[Scores] = []
        self.has_hooks = self.model[0].use_forward_hook
        if options.overlap_grad_reduce:
            self.config.no_sync_func = [chunk.no_sync for chunk in self.model]
            if len(self.model) == 1:
                [self.config.no_sync_func] = self.config.no_sync_func
        self.is_aligned = is_aligned and self.has_hooks
        if self.is_aligned:
            self.model[0].ddp_config.align_param_gather = True
        self.config.finalize_model_grads_func = finalize_model_grads

    def at(self, moment: str) -> None:
        if moment == self.moment:
            scores = forward_log_probs(self.model, microbatches(), progress=False)
            self.scores.append([] if scores is None else scores.log_probs)

    def train(self) -> str:
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
                    starts = [chunk.start_param_sync for chunk in self.model]
                    self.config.param_sync_func = starts if len(starts) > 1 else starts[0]
            if self.moment == "in flight" and self.has_hooks:
                for chunk in self.model:
                    chunk.start_param_sync()
            self.at("in flight")
            for group in (group for chunk in self.model for group in chunk.bucket_groups):
                assert group.param_gather_handle is None, "the schedule could not dispatch it"
        if self.has_hooks:
            tiny_gpt.disable_forward_pre_hook(self.model)
        return tiny_gpt.checksum(self.model, self.optimizer)

    def forward_and_backward(self, data: list[Any]) -> None:
        if self.options.pp == 1:  # so that there is a moment between microbatches
            [chunk], [batches] = self.model, data
            with chunk.no_sync():
                self.microbatch(chunk, batches)
                self.at("between microbatches")
            self.microbatch(chunk, batches)
            finalize_model_grads(self.model)
            return
        get_forward_backward_func()(
            forward_step_func=tiny_gpt.forward_step,
            data_iterator=data,
            model=self.model,
            num_microbatches=2,
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=tiny_gpt.BATCH,
            forward_only=False,
        )

    def microbatch(self, chunk: Any, batches: Any) -> None:
        output, loss = tiny_gpt.forward_step(batches, chunk)
        self.at("between forward and backward")
        loss(output)[0].backward()


def microbatches() -> list[dict[str, Any]]:
    """Return microbatches of this replica."""
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    return [
        {"tokens": torch.randint(32, (2, 8), generator=generator), "lengths": [8, 5]},
        {"tokens": torch.randint(32, (1, 12), generator=generator), "lengths": [12]},
    ]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name in _FAST else pytest.mark.slow) for name in LAYOUTS],
)
@on_ranks(ranks_of)
def test_training_goes_on_bit_for_bit(layout: str) -> None:
    _, sizes, is_aligned = LAYOUTS[layout]
    options = TinyModel(**sizes)
    complete = TinyModel(**sizes | {"overlap_param_gather": False})  # the optimizer gathers
    unscored = Run(options, None, is_aligned).train()
    for moment in MOMENTS:
        if options.pp > 1 and moment.startswith("between"):
            continue
        run, expected = Run(options, moment, is_aligned), Run(complete, moment, is_aligned)
        assert everywhere(run.train() == unscored) == [True] * torch.distributed.get_world_size(), moment
        expected.train()
        assert len(run.scores) == (6 if moment == "between forward and backward" else 3)
        for of_run, right in zip(run.scores, expected.scores, strict=True):
            assert all(map(torch.equal, of_run, right)), f"scored {moment} with weights that are not complete"


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
