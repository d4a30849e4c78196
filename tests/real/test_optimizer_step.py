"""``OptimizerStep`` on real megatron-core: several calls of the schedule have the bits of one call."""

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
from megatron.core.distributed import finalize_model_grads

from megatron_rl_patches.inference import memory_report
from megatron_rl_patches.reentry import OptimizerStep, reentrant_train, training_warnings
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real import matrix
from tests.references import tiny_gpt
from tests.worlds.model import NO_OVERLAP, NOT_DISTRIBUTED, World, gradients_of

_SIXTEEN_BITS: dict[str, Any] = {"bf16": True, "grad_reduce_in_fp32": False, "tied": True}


def per_token(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Megatron's forward step of a loss per token; the number of tokens differs between microbatches."""
    batch = next(data_iterator)
    mask_bs = batch["tokens"] < tiny_gpt.VOCABULARY // 2
    output, _ = tiny_gpt.forward_step(iter([batch]), model)
    return output, lambda x: ((x * mask_bs).sum(), mask_bs.sum().int(), {"loss": x.detach().sum()})


class Stepped(World):
    """A model that steps, and what each step has returned."""

    def __init__(self, is_known: bool = True, config: Any = None, **options: Any) -> None:
        super().__init__(config={**(config or {}), "calculate_per_token_loss": not is_known}, **options)
        self.steps = OptimizerStep(self.model, self.optimizer)
        self.is_known, self.bits = is_known, list[tuple[Any, ...]]()

    def run(self, function: Any, *numbers: int, **changes: Any) -> list[float]:
        arguments = {
            "forward_step_func": tiny_gpt.forward_step if self.is_known else per_token,
            "data_iterator": self.data if self.options.vpp else self.data[0],
            "seq_length": tiny_gpt.SEQUENCE,
            "micro_batch_size": tiny_gpt.BATCH,
            **changes,
        }
        reports = [report for n in numbers for report in function(num_microbatches=n, **arguments)]
        return [float(report["loss"]) for report in reports]

    def step(self, *calls: int, way: str = "OptimizerStep") -> None:
        if way == "OptimizerStep":
            self.steps.begin(sum(calls) if self.is_known else None)
            losses = self.run(self.steps.forward_backward, *calls)
            result = self.steps.step()
        else:
            no_syncs = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_syncs if no_syncs[1:] else no_syncs[0]
            self.config.finalize_model_grads_func = finalize_model_grads if way == "one call" else None
            self.optimizer.zero_grad()
            for chunk in self.model:
                chunk.zero_grad_buffer()
            schedule = partial(tiny_gpt.get_forward_backward_func(), model=self.model)
            losses = self.run(schedule, *(calls if way == "calls alone" else [sum(calls)]))
            if way == "calls alone":
                finalize_model_grads(self.model)
            result = self.optimizer.step()
            for chunk in self.model if self.options.overlap_param_gather else ():
                chunk.start_param_sync(force_sync=True)
        self.bits.append((losses, result, gradients_of(self.model).tolist(), self.checksum()))


def check(**options: Any) -> None:
    for is_known in (True, False):
        one, several = (Stepped(is_known, **options) for _ in range(2))
        several.step(1, 1, way="one call")  # reductions overlap from the second step on
        one.step(1, 1, way="one call")
        # Interleaved schedules need two microbatches or more.
        for calls in ((2, 4), (2, 2, 2)) if "vpp" in options else ((1, 2), (2, 1, 1)):
            one.step(*calls, way="one call")
            several.step(*calls)
        assert one.bits == several.bits


@matrix.cells(slow=matrix.HALVES[0] | {"MTP, DP 2", "MoE, EP 2", "dense, PP 2"}, always={"dense, DP 2"})
@on_ranks(lambda ranks: ranks, timeout=240)
def test_several_calls_have_the_bits_of_one(ranks: int, model: dict[str, Any]) -> None:
    check(**model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [NO_OVERLAP, NOT_DISTRIBUTED, _SIXTEEN_BITS], ids=str)
@on_ranks(2, timeout=240)
def test_overlaps(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize("options", [NOT_DISTRIBUTED, pytest.param({}, marks=pytest.mark.slow)], ids=str)
@on_ranks(2)
def test_calls_alone_reduce_too_early(options: dict[str, Any]) -> None:
    """The second one adds to gradients that are being reduced, so norms differ, and a warning says why."""
    norms = {}
    for way in ("one call", "OptimizerStep", "calls alone"):
        world, training_warnings.messages = Stepped(**options), {}
        with suppress(AssertionError), reentrant_train(world.model, installs=False):
            world.step(1, 1, way="one call")
            world.step(1, 2, way=way)  # megatron-core 0.14 raises for two calls
        norms[way] = everywhere(world.bits[1][1][1] if world.bits[1:] else None)
        warnings = [line[:25] for line in training_warnings.reported()]
        assert warnings == ["overlap_grad_reduce=True:"] * (way == "calls alone")
    assert norms["calls alone"] != norms["OptimizerStep"] == norms["one call"] == norms["one call"][:1] * 2


@pytest.mark.parametrize("place", by_speed(["reduction", "call", "step"], fast=["reduction"]))
@on_ranks(2)
def test_a_step_that_fails_leaves_nothing_to_the_next(place: str) -> None:
    undisturbed, world, failing = Stepped(), Stepped(), mock.Mock(side_effect=KeyboardInterrupt)
    world.step(1, 2)
    functions = {**vars(world.config)}
    with pytest.raises(KeyboardInterrupt), world.steps.begin(3):
        changes = {"forward_step_func": failing} if place == "call" else {}
        world.run(world.steps.forward_backward, 1)
        world.run(world.steps.forward_backward, 2, **changes)
        assert all(group.grad_reduce_handle for group in world.model[0].bucket_groups)
        world.optimizer.step = failing  # which the guard takes away
        (world.steps.step if place == "step" else failing)()
    assert vars(world.config) == functions
    world.data[0]._microbatch = 3
    world.step(1, 2)
    for _ in world.bits:
        undisturbed.step(1, 2)
    assert world.bits == undisturbed.bits


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
@on_ranks(2)
def test_gradients_on_main_parameters_end_with_the_outermost_call(kind: str) -> None:
    """They are 4 bytes for each parameter of this rank's share, beside gradient buffers in 16 bits."""
    bits = {}
    for is_guarded in (False, True):
        world, sizes = World(kind=kind, **_SIXTEEN_BITS), list[int]()
        model, optimizer = world.model, world.optimizer
        guards = [reentrant_train(model, optimizer=optimizer) if is_guarded else nullcontext() for _ in "12"]
        with guards[0]:
            with guards[1]:
                world.train()
            sizes.append(memory_report(optimizer=optimizer).main_gradients)
        sizes.append(memory_report(optimizer=optimizer).main_gradients)
        share = sum(main.numel() for group in optimizer.param_groups for main in group["params"])
        assert sizes == [4 * share, 0 if is_guarded else 4 * share]
        bits[is_guarded] = world.losses, world.checksum()
    assert bits[True] == bits[False]
