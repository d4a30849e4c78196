"""``reentrant-train`` on real megatron-core: rollouts through several calls equal one uninterrupted run."""

from contextlib import nullcontext

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import TinyModel
from tests.device_thread import device_thread
from tests.ranks import on_ranks
from tests.references import tiny_gpt
from tests.worlds.model import RECOMPUTE, World

ROLLOUTS, STEPS = 3, 2
SETTINGS = Settings(train_functions=("tests.references.tiny_gpt:train",))
NO_SYNC = "When overlap_grad_reduce is True, config.no_sync_func must be None"


def trained(options: TinyModel, rollouts: int, steps: int) -> tuple[dict[int, float], str]:
    """Return the losses and the checksum of a new model, trained by as many calls of ``train()``."""
    world = World(options)
    for _ in range(rollouts):
        world.train(steps)
    return world.losses, world.checksum()


def check_rollouts(options: TinyModel, rollouts: int = ROLLOUTS) -> None:
    with pytest.raises(AssertionError, match=NO_SYNC):
        trained(options, 2, STEPS)
    uninterrupted = trained(options, 1, rollouts * STEPS)
    with applied("reentrant-train", settings=SETTINGS), tiny_gpt.counting_overlap() as overlap:
        assert trained(options, rollouts, STEPS) == uninterrupted
    assert overlap.param_gathers > 0
    assert overlap.grad_reduces + overlap.scheduled_grad_reduces > 0


@pytest.mark.runs("re-entry", ranks=[1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks)
def test_rollouts_equal_one_uninterrupted_run(ranks: int) -> None:
    check_rollouts(TinyModel())


@pytest.mark.slow
@on_ranks(2)
def test_sixty_calls_equal_one_uninterrupted_run() -> None:
    """As many calls as the first page names, on DP 2 with the distributed optimizer."""
    check_rollouts(TinyModel(), rollouts=60)


@on_ranks(1)
def test_backward_and_recomputation_in_a_thread_of_autograd() -> None:
    """As on CUDA, where they have none of the caller's context variables."""
    with applied("reentrant-train", "lean-head", settings=SETTINGS):
        results = []
        for where in (nullcontext(), device_thread()):
            with where:
                results.append(trained(TinyModel(config=RECOMPUTE), 2, 1))
    assert results[0] == results[1]
