"""A ``train()`` that raised, at every stage of a step, can be called again, on every layout."""

from contextlib import suppress
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_rl_patches import applied
from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.real import faults
from tests.real.faults import PLACES, STAGES, Checksums, Injected, Trainee
from tests.real.test_reentry import SETTINGS
from tests.references import tiny_gpt
from tests.worlds.model import NO_OVERLAP

STEPS = 4
OVERLAPS: dict[str, dict[str, Any]] = {
    "no overlap": NO_OVERLAP,
    "grad reduce": {"overlap_param_gather": False},
    "both": {},
}

# Stages of the first and the second rank. Of a pipeline, those where neither waits for the other, nor is a
# message of one on its way that the other has not received: a retry would take it for its own.
SAME = [(stage, stage) for stage in STAGES]
OF_A_PIPELINE = [
    ("forward 0", "before forward"),
    ("forward 1", "forward 0"),
    ("forward 1", "backward 0"),
    ("backward 0", "forward 1"),
    ("backward 0", "backward 1"),
    ("backward 1", "before step"),
    *((stage, stage) for stage in STAGES if "step" in stage or stage == "before forward"),
]
# Sizes and stages, and which of the parameters both ranks have.
LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str | None]] = {
    "DP 2": ({}, SAME, "params"),
    "TP 2": ({"tp": 2}, SAME, "replicated"),
    "PP 2": ({"pp": 2}, OF_A_PIPELINE, None),
    "EP 2": ({"kind": "moe", "ep": 2}, [*SAME, ("expert 1", "expert 1")], "replicated"),
}


def run(
    options: TinyModel, stage: str, place: tuple[int, int], strike: faults.Strike = faults.raise_injected
) -> tuple[float, Checksums, Checksums]:
    """Train :data:`STEPS` steps, with one fault on the way unless ``stage`` is empty.

    Return the last loss, and checksums at the call after the fault and at the end.
    """
    trainee, before_steps = Trainee(options), list[Checksums]()
    done, failing_step = place
    if done:
        trainee.train(done)
    if stage:
        trainee.fail(stage, failing_step, strike)
    call_step = tiny_gpt.train_step

    def train_step(*args: Any) -> float:
        before_steps.append(trainee.checksums())
        return call_step(*args)

    with mock.patch.object(tiny_gpt, "train_step", train_step):
        trainee.train(STEPS - trainee.done)
    return trainee.losses[STEPS - 1], before_steps[0], trainee.checksums()


@pytest.mark.parametrize(
    ("layout", "overlap", "only"),
    [
        ("DP 2", "both", [("backward 1", "backward 1")]),
        ("EP 2", "both", [("expert 1", "expert 1")]),
        pytest.param("DP 2", "both", None, marks=pytest.mark.slow),
        pytest.param("DP 2", "grad reduce", None, marks=pytest.mark.nightly),
        # Without data parallelism there is nothing to overlap with.
        *(pytest.param(name, "both", None, marks=pytest.mark.nightly) for name in ("TP 2", "PP 2", "EP 2")),
    ],
)
@on_ranks(2, timeout=240)
def test_stages_on_all_ranks(layout: str, overlap: str, only: list[tuple[str, str]] | None) -> None:
    sizes, stages, shared = LAYOUTS[layout]
    options = TinyModel(**sizes, **OVERLAPS[overlap])
    with applied("reentrant-train", settings=SETTINGS):
        expected_loss, _, expected = run(options, "", (0, 0))
        for of_ranks, place in product(only or stages, PLACES):
            # Ctrl-C passes `except Exception`, which the other does not.
            strike = faults.interrupt if place == "later step" else faults.raise_injected
            loss, at_reentry, end = run(options, of_ranks[dist.get_rank()], PLACES[place], strike)
            if shared is not None:
                for checksums in (at_reentry, end):
                    first, second = everywhere(getattr(checksums, shared))
                    assert first == second, f"{of_ranks}, {place}: parameters differ across ranks"
            if "in step" not in of_ranks:
                assert loss == expected_loss, (of_ranks, place)
                assert end == expected, (of_ranks, place)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["grad reduce", pytest.param("no overlap", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_one_rank_alone_may_retry_while_no_collective_is_under_way(overlap: str) -> None:
    """Its peer is in collectives, which its retry has to meet."""
    options = TinyModel(**OVERLAPS[overlap])
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = run(options, "", (1, 0))
        in_second_step = product(("before forward", "forward 1", "after step"), [1])
        for stage, step in (("before forward", 0), *in_second_step):
            assert run(options, stage if dist.get_rank() else "", (1, step))[-1] == undisturbed[-1], stage


@on_ranks(2)
def test_one_rank_that_raises_after_its_last_collective_is_agreed_upon() -> None:
    with applied("reentrant-train"):
        trainee = Trainee()
        for raising in (False, True, False):
            with suppress(Injected), reentrant_train(trainee.model, optimizer=trainee.optimizer):
                trainee.train(2)
                if raising and dist.get_rank() == 1:
                    raise Injected
        trainee.assert_as_undisturbed()


@on_ranks(1)
def test_a_gradient_that_was_on_its_way_to_the_buffer_is_dropped() -> None:
    """Memory ran out while it was added; the next backward pass would add its own to it."""
    trainee = Trainee()
    first_parameter = next(trainee.model[0].parameters())
    full = mock.Mock(**{"add_.side_effect": MemoryError})
    with (
        applied("reentrant-train"),
        pytest.raises(MemoryError),
        reentrant_train(trainee.model, optimizer=trainee.optimizer),
        mock.patch.object(first_parameter, "main_grad", full),
    ):
        trainee.train(1)
    assert first_parameter.grad is None
