"""``finite-step`` on real optimizers: a NaN in one microbatch of one rank equals that step left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import Settings, applied, status
from megatron_rl_patches.errors import NonFiniteGradients
from megatron_rl_patches.reentry import finite_step
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import by_speed, everywhere, on_ranks
from tests.references import tiny_gpt
from tests.references.sent_bytes import sent_bytes

STEPS, BAD_STEP, MICROBATCHES = 4, 2, 2
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False, "overlap_param_gather": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP 2, bf16": {"bf16": True},
    "DP 2, bf16, not distributed": {"bf16": True, **PLAIN},
    "DP 2, fp32, not distributed": PLAIN,
    "PP 2": {"pp": 2, "bf16": True},
    "EP 2": {"kind": "moe", "ep": 2},
}


def state_of(model: Sequence[Any], optimizer: Any) -> list[Any]:
    """Return copies of the weights, main parameters, moments and step counts of this rank."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if part.optimizer is not None]
    groups = [group for each in inner for group in each.param_groups]
    moments = [value for each in inner for state in each.state.values() for value in state.values()]
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    main = [parameter for group in groups for parameter in group["params"]]
    tensors = [torch.as_tensor(value).detach().clone() for value in [*parameters, *main, *moments]]
    return [*tensors, *(torch.tensor(float(group.get("step", 0))) for group in groups)]


def run(options: TinyModel, bad_rank: int | None, leave_out: bool = False) -> list[Any]:
    """Return the state after training, with a NaN as the loss of one microbatch, or the bad step left out.

    Args:
        bad_rank: which has the NaN, and a loss.
    """
    model, optimizer = options.build()
    for chunk in model:
        chunk.ddp_config.check_for_nan_in_grad = False
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
    with patched, finite_step.skips_as_successes(optimizer):
        iterators = tiny_gpt.data_iterators(options)
        tiny_gpt.train(model, optimizer, iterators, [MICROBATCHES] * STEPS, options)
    return state_of(model, optimizer)


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, ("DP 2, bf16",), ("DP 2, fp32, not distributed",)))
@on_ranks(2, timeout=240)
def test_a_bad_step_equals_that_step_left_out(layout: str) -> None:
    options = TinyModel(**LAYOUTS[layout])
    unpatched = run(options, bad_rank=1)
    assert any(everywhere(any(value.isnan().any() for value in unpatched)))
    with applied("finite-step"):
        skipped = run(options, bad_rank=1)
        expected = run(options, None, leave_out=True)
        [site] = [site for site in status() if site.target.endswith("ChainedOptimizer.step")]
        assert site.detail == f"1 of {2 * STEPS - 1} steps skipped"
        assert site.detail in str(status())
    assert all(map(torch.equal, skipped, expected))


def step(model: Sequence[Any], optimizer: Any, bad: bool = False, bad_names: str = "") -> Any:
    """Take a step with gradients that have a NaN on the last rank, or are NaN where names contain a text."""
    for chunk in model:
        chunk.ddp_config.check_for_nan_in_grad = False
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.01)
    if bad and dist.get_rank() == dist.get_world_size() - 1:
        next(model[-1].parameters()).main_grad.view(-1)[0] = float("nan")
    for chunk in model:
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    for name, parameter in model[0].named_parameters():
        if bad_names and bad_names in name:
            parameter.main_grad.fill_(float("nan"))
    return optimizer.step()


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2)
def test_what_is_said_on_which_rank_and_no_further_collective(bf16: bool) -> None:
    lines: list[str] = []
    handler = mock.Mock(level=logging.WARNING, handle=lambda record: lines.append(record.getMessage()))
    logging.getLogger("megatron_rl_patches").addHandler(handler)
    model, optimizer = TinyModel(bf16=bf16, **PLAIN).build()
    step(model, optimizer)  # makes the moments
    with sent_bytes() as unpatched:
        step(model, optimizer)
    with applied("finite-step"), sent_bytes() as patched:
        assert step(model, optimizer)[0]
    assert patched == unpatched
    assert [line for line in lines if "skipped" in line] == []

    before = state_of(model, optimizer)
    finite_step.name_parameters_of(optimizer, model)
    with applied("finite-step", settings=Settings(finite_step_limit=2)):
        with sent_bytes() as patched:
            succeeded, norm, _ = step(model, optimizer, bad=True)
        assert not succeeded and norm != norm
        assert len(patched) <= len(unpatched)
        first = [line for line in lines if "skipped:" in line]
        assert len(first) == (dist.get_rank() == 0) and all("is nan" in line for line in first)
        [named] = [line for line in lines if "not finite here" in line]
        assert "embedding.word_embeddings.weight. " in named  # reduced on both ranks
        with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
            step(model, optimizer, bad=True)
    assert all(map(torch.equal, before, state_of(model, optimizer)))


@pytest.mark.parametrize("kind", ["single", "layer-wise"])
@on_ranks(1)  # gloo cannot gather the unequal shares of layers
def test_optimizers_that_are_not_chained_or_layer_wise(kind: str) -> None:
    model, chained = TinyModel(bf16=True, **PLAIN).build()
    optimizer = chained.chained_optimizers[0] if kind == "single" else layer_wise(model, chained.config)
    assert step(model, optimizer)[0]
    before = state_of(model, optimizer)
    with applied("finite-step"):
        assert not step(model, optimizer, bad=True)[0]
        assert all(map(torch.equal, before, state_of(model, optimizer)))
        assert step(model, optimizer)[0]
    assert step(model, optimizer, bad=True)[0]
    assert any(value.isnan().any() for value in state_of(model, optimizer))


def layer_wise(model: Sequence[Any], config: Any) -> Any:
    try:
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        pytest.skip("this release has no layer-wise optimizer")
    adam = torch.optim.Adam([parameter for chunk in model for parameter in chunk.parameters()], lr=5e-3)
    return LayerWiseDistributedOptimizer([adam], config, ProcessGroupCollection.use_mpu_process_groups())


@on_ranks(2)
def test_parameters_that_have_a_norm_of_their_own() -> None:
    try:
        options = tiny_model("mtp", pp=2, config={"mtp_detach_heads": True, "num_layers": 2}, **PLAIN)
        options.transformer_config()
    except TypeError:
        pytest.skip("this release has no norm for groups of parameters")
    model, optimizer = options.build()
    for clip_grad in (0.0, 1.0):
        for part in optimizer.chained_optimizers:
            part.config.clip_grad = clip_grad
        before = state_of(model, optimizer)
        with applied("finite-step"):
            succeeded, norm, _ = step(model, optimizer, bad_names=".mtp.")  # on the last stage alone
            assert not succeeded and norm == norm
            assert all(map(torch.equal, before, state_of(model, optimizer)))
            assert step(model, optimizer)[0]
            assert bool(optimizer.grad_norms_by_group) == (clip_grad > 0)
