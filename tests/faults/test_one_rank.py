"""One rank raises or differs while its peer waits: an error in time, and no update that only one has made.

Process groups have collectives that time out soon, and can be replaced by new ones after that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import applied
from megatron_rl_patches.testing import RanksFailed, TinyModel, cpu_backend
from tests.ranks import by_speed, on_ranks
from tests.real import test_loss_func
from tests.real.faults import PLACES, STAGES, Trainee, counting_updates, steps_done
from tests.real.test_interruption import OVERLAPS, SETTINGS
from tests.real.test_lean_head import CASES, LAYOUTS, _train

# Long enough for what goes well on a busy machine, short enough to wait for.
TIMEOUT = timedelta(seconds=3)
_AT_MOST = timedelta(seconds=60)


@contextmanager
def short_lived_groups(folder: Path, name: str) -> Iterator[dist.Store]:
    """Replace all groups, also the default one, by some that time out; yield a store to meet in."""
    from megatron.core import parallel_state

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / name), 2)
    store.set_timeout(_AT_MOST)
    of_default = dist.PrefixStore("default", store)
    dist.init_process_group("gloo", store=of_default, rank=rank, world_size=world, timeout=TIMEOUT)
    minutes = TIMEOUT.total_seconds() / 60
    initialize = partial(parallel_state.initialize_model_parallel, distributed_timeout_minutes=minutes)
    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize):
        yield store


def divide_into_pairs(folder: Path) -> int:
    """Make worlds of two ranks that do not know each other; return the number of this rank's world."""
    world, rank = divmod(dist.get_rank(), 2)
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / f"pair {world}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_AT_MOST)
    dist.barrier()  # a rank that left now would close connections that others are still making
    return world


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that a call raises; "timed out" if it waited for too long."""
    try:
        call()
    except Exception as error:
        timed_out = "Timed out" in str(error) or "Application timeout" in str(error)
        return "timed out" if timed_out else f"{type(error).__name__}: {error}"
    return "no error"


#: Sizes, overlap and place for each pair of ranks. Pairs run at the same time: they wait for most of it.
PAIRS: dict[str, list[tuple[dict[str, int], str, str]]] = {
    "each layout": [
        ({}, "no overlap", "later step"),
        ({}, "grad reduce", "first batch"),
        ({}, "both", "first batch"),
        ({}, "both", "later step"),
        ({"tp": 2}, "both", "later step"),
        ({"pp": 2}, "both", "first batch"),
    ],
    "at the other place": [
        ({}, "no overlap", "first batch"),
        ({}, "grad reduce", "later step"),
        ({"tp": 2}, "both", "first batch"),
        ({"pp": 2}, "both", "later step"),
    ],
}


@pytest.mark.parametrize("cases", by_speed(PAIRS, fast=(), nightly=("at the other place",)))
@on_ranks(lambda cases: 2 * len(PAIRS[cases]), timeout=240)
def test_error_in_time(cases: str, tmp_path: Path) -> None:
    pair = divide_into_pairs(tmp_path)
    with applied("reentrant-train", settings=SETTINGS):
        sizes, overlap, place = PAIRS[cases][pair]
        options = TinyModel(**sizes, **OVERLAPS[overlap])
        before = _new_model(options, tmp_path, f"{pair}, before")
        for stage in STAGES:
            error, updates = _outcome(options, stage, place, tmp_path, f"{pair}, {stage}")
            done, failing_step = PLACES[place]
            assert updates == done + steps_done(stage, failing_step), (overlap, stage, place)
            # After the call's last step, the peer waits only for a gather of parameters.
            gathers = not sizes and overlap == "both"
            waits = (stage, place) != ("after step", "later step") or gathers
            if dist.get_rank() == 0 and waits:
                assert error == "timed out", (overlap, stage, place)
        assert _new_model(options, tmp_path, f"{pair}, after") == before


def _outcome(options: TinyModel, stage: str, place: str, folder: Path, name: str) -> tuple[str, int]:
    """Return the error of the peer, and how many updates this rank has made."""
    done, failing_step = PLACES[place]
    error = ""
    with short_lived_groups(folder, name) as store:
        trainee = Trainee(options)
        with counting_updates(trainee.optimizer) as updates:
            trainee.train(done)
            if dist.get_rank() == 1:
                trainee.fail(stage, failing_step)
            else:
                error = error_of(lambda: trainee.train(2))
        store.set(f"{dist.get_rank()}", "after the error")
        store.wait([f"{1 - dist.get_rank()}"])
    trainee.release()
    return error, len(updates)


def _new_model(options: TinyModel, folder: Path, name: str) -> str:
    """Return what a new model's weights are after a step, in new groups."""
    with short_lived_groups(folder, name):
        trainee = Trainee(options)
        trainee.train(1)
        whole = trainee.checksums().whole
    trainee.release()
    return whole


@cpu_backend()
def _mismatch(folder: Path) -> None:
    with applied("reentrant-train", settings=SETTINGS), short_lived_groups(folder, "groups"):
        trainee = Trainee(TinyModel())
        trainee.train(1)
        if dist.get_rank() == 1:
            trainee.fail("before forward", 0)
        trainee.train(1)


def test_a_lone_retry_with_overlapped_gather_is_never_silent(ranks: Any, tmp_path: Path) -> None:
    """Its entry is a collective, which the peer takes for one of the step's."""
    with pytest.raises(RanksFailed) as failed:
        ranks(_mismatch, 2, tmp_path, timeout=90)
    assert sorted(failed.value.ranks) == [0, 1], failed.value


@on_ranks(2)
def test_a_data_parallel_rank_without_rows() -> None:
    """Its parameters' hooks still run, so that its peer does not wait for its part of the gradients."""
    microbatch = test_loss_func.microbatch

    def without_responses(number: int, packed: bool) -> Any:
        data = microbatch(number, packed)
        batch = type(data.batch)(*[[torch.zeros(0) for _ in data.tokens]] * 5)
        return data._replace(response_lengths=[0] * len(data.tokens), batch=batch)

    of_rank = without_responses if dist.get_rank() else microbatch
    with mock.patch.object(test_loss_func, "microbatch", of_rank):
        plain, lean = (_train(LAYOUTS["DP 2"], CASES["entropy bonus"], lean) for lean in (False, True))
    assert not lean.made
    assert lean.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, gradient in plain.gradients.items():
        assert torch.allclose(lean.gradients[name], gradient, rtol=1e-4, atol=1e-6), name
