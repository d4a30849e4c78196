"""Ctrl-C anywhere in ``train()`` and in the swaps of a ``TeacherPool``, and SIGTERM on one rank.

SIGINT comes at a chosen function call, so that it comes at the same place every time. After it there is a
whole teacher, or none that is claimed. Failing calls of ``train()`` leave nothing behind.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from megatron_rl_patches import applied
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import TeacherPool
from megatron_rl_patches.reentry import recovery
from megatron_rl_patches.testing import RanksFailed, cpu_backend
from tests.ranks import on_ranks
from tests.real.faults import STAGES, Trainee, counting_updates, fault, interrupt
from tests.real.test_reentry import SETTINGS
from tests.references.live_bytes import reachable_bytes

Call = tuple[str, int]  # the n-th call of a function, from 0


@contextmanager
def watched(*parts: str, methods: Container[str] = (), at: Call | None = None) -> Iterator[list[Call]]:
    """Record calls of functions by parts of their files' paths, and calls of methods in C by their names.

    SIGINT comes as the call ``at`` begins; for a method in C also as it returns. Ranks that run the same
    code make the same calls, whatever else differs between them.
    """
    counts: Counter[str] = Counter()
    calls: list[Call] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            # Not <listcomp>, nor <genexpr>, which would swallow the interrupt where it is being closed.
            if code.co_name.startswith("<") or not any(part in code.co_filename for part in parts):
                return
            name = f"{code.co_name}, line {code.co_firstlineno}"
        elif event in ("c_call", "c_return") and argument.__name__ in methods:
            name = f"{event} {argument.__name__}"
        else:
            return
        calls.append((name, counts[name]))
        counts[name] += 1
        if calls[-1] == at:
            os.kill(os.getpid(), signal.SIGINT)  # Python switches off what raises in it

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def interrupted_after(owner: Any, name: str) -> Iterator[None]:
    """SIGINT once, when the function returns."""
    function, pending = getattr(owner, name), [True]

    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if pending:
            pending.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return value

    with mock.patch.object(owner, name, call):
        yield
    assert not pending, f"{name} was not called"


# Not the optimizer: its calls are those of the rank's shard. Not testing/: it stands for CUDA.
PARTS = (
    "megatron_rl_patches/reentry/",
    "megatron/core/distributed/d",
    "megatron/core/distributed/param",
    "megatron/core/pipeline_parallel/schedules",
)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_interrupted_at_every_call() -> None:
    with applied("reentrant-train", settings=SETTINGS):
        trainee = Trainee()
        trainee.train()
        with watched(*PARTS) as calls:
            trainee.train(2)
        counts = Counter(function for function, _ in calls)
        names = {function.partition(",")[0] for function in counts}
        assert {"register_grad_ready", "start_grad_sync", "disable", "synchronize_interrupted"} <= names
        # The first and the last call of each function.
        for place in [call for call in calls if call[1] in (0, counts[call[0]] - 1)]:
            updates = counting_updates(trainee.optimizer)
            with updates as done, pytest.raises(KeyboardInterrupt), watched(*PARTS, at=place):
                trainee.train(2)
            trainee.done += len(done)
            trainee.train()
        trainee.assert_as_undisturbed()


@on_ranks(2)
def test_interrupted_again_while_cleaning_up() -> None:
    with applied("reentrant-train", settings=SETTINGS):
        trainee = Trainee()
        trainee.train()
        for name in ("_close_abandoned_no_sync", "_reset_bucket_group"):  # cleaning up
            for stage, step in (("backward 1", 1), ("after step", 0)):
                with (
                    pytest.raises(KeyboardInterrupt),
                    interrupted_after(recovery, name),
                    fault(stage, step, trainee.optimizer, interrupt),
                ):
                    trainee.train(2)
                trainee.done += 1
                trainee.train()
        for name in ("_any_rank_was", "_gather_parameters"):  # the next entry
            trainee.fail("after step", 0, interrupt)
            with pytest.raises(KeyboardInterrupt), interrupted_after(recovery, name):
                trainee.train()
            trainee.train()
        trainee.assert_as_undisturbed()


@cpu_backend()
def _terminated() -> None:
    """Rank 1 ends in the middle of a step, while rank 0 waits for its gradients."""
    with applied("reentrant-train", settings=SETTINGS):
        trainee = Trainee()
        trainee.train()
        if dist.get_rank() == 1:
            trainee.fail("backward 1", 0, lambda stage: os.kill(os.getpid(), signal.SIGTERM))
        trainee.train()


def test_terminated_in_a_step(ranks: Any) -> None:
    # Collectives would give up after 60 seconds, and the peer of a rank that is gone has two.
    with pytest.raises(RanksFailed) as failed:
        ranks(_terminated, 2)
    assert failed.value.ranks == (1, 0)
    assert "died with signal SIGTERM, no traceback" in str(failed.value)


OWN, ADDED = 0.5, 3.0
TEACHERS = {"a": 1.0, "b": 2.0, "added": ADDED}
_watched = partial(watched, "inference/teachers.py", "inference/weights.py", methods={"copy_"})


def _pool() -> TeacherPool:
    pool = TeacherPool(torch.nn.Linear(2, 3).requires_grad_(False))
    for name in ("a", "b"):
        pool.add(name, partial(_fill, value=TEACHERS[name]))
    _fill(pool.model, OWN)
    return pool


def _fill(model: torch.nn.Module, value: float) -> None:
    for weight in model.state_dict().values():
        weight.fill_(value)


def _values(pool: TeacherPool) -> set[float]:
    return {value for weight in pool.model.state_dict().values() for value in weight.flatten().tolist()}


def add(pool: TeacherPool) -> None:
    pool.add("added", partial(_fill, value=ADDED))


def add_and_take_turns(pool: TeacherPool) -> None:
    with pool.use("a"), pool.use("b"):
        add(pool)
        with pool.use("added"), pool.use("a"):
            pass


def add_what_the_model_holds(pool: TeacherPool) -> None:
    _fill(pool.model, ADDED)
    pool.add("added")
    with pool.use("a"):
        pass


@pytest.mark.parametrize("scenario", [add_and_take_turns, add_what_the_model_holds])
def test_swaps_interrupted_at_every_call(scenario: Callable[[TeacherPool], None]) -> None:
    pool = _pool()
    with _watched() as calls:
        scenario(pool)
    assert len(calls) > 40
    for place in calls:
        pool = _pool()
        with pytest.raises(KeyboardInterrupt), _watched(at=place):
            scenario(pool)
        _check(pool, place)


def _check(pool: TeacherPool, place: Any) -> None:
    held = _values(pool)
    if pool.resident is not None:
        assert held == {TEACHERS[pool.resident]}, f"{place}: {pool.resident} is claimed"
    if not any(held == {value} for value in (OWN, *TEACHERS.values())):
        assert pool.resident is None, place
        with pytest.raises(InvalidInputError, match="interrupted swap"):
            pool.add("torn")
    # Teachers in the pool are whole, and swaps go on.
    for name in pool.names:
        with pool.use(name):
            assert _values(pool) == {TEACHERS[name]}, f"{place}: {name} is not what was added"
            assert pool.resident == name, place
    if "added" not in pool:
        add(pool)
    with pool.use("added"):
        assert _values(pool) == {ADDED}, place
    pool.remove("added")
    assert pool.names == ["a", "b"], place


# Stage and step of each failing call of a round. Not "in step": what a half update gives is not defined.
IN_SECOND_STEP = [(stage, 1) for stage in STAGES if stage not in ("before forward", "in step")]
ROUND = [("before forward", 0), *IN_SECOND_STEP, ("backward 1", 0), ("after step", 0), ("before step", 0)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and file descriptors in /proc")
@on_ranks(2, timeout=200)
def test_forty_failing_calls() -> None:
    assert 4 * len(ROUND) == 40
    with applied("reentrant-train", settings=SETTINGS):
        trainee, sizes = Trainee(), []  # after the first call of every stage, and 20 and 40 calls later
        for done in range(1 + 4):
            for stage, step in ROUND:
                trainee.fail(stage, step)
            if done % 2 == 0:
                sizes.append(held(trainee.model))
        trainee.train()
        trainee.assert_as_undisturbed()
    warm, *later = sizes
    assert warm["hooks"] > 0 and warm["live bytes"] > 0
    assert later == [warm, warm]


def held(model: Sequence[Any]) -> dict[str, int]:
    """Return counts of what a failing call could leave behind in a process, after collecting garbage."""
    counts = {"live bytes": reachable_bytes()}
    things = [type(thing) for thing in gc.get_objects()]
    generators = (types.GeneratorType, contextlib._GeneratorContextManager)
    for kind in (*generators, RemovableHandle, torch.Tensor, types.FrameType, BaseException):
        counts[kind.__name__] = sum(issubclass(thing, kind) for thing in things)
    owners = [vars(thing) for chunk in model for thing in (*chunk.modules(), *chunk.parameters())]
    hooks = [value for owner in owners for name, value in owner.items() if name.endswith("_hooks")]
    counts["hooks"] = sum(len(value) for value in hooks if value)
    counts["Python threads"] = threading.active_count()
    counts["threads"] = len(os.listdir("/proc/self/task"))
    counts["file descriptors"] = len(os.listdir("/proc/self/fd"))
    return counts
