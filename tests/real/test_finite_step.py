"""``finite-step`` on real optimizers: a NaN in one microbatch of one rank equals that step left out."""

import logging
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import Settings, applied, status
from megatron_rl_patches.errors import NonFiniteGradients
from megatron_rl_patches.reentry import finite_step
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real import matrix
from tests.references import tiny_gpt
from tests.references.sent_bytes import sent_bytes
from tests.worlds.model import MICROBATCHES, NOT_DISTRIBUTED, World

STEPS, BAD_STEP = 4, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2, bf16": {"bf16": True},
    "DP 2, bf16, not distributed": {"bf16": True, **NOT_DISTRIBUTED},
    "DP 2, fp32, not distributed": NOT_DISTRIBUTED,
    "PP 2": {"pp": 2, "bf16": True},
    "EP 2": {"kind": "moe", "ep": 2},
}


def built(**options: Any) -> World:
    """Return a model whose gradients may be NaN."""
    world = World(**options)
    for chunk in world.model:
        chunk.ddp_config.check_for_nan_in_grad = False
    return world


def run(options: dict[str, Any], bad_rank: int | None, leave_out: bool = False) -> list[torch.Tensor]:
    """Return the state after training, with a NaN as a loss of ``bad_rank``, or the bad step left out."""
    world = built(**options)
    train_step, loss_of, steps, losses = tiny_gpt.train_step, tiny_gpt._loss, count(), count()

    def counted_step(model: Any, optimizer: Any, iterators: Any, num_microbatches: int) -> float:
        if next(steps) == BAD_STEP and leave_out:
            for iterator in iterators:
                iterator._microbatch += num_microbatches
            return 0.0
        return train_step(model, optimizer, iterators, num_microbatches)

    def loss(losses_bs: torch.Tensor) -> Any:
        value, report = loss_of(losses_bs)
        is_bad = next(losses) == BAD_STEP * MICROBATCHES + 1 and dist.get_rank() == bad_rank
        return (value * float("nan") if is_bad else value), report

    patched = mock.patch.multiple(tiny_gpt, train_step=counted_step, _loss=loss)
    with patched, finite_step.skips_as_successes(world.optimizer):
        world.train(STEPS)
    return world.state()


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, ("DP 2, bf16",), ("DP 2, fp32, not distributed",)))
@on_ranks(2, timeout=240)
def test_a_bad_step_equals_that_step_left_out(layout: str) -> None:
    unpatched = run(LAYOUTS[layout], bad_rank=1)
    assert any(everywhere(any(value.isnan().any() for value in unpatched)))
    with applied("finite-step"):
        skipped = run(LAYOUTS[layout], bad_rank=1)
        expected = run(LAYOUTS[layout], None, leave_out=True)
        [site] = [site for site in status() if site.target.endswith("ChainedOptimizer.step")]
        assert site.detail == f"1 of {2 * STEPS - 1} steps skipped"
        assert site.detail in str(status())
    assert all(map(torch.equal, skipped, expected))


def step(world: World, bad: bool = False, bad_names: str = "") -> Any:
    """Take a step with gradients that have a NaN on the last rank, or are NaN where names contain a text."""
    for chunk in world.model:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.01)
    if bad and dist.get_rank() == dist.get_world_size() - 1:
        next(world.model[-1].parameters()).main_grad.view(-1)[0] = float("nan")
    for chunk in world.model:
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    for name, parameter in world.model[0].named_parameters():
        if bad_names and bad_names in name:
            parameter.main_grad.fill_(float("nan"))
    return world.optimizer.step()


def assert_skipped(world: World, **bad: Any) -> Any:
    """Take a bad step, which changes nothing, and return its norm."""
    before = world.state()
    succeeded, norm, _ = step(world, **bad)
    assert not succeeded
    assert all(map(torch.equal, before, world.state()))
    return norm


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2)
def test_what_is_said_on_which_rank_and_no_further_collective(bf16: bool) -> None:
    lines: list[str] = []
    handler = mock.Mock(level=logging.WARNING, handle=lambda record: lines.append(record.getMessage()))
    logging.getLogger("megatron_rl_patches").addHandler(handler)
    world = built(bf16=bf16, **NOT_DISTRIBUTED)
    step(world)  # makes the moments
    with sent_bytes() as unpatched:
        step(world)
    with applied("finite-step"), sent_bytes() as patched:
        assert step(world)[0]
    assert patched == unpatched
    assert [line for line in lines if "skipped" in line] == []

    finite_step.history_of(world.optimizer).chunks = world.model
    with applied("finite-step", settings=Settings(finite_step_limit=2)):
        with sent_bytes() as patched:
            norm = assert_skipped(world, bad=True)
        assert norm != norm and len(patched) <= len(unpatched)
        first = [line for line in lines if "skipped:" in line]
        assert len(first) == (dist.get_rank() == 0) and all("is nan" in line for line in first)
        [named] = [line for line in lines if "are not finite: " in line]
        assert "embedding.word_embeddings.weight. " in named  # reduced on both ranks
        before = world.state()
        with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
            step(world, bad=True)
    assert all(map(torch.equal, before, world.state()))


@pytest.mark.parametrize("kind", ["single", "layer-wise"])
@on_ranks(1)  # gloo cannot gather the unequal shares of layers
def test_optimizers_that_are_not_chained_or_layer_wise(kind: str) -> None:
    world = built(bf16=True, **NOT_DISTRIBUTED)
    chained = world.optimizer
    world.optimizer = chained.chained_optimizers[0] if kind == "single" else layer_wise(world)
    assert step(world)[0]
    with applied("finite-step"):
        norm = assert_skipped(world, bad=True)
        assert norm != norm and step(world)[0]
    assert step(world, bad=True)[0]
    assert any(value.isnan().any() for value in world.state())


def layer_wise(world: World) -> Any:
    try:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        pytest.skip("this release has no layer-wise optimizer")
    adam = torch.optim.Adam(world.model[0].parameters(), lr=5e-3)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer([adam], world.optimizer.config, groups)


@on_ranks(2)
def test_parameters_that_have_a_norm_of_their_own() -> None:
    options: dict[str, Any] = {"kind": "mtp", "pp": 2, "config": {"mtp_detach_heads": True, "num_layers": 2}}
    try:
        matrix.tiny(**options, **NOT_DISTRIBUTED).transformer_config()
    except TypeError:
        pytest.skip("this release has no norm for groups of parameters")
    world = built(**options, **NOT_DISTRIBUTED)
    for clip_grad in (0.0, 1.0):
        for part in world.optimizer.chained_optimizers:
            part.config.clip_grad = clip_grad
        with applied("finite-step"):
            norm = assert_skipped(world, bad_names=".mtp.")  # on the last stage alone
            assert norm == norm and step(world)[0]
            assert bool(world.optimizer.grad_norms_by_group) == (clip_grad > 0)
