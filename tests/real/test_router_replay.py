"""Router replay of real megatron-core: with and without recomputation, beside a teacher, after exceptions."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl_patches import applied
from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import build_inference_model
from megatron_rl_patches.reentry import reentrant_train, router_replay
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt

try:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
except ImportError:
    pytest.skip("this release has no router replay", allow_module_level=True)

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP 2": {"pp": 2},
    "VPP 2": {"pp": 2, "vpp": 2},
    "EP 2": {"ep": 2},
    "MTP": {"config": {"mtp_num_layers": 1}},
}


def options(recompute: bool = False, **sizes: Any) -> TinyModel:
    config = {
        "moe_enable_routing_replay": True,
        **(RECOMPUTE if recompute else {}),
        **sizes.pop("config", {}),
    }
    return TinyModel(kind="moe", config=config, overlap_param_gather=False, **sizes)


def routes(replay_number: int, microbatch: int, tokens: int) -> torch.Tensor:
    """Two different experts of four for each token, others for each router and microbatch."""
    first = (torch.arange(tokens) * 3 + replay_number + microbatch) % 4
    return torch.stack([first, (first + 1 + microbatch % 3) % 4], dim=1)


@contextmanager
def replaying(model: Sequence[Any]) -> Iterator[list[int]]:
    """Set routes before each forward pass of a chunk, as frameworks do, and then the action of backward."""
    counts = dict.fromkeys(map(id, model), 0)
    forward_step, done = tiny_gpt.forward_step, [0]

    def step(data_iterator: Any, chunk: Any) -> Any:
        replays = router_replay.routers(chunk)
        for number, replay in enumerate(replays):
            replay.set_target_indices(routes(number, counts[id(chunk)], tiny_gpt.BATCH * tiny_gpt.SEQUENCE))
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        counts[id(chunk)] += 1
        done[0] += 1
        output = forward_step(data_iterator, chunk)
        for replay in replays:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output

    with mock.patch.object(tiny_gpt, "forward_step", step):
        yield done


def forward_only(model: Sequence[Any], of: TinyModel, through_schedule: bool) -> None:
    """Score one microbatch with routes of its own."""
    if through_schedule:
        with torch.no_grad(), replaying(model):
            get_forward_backward_func()(
                forward_step_func=tiny_gpt.forward_step,
                data_iterator=tiny_gpt.data_iterators(of, seed=7),
                model=list(model),
                num_microbatches=4 if of.vpp else 1,
                seq_length=tiny_gpt.SEQUENCE,
                micro_batch_size=tiny_gpt.BATCH,
                forward_only=True,
            )
        return
    [chunk] = model
    for number, replay in enumerate(router_replay.routers(model)):
        replay.set_target_indices(routes(number, 5, tiny_gpt.BATCH * tiny_gpt.SEQUENCE))
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with torch.no_grad():
        tiny_gpt.forward_step(tiny_gpt.SyntheticData(7), chunk)


def gradients(of: TinyModel, scores: bool, through_schedule: bool = True) -> tuple[torch.Tensor, list[int]]:
    """Return the gradients of one step of four microbatches, and how much is queued after it."""
    model, optimizer = of.build()
    if scores:
        forward_only(model, of, through_schedule)
    with replaying(model), mock.patch.object(optimizer, "step", lambda: (True, 0.0, 0)):
        tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(of), [4], of)
    flat = torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()])
    return flat.clone(), [len(replay.replay_backward_list) for replay in router_replay.routers(model)]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("through_schedule", [True, False])
@on_ranks(1)
def test_scoring_leaves_nothing_that_training_would_read(through_schedule: bool) -> None:
    expected, queued = gradients(options(), scores=False)
    assert set(queued) == {4}  # it grows for ever
    wrong, queued = gradients(options(recompute=True), True, through_schedule)
    assert error(wrong, expected) > 0.05 and set(queued) == {1}
    with applied("router-replay"):
        for recompute in (True, False):
            right, queued = gradients(options(recompute), True, through_schedule)
            assert error(right, expected) < 1e-6, recompute
            assert set(queued) == {0}


PROGRAMS = (
    "set 0, score, train",
    "set 0, score through the schedule, train",
    "set 0, score, score, train",
    "set 0, score, set 0, train, set 1, train",
    "set 0, score, set 1, score, set 2, train",
    "set 0, score, set 1, score through the schedule, set 1, train",
    "set 0, score in inference mode, train, score, set 1, score, train, score",
    "set 0, fail, train, set 1, fail, set 2, train",
    "set 0, score, set 1, fail, set 1, train, set 2, train",
)


def run_program(program: str, model: list[Any]) -> torch.Tensor:
    """Return the gradients that the training passes of a program add up to, without Megatron's schedule."""
    [chunk] = model
    chunk.zero_grad_buffer()

    def forward() -> Any:
        for replay in router_replay.routers(model):
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        return tiny_gpt.forward_step(tiny_gpt.SyntheticData(), chunk)[0]

    for step in program.split(", "):
        if step.startswith("set"):
            tensors = TENSORS[int(step[-1])]
            for replay, tensor in zip(router_replay.routers(model), tensors, strict=True):
                replay.set_target_indices(tensor)
        elif step == "train":
            losses = forward()
            for replay in router_replay.routers(model):
                replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            losses.mean().backward()
        elif step == "fail":
            last = router_replay_modules(chunk)[-1]
            with (
                mock.patch.object(last, "forward", side_effect=ZeroDivisionError),
                suppress(ZeroDivisionError),
            ):
                forward()
        elif step == "score through the schedule":
            with torch.no_grad():
                get_forward_backward_func()(
                    forward_step_func=lambda data, chunk: (forward(), lambda output: (output.mean(), {})),
                    data_iterator=None,
                    model=model,
                    num_microbatches=2,
                    seq_length=tiny_gpt.SEQUENCE,
                    micro_batch_size=tiny_gpt.BATCH,
                    forward_only=True,
                )
        else:
            with torch.inference_mode() if "inference" in step else torch.no_grad():
                forward()
    return torch.cat([p.main_grad.flatten() for p in chunk.parameters()]).clone()


def router_replay_modules(chunk: Any) -> list[Any]:
    return [module for module in chunk.modules() if getattr(module, "router_replay", None) is not None]


TENSORS = [
    [routes(number, use, tiny_gpt.BATCH * tiny_gpt.SEQUENCE) for number in range(tiny_gpt.LAYERS)]
    for use in range(3)
]


@pytest.mark.parametrize("recompute", [RECOMPUTE, MOE_RECOMPUTE], ids=["full", "selective"])
@on_ranks(1)
def test_passes_may_share_routes(recompute: dict[str, Any]) -> None:
    """Whatever runs between them, training passes use the routes that were set last."""
    sizes = {"overlap_grad_reduce": False}
    plain, recomputing = options(**sizes), options(config=recompute, **sizes)
    model, _ = plain.build()
    expected = [run_program(program, model) for program in PROGRAMS]
    model, _ = recomputing.build()
    with applied("router-replay"):
        for program, gradient in zip(PROGRAMS, expected, strict=True):
            assert error(run_program(program, model), gradient) < 1e-6, program
            router_replay.clear(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(lambda layout: 1 if layout == "MTP" else 2, timeout=240)
def test_recomputed_gradients_are_the_same_on_layouts(layout: str) -> None:
    with applied("router-replay"):
        expected, _ = gradients(options(**LAYOUTS[layout]), scores=False)
        right, queued = gradients(options(True, **LAYOUTS[layout]), scores=layout != "MTP")
    assert error(right, expected) < 1e-6
    assert set(queued) == {0}


@on_ranks(1)
def test_a_teacher_is_left_out_and_freed() -> None:
    RouterReplay.global_router_replay_instances.clear()
    model, _ = options().build()
    policy = list(RouterReplay.global_router_replay_instances)
    teacher = tiny_gpt.inference_model(options(), device="cpu")
    assert RouterReplay.global_router_replay_instances == policy == router_replay.routers(model)

    def reading(pre_process: bool, post_process: bool, config: Any) -> Any:
        return options().provider(pre_process, post_process, config).output_layer.weight.sum().item()

    with pytest.raises(InferenceOnlyError, match="pass perform_initialization=True"):
        build_inference_model(reading, options().transformer_config(), dtype="fp32", device="cpu")
    assert RouterReplay.global_router_replay_instances == policy
    of_teacher = router_replay.routers(teacher)
    assert len(of_teacher) == len(policy) and not set(map(id, of_teacher)) & set(map(id, policy))
    RouterReplay.set_replay_data([routes(number, 0, 8) for number in range(len(policy))])
    assert all(replay.target_topk_idx is None for replay in of_teacher)
    with applied("router-replay"):
        other, _ = options().build()
        assert len(RouterReplay.global_router_replay_instances) == 2 * len(policy)
        del other, _
        gc.collect()
        assert RouterReplay.global_router_replay_instances == policy


@on_ranks(1)
def test_an_exception_leaves_no_action_and_no_queue() -> None:
    of = options(recompute=True)
    with applied("router-replay"):
        expected, _ = gradients(of, scores=False)
        model, optimizer = of.build()
        train = reentrant_train(tiny_gpt.train)
        data = tiny_gpt.data_iterators(of)
        with replaying(model) as done, mock.patch.object(optimizer, "step", lambda: (True, 0.0, 0)):
            with (
                mock.patch.object(tiny_gpt, "_loss", mock.Mock(side_effect=KeyboardInterrupt)),
                pytest.raises(KeyboardInterrupt),
            ):
                train(model, optimizer, data, [4], of)
            assert done == [1]
            for replay in router_replay.routers(model):
                assert replay.router_replay_action is None and replay.target_topk_idx is None
                assert replay.replay_backward_list == []
        with replaying(model), mock.patch.object(optimizer, "step", lambda: (True, 0.0, 0)):
            train(model, optimizer, tiny_gpt.data_iterators(of), [4], of)
        flat = torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()])
        assert error(flat, expected) < 1e-6


@on_ranks(2)
def test_a_fused_router_is_refused_on_every_rank() -> None:
    of = options(pp=2)
    of.initialize()
    config = of.transformer_config()
    config.moe_router_fusion = True  # set after construction: it needs Transformer Engine
    of.chunks(config)  # unpatched, nobody says a word
    with applied("router-replay"):
        try:
            of.chunks(config)
        except InvalidInputError as refused:
            assert "moe_router_fusion=True with moe_enable_routing_replay=True" in str(refused)
            outcome = "refused"
        else:
            outcome = "built"
    assert everywhere(outcome) == ["refused"] * 2


def test_nothing_is_walked_where_no_model_has_routers() -> None:
    block = mock.Mock(spec=["config"], config=mock.Mock(spec=[]))
    router_replay.end_forward(block)
    router_replay.end_step([block])
    router_replay.clear([block])
    assert router_replay.routers([block]) == []
