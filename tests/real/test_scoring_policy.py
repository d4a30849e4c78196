"""A policy in DDP, or with experts, is scored at any moment of a step, and trains on as if nobody had."""

from collections.abc import Collection
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import everywhere, on_ranks
from tests.real import matrix
from tests.references import tiny_gpt
from tests.worlds.model import MICROBATCHES, NOT_DISTRIBUTED, World, scores_of
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
#: Options of the model. Where a name ends in "aligned", pipeline stages gather at the same moments.
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2": {},
    "DP 2, bf16": {"bf16": True},
    "DP 2, no overlap of gradients": {"overlap_grad_reduce": False},
    "DP 2, no distributed optimizer": NOT_DISTRIBUTED,
    "DP 2, aligned": {},
    "EP 2, auxiliary loss": {**matrix.MODELS["MoE"], "ep": 2},
    "EP 2, expert bias": {**matrix.MODELS["MoE, expert bias"], "ep": 2},
    "DP 2, MTP": {"kind": "mtp"},
    "PP 2, VPP 2, DP 2": {"pp": 2, "vpp": 2},
    "PP 2, VPP 2, DP 2, aligned": {"pp": 2, "vpp": 2},
}


class Run(World):
    """Three steps of training, with hooks on but for the first step, scored at some moments of each."""

    def __init__(self, options: TinyModel, moments: Collection[str], is_aligned: bool) -> None:
        super().__init__(options)
        self.found: dict[str, list[list[torch.Tensor]]] = {moment: [] for moment in moments}
        self.has_hooks = self.model[0].use_forward_hook
        self.is_aligned = is_aligned and self.has_hooks
        if self.is_aligned:
            self.model[0].ddp_config.align_param_gather = True

    def at(self, *moments: str) -> None:
        for moment in self.found.keys() & moments:
            before = self.statistics()
            self.found[moment].append(self.scores(microbatches()))
            assert self.statistics() == before

    def statistics(self) -> dict[str, Any]:
        """Return what routers keep from step to step: buffers, and the process's tracker of losses."""
        buffers = {name: buffer.tolist() for chunk in self.model for name, buffer in chunk.named_buffers()}
        return buffers | {name: entry["values"].tolist() for name, entry in tracked_losses().items()}

    def result(self) -> tuple[str, dict[str, Any]]:
        """Train; return a checksum, and what routers keep."""
        for entry in tracked_losses().values():
            entry["values"].zero_()
        originals = SimpleNamespace(**vars(tiny_gpt))
        passes = count()

        def step(*args: Any) -> float:
            if self.is_aligned and self.model[0].remove_forward_pre_hook_handles:
                gathers = [each.start_param_sync for each in self.model]
                self.config.param_sync_func = gathers if len(gathers) > 1 else gathers[0]
            self.at("before zero_grad")
            return originals.train_step(*args)

        def schedule(*args: Any, **options: Any) -> Any:
            self.at("after zero_grad")
            reports = originals.run_schedule(*args, **options)
            self.at("before the step")
            return reports

        def forward(*args: Any) -> Any:
            if next(passes) % MICROBATCHES == 1:
                self.at("between microbatches")
            output = originals.forward_step(*args)
            self.at("between forward and backward")
            return output

        def update() -> Any:
            outcome = optimizer_step()
            self.at("after the step")
            if "in flight" in self.found and self.model[0].remove_forward_pre_hook_handles:
                for chunk in self.model:
                    chunk.start_param_sync()
            self.at("in flight")
            for group in (group for chunk in self.model for group in chunk.bucket_groups):
                assert group.param_gather_handle is None, "the schedule could not dispatch it"
            return outcome

        optimizer_step = self.optimizer.step
        replaced = {"train_step": step, "run_schedule": schedule, "forward_step": forward}
        with mock.patch.multiple(tiny_gpt, **replaced), mock.patch.object(self.optimizer, "step", update):
            self.train(3)
        return self.checksum(), self.statistics()


def tracked_losses() -> dict[str, dict[str, Any]]:
    home = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    tracker: dict[str, dict[str, Any]] = home.get_moe_layer_wise_logging_tracker()
    return tracker


def microbatch(number: int, width: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {"tokens": torch.randint(32, (2, width), generator=generator), "total_lengths": [width, width - 2]}


def microbatches() -> list[dict[str, Any]]:
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
    if options.pp > 1:  # ranks are at other microbatches at the same time
        moments = tuple({moment for moment in group if "between" not in moment} for group in moments)
    complete = replace(options, overlap_param_gather=False)  # the optimizer gathers
    unscored = Run(options, (), is_aligned).result()
    expected = Run(complete, {moment for group in moments for moment in group}, is_aligned)
    expected.result()
    for of_run in moments:
        run = Run(options, of_run, is_aligned)
        assert all(everywhere(run.result() == unscored)), of_run
        for moment, scores in run.found.items():
            assert len(scores) == (6 if moment == "between forward and backward" else 3)
            for mine, right in zip(scores, expected.found[moment], strict=True):
                assert all(map(torch.equal, mine, right)), f"scored {moment} with incomplete weights"


@on_ranks(2)
def test_gathering_that_would_destroy_gradients_is_refused() -> None:
    world = World()
    settings, rank = world.model[0].ddp_config, torch.distributed.get_rank()

    def refused(option: str, value: bool, only_rank: int, why: str) -> None:
        for alone in (False, True):
            setattr(settings, option, value if not alone or rank == only_rank else not value)
            start = f"rank {only_rank}: the" if alone and rank != only_rank else "the"
            message = f"^{start} parameters .* {why} uses the gradient buffer"
            with pytest.raises(InvalidInputError, match=message):
                world.scores(microbatches())
        setattr(settings, option, not value)

    mxfp8 = "reuse_grad_buf_for_mxfp8_param_ag"
    refused(mxfp8, True, 1, mxfp8)
    world.config.finalize_model_grads_func = finalize_model_grads
    tiny_gpt.train_step(world.model, world.optimizer, world.data, 1)
    refused("use_distributed_optimizer", False, 1, "the layer-wise optimizer")


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
    bad = [{**microbatch(0), "total_lengths": [9, 9]}] if rank == 1 else [microbatch(0)]
    with pytest.raises(InvalidInputError, match=r"microbatch 0: total_lengths \[9, 9\] do not fit"):
        scores_of(chunks, bad)
    with pytest.raises(InvalidInputError, match="there are no microbatches to score"):
        scores_of(chunks, [microbatch(0)][rank:])
    policy = World()  # whose parameters have to be gathered
    with pytest.raises(InvalidInputError, match=r"microbatch 0: total_lengths \[9, 9\] do not fit"):
        policy.scores(bad)
    assert policy.scores([microbatch(0)])


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
