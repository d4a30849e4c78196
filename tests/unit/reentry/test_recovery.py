"""How an exception is recovered from, and what ranks agree upon at the next entry."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_mock import MockerFixture

from megatron_rl_patches.common.chunks import bucket_groups
from megatron_rl_patches.reentry import recovery, reentrant_train
from megatron_rl_patches.testing import MockBucketGroup, MockDDP, MockModule

ERROR = ZeroDivisionError()


def with_experts(*process_groups: dist.ProcessGroup) -> MockDDP:
    """Return a chunk whose dense and expert parameters are gathered by these groups, or by one rank alone."""
    chunk = MockDDP(module=MockModule(MockModule(params=1), MockModule(params=1, expert=True)))
    for group, process_group in zip(bucket_groups(chunk), process_groups, strict=False):
        group.intra_distributed_optimizer_instance_group = process_group
        group.buckets = [SimpleNamespace(grad_data=torch.zeros(1))]
    return chunk


def step(chunk: MockDDP) -> None:
    """Run a step of the optimizer, after which nobody has gathered the parameters."""
    for group in bucket_groups(chunk):
        group.is_stale, group.param_gather_dispatched = True, False


def stale(chunk: MockDDP) -> list[bool]:
    return [group.is_stale for group in bucket_groups(chunk)]


def raised_with(error: Exception, name: str) -> Exception:
    """Return an exception that has another one as its cause, say, or in a group, which Python 3.10 lacks."""
    last: Any = RuntimeError()
    setattr(last, name, [error] if name == "exceptions" else error)
    if name == "__cause__":
        error.__cause__ = last  # a circle
    return last


@pytest.mark.parametrize("other_was", [False, True])
@pytest.mark.parametrize("this_was", [False, True])
def test_ranks_of_a_bucket_group_agree(mocker: MockerFixture, this_was: bool, other_was: bool) -> None:
    def all_reduce(flag: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX and flag.tolist() == int(this_was)
        flag.fill_(max(int(flag), int(other_was)))
        reduced_over.append(group)

    reduced_over: list[Any] = []
    mocker.patch.object(dist, "all_reduce", all_reduce)
    dense, experts = dist.ProcessGroup(0, 2), dist.ProcessGroup(0, 2)  # collectives are mocked
    for groups in ([dense], [dense, experts]):
        chunk = with_experts(groups[0], groups[-1])
        reduced_over.clear()
        step(chunk)
        if this_was:
            recovery.recover([chunk], ERROR)
        recovery.synchronize_interrupted([chunk])
        assert reduced_over == groups
        interrupted = this_was or other_was
        assert stale(chunk) == [not interrupted] * 2


def test_chunks_without_interrupt_or_overlap_are_not_gathered() -> None:
    interrupted, other = with_experts(), with_experts()
    for chunk in (interrupted, other):
        step(chunk)
    recovery.recover([interrupted], ERROR)
    recovery.synchronize_interrupted([interrupted, other])
    assert (stale(interrupted), stale(other)) == ([False, False], [True, True])
    chunk = MockDDP(overlap_param_gather=False, use_distributed_optimizer=False)
    for without in (chunk, MockModule()):
        recovery.recover([without], ERROR)
        recovery.synchronize_interrupted([without])
    assert chunk.calls == []


def test_a_gather_in_flight_is_completed_and_no_other_started() -> None:
    chunk = MockDDP()
    groups = chunk.bucket_groups
    step(chunk)
    groups[-1].start_param_sync()
    recovery.recover([chunk], ERROR)
    assert stale(chunk) == [True] * (len(groups) - 1) + [False]
    assert all(group.param_gather_handle is None for group in groups)


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", ["", "exceptions", "__cause__", "__context__"])
def test_only_no_sync_contexts_are_left(name: str) -> None:
    left = []

    @contextmanager
    def other() -> Iterator[None]:
        try:
            yield
        finally:
            left.append("other")

    chunk = MockDDP()

    def schedule() -> None:
        not_last, its_own = chunk.no_sync(), other()
        for context in (not_last, its_own):
            context.__enter__()
        raise ValueError

    with pytest.raises(ValueError) as caught:
        schedule()
    recovery.recover([chunk], raised_with(caught.value, name) if name else caught.value)
    assert left == []
    for group in chunk.bucket_groups:
        group.is_last_microbatch = False
    del caught
    gc.collect()
    assert left == ["other"]
    assert not any(group.is_last_microbatch for group in chunk.bucket_groups)


@pytest.mark.parametrize("in_another_thread", [False, True])
def test_contexts_of_frames_that_still_run_are_not_abandoned(in_another_thread: bool) -> None:
    """The caller accumulates gradients by hand, and handles another exception while the guard runs."""
    chunk = MockDDP()

    def fail_in_the_guard() -> None:
        with reentrant_train(MockDDP()):
            raise ZeroDivisionError

    def accumulate() -> None:
        context = chunk.no_sync()
        context.__enter__()
        try:
            raise KeyError
        except KeyError as error:
            with pytest.raises(ZeroDivisionError) as caught:
                fail_in_the_guard()
            assert caught.value.__context__ is error
            if in_another_thread:
                with ThreadPoolExecutor() as pool:
                    pool.submit(recovery.recover, [MockDDP()], error).result()
        assert not chunk.bucket_groups[0].is_last_microbatch
        context.__exit__(None, None, None)

    accumulate()


@pytest.mark.parametrize("error", [None, RuntimeError("timed out")])
def test_a_reduction_in_flight_is_waited_for_and_dropped(mocker: MockerFixture, error: Any) -> None:
    chunk = MockDDP()
    group = chunk.bucket_groups[0]
    group.start_grad_sync()
    wait = mocker.patch.object(group.grad_reduce_handle, "wait", side_effect=error)
    recovery.recover([chunk], ERROR)
    assert wait.call_count == 1 and group.grad_reduce_handle is None


@pytest.mark.parametrize("gather_fails", [False, True])
def test_the_stream_of_optimizer_instances_is_waited_for(mocker: MockerFixture, gather_fails: bool) -> None:
    """With ``num_distributed_optimizer_instances > 1`` and overlap, a reduction has no handle."""
    chunk = MockDDP()
    group: Any = chunk.bucket_groups[0]
    group.communication_stream = stream = mocker.Mock()
    current = mocker.patch.object(torch.cuda, "current_stream").return_value
    reset = mocker.patch.object(group, "reset")
    if gather_fails:
        group.param_gather_handle = mocker.Mock()
        mocker.patch.object(group, "finish_param_sync", side_effect=RuntimeError("timed out"))
    reset.side_effect = lambda: current.wait_stream.assert_called_once_with(stream)
    recovery.recover([chunk], ERROR)
    assert reset.call_count == 1
    group.communication_stream = None  # as without overlap
    recovery.recover([chunk], ERROR)
    assert current.wait_stream.call_count == 1


def test_up_to_0_15_groups_have_a_set_of_parameters_and_no_first_batch() -> None:
    class Group(MockBucketGroup):
        def reset(self) -> None:
            self.params_with_grad = set[Any]()

    chunk = MockDDP()
    group = Group(list(chunk.parameters()), chunk.ddp_config, dist.ProcessGroup(0, 1))
    group.params_with_grad = {object()}
    del group.is_first_batch, group.per_param_grad_ready_counts
    chunk.bucket_groups = [group]
    recovery.recover([chunk], ERROR)
    assert group.params_with_grad == set()
    assert not hasattr(group, "per_param_grad_ready_counts")
