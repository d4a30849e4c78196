"""Router replay of real megatron-core: with and without recomputation, beside a teacher, after exceptions."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import applied
from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import build_inference_model
from megatron_rl_patches.reentry import reentrant_train, router_replay
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, on_ranks
from tests.real import matrix
from tests.references import tiny_gpt
from tests.worlds.model import RECOMPUTE, RECOMPUTE_EXPERTS, World, gradients_of

try:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
except ImportError:
    pytest.skip("this release has no router replay", allow_module_level=True)

MTP = {"mtp_num_layers": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "VPP 2": {"pp": 2, "vpp": 2},
    "EP 2": {"ep": 2},
    "MTP": {"config": MTP},
    "hybrid, EP 2": {"kind": "hybrid", "ep": 2},
    "hybrid, PP 2": {"kind": "hybrid", "pp": 2},
    "hybrid, MTP": {"kind": "hybrid", "config": MTP},
}


def options(recompute: dict[str, Any] | None = None, kind: str = "moe", **sizes: Any) -> TinyModel:
    config = {"moe_enable_routing_replay": True, **(recompute or {}), **sizes.pop("config", {})}
    return matrix.tiny(kind, config=config, overlap_param_gather=False, **sizes)


def routes(replay_number: int, use: int) -> torch.Tensor:
    """Two different experts of four for each token, others for each router and use."""
    first = (torch.arange(tiny_gpt.BATCH * tiny_gpt.SEQUENCE) * 3 + replay_number + use) % 4
    return torch.stack([first, (first + 1 + use % 3) % 4], dim=1)


def set_routes(model: Any, use: int) -> None:
    for number, replay in enumerate(router_replay.routers(model)):
        replay.set_target_indices(routes(number, use))


def set_action(model: Any, action: Any) -> None:
    for replay in router_replay.routers(model):
        replay.set_router_replay_action(action)


@contextmanager
def replaying(model: Sequence[Any]) -> Iterator[list[int]]:
    """Set routes before each forward pass of a chunk, as frameworks do, and then the action of backward.

    Yield the number of passes.
    """
    counts = dict.fromkeys(map(id, model), 0)
    forward_step, done = tiny_gpt.forward_step, [0]

    def step(data_iterator: Any, chunk: Any) -> Any:
        set_routes(chunk, counts[id(chunk)])
        set_action(chunk, RouterReplayAction.REPLAY_FORWARD)
        counts[id(chunk)] += 1
        done[0] += 1
        output = forward_step(data_iterator, chunk)
        set_action(chunk, RouterReplayAction.REPLAY_BACKWARD)
        return output

    with mock.patch.object(tiny_gpt, "forward_step", step):
        yield done


def train(world: World, loop: Any = None) -> torch.Tensor:
    """Return the gradients of one step of four microbatches, which changes no weight."""
    with mock.patch.object(world.optimizer, "step", lambda: (True, 0.0, 0)):
        world.train(microbatches=4, loop=loop)
    world.done = 0
    return gradients_of(world.model)


def gradients(of: TinyModel, scores: bool) -> tuple[torch.Tensor, set[int]]:
    """Return the gradients of a new model, scored before or not, and how much its routers have queued."""
    world = World(of)
    if scores:
        with replaying(world.model):
            data = tiny_gpt.data_iterators(of, seed=7)
            tiny_gpt.run_schedule(world.model, data, 4 if of.vpp else 1, forward_only=True)
    with replaying(world.model):
        flat = train(world)
    return flat, {len(replay.replay_backward_list) for replay in router_replay.routers(world.model)}


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("VPP 2", "MTP")))
@on_ranks(lambda layout: 1 if "MTP" in layout else 2, timeout=240)
def test_recomputed_gradients_are_the_same(layout: str) -> None:
    sizes = LAYOUTS[layout]
    with applied("router-replay"):
        expected, _ = gradients(options(**sizes), scores=False)
        # Up to megatron-core 0.17, hybrid models recompute no whole layers.
        for recompute in (RECOMPUTE, RECOMPUTE_EXPERTS)[: 1 + ("hybrid" in layout)]:
            right, queued = gradients(options(recompute, **sizes), scores="MTP" not in layout)
            assert error(right, expected) < 1e-6
            assert queued <= {0}  # a stage may have no router


STALE = "set 0, score, set 1, train"
PROGRAMS = (
    STALE,
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

    def forward(*unused: Any) -> Any:
        set_action(model, RouterReplayAction.REPLAY_FORWARD)
        return tiny_gpt.forward_step(tiny_gpt.SyntheticData(), chunk)

    for step in program.split(", "):
        if step.startswith("set"):
            set_routes(model, int(step[-1]))
        elif step == "train":
            losses, _ = forward()
            set_action(model, RouterReplayAction.REPLAY_BACKWARD)
            losses.mean().backward()
        elif step == "fail":
            last = [module for module in chunk.modules() if getattr(module, "router_replay", None)][-1]
            failing = mock.patch.object(last, "forward", side_effect=ZeroDivisionError)
            with failing, suppress(ZeroDivisionError):
                forward()
        elif step == "score through the schedule":
            tiny_gpt.run_schedule(model, None, 2, forward, forward_only=True)
        else:
            with torch.inference_mode() if "inference" in step else torch.no_grad():
                forward()
    return gradients_of(model)


@pytest.mark.parametrize("kind", by_speed(("moe", "hybrid", "hybrid, MTP"), fast=("moe",)))
@on_ranks(1)
def test_passes_may_share_routes(kind: str) -> None:
    """Whatever runs between them, training passes use the routes that were set last."""
    sizes: dict[str, Any] = {"kind": kind.partition(",")[0], "overlap_grad_reduce": False}
    programs = PROGRAMS
    if "MTP" in kind:
        sizes["config"] = MTP
        # Where multi-token prediction fails, the layers before it have run, and count on a backward pass.
        programs = tuple(program for program in PROGRAMS if "fail" not in program)
    model = World(options(**sizes)).model
    # The schedule sets how the loss of multi-token prediction is scaled.
    run_program("set 0, score through the schedule", model)
    expected = [run_program(program, model) for program in programs]
    for recompute in (RECOMPUTE, RECOMPUTE_EXPERTS):
        model = World(options(recompute, **sizes)).model
        if kind != "hybrid" or recompute is RECOMPUTE_EXPERTS:
            assert error(run_program(STALE, model), expected[0]) > 0.05, "it is right without the patch"
            router_replay.clear(model)
        with applied("router-replay"):
            for program, gradient in zip(programs, expected, strict=True):
                assert error(run_program(program, model), gradient) < 1e-6, program
                router_replay.clear(model)


@on_ranks(1)
def test_a_teacher_is_left_out_and_freed() -> None:
    RouterReplay.global_router_replay_instances.clear()
    model = World(options()).model
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
    RouterReplay.set_replay_data([routes(number, 0) for number in range(len(policy))])
    assert all(replay.target_topk_idx is None for replay in of_teacher)
    with applied("router-replay"):
        other, _ = options().build()
        assert len(RouterReplay.global_router_replay_instances) == 2 * len(policy)
        del other, _
        gc.collect()
        assert RouterReplay.global_router_replay_instances == policy


@on_ranks(1)
def test_an_exception_leaves_no_action_and_no_queue() -> None:
    of = options(RECOMPUTE)
    with applied("router-replay"):
        expected, _ = gradients(of, scores=False)
        world = World(of)
        loop = reentrant_train(tiny_gpt.train)
        interrupted = mock.patch.object(tiny_gpt, "_loss", mock.Mock(side_effect=KeyboardInterrupt))
        with replaying(world.model) as done, interrupted, pytest.raises(KeyboardInterrupt):
            train(world, loop)
        assert done == [1]
        for replay in router_replay.routers(world.model):
            assert replay.router_replay_action is None and replay.target_topk_idx is None
            assert replay.replay_backward_list == []
        with replaying(world.model):
            assert error(train(world, loop), expected) < 1e-6


@pytest.mark.parametrize("kind", by_speed(("moe", "hybrid"), fast=("moe",)))
@on_ranks(2)
def test_a_fused_router_is_refused_on_every_rank(kind: str) -> None:
    of = options(kind=kind, pp=2)
    of.initialize()
    config = of.transformer_config()
    config.moe_router_fusion = True  # set after construction: it needs Transformer Engine
    of.chunks(config)  # unpatched, nobody says a word
    message = "moe_router_fusion=True with moe_enable_routing_replay=True"
    with applied("router-replay"), pytest.raises(InvalidInputError, match=message):
        of.chunks(config)
