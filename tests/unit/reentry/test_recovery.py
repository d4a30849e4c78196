"""How an exception is recovered from, and what ranks agree upon at the next entry."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_mock import MockerFixture

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.reentry import recovery
from megatron_rl_patches.reentry.chunks import bucket_groups, config_of
from megatron_rl_patches.testing import MockDDP
from megatron_rl_patches.testing.mock_ddp import MockBucketGroup
from megatron_rl_patches.testing.mock_modules import MockModule

ERROR = ZeroDivisionError()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def with_experts() -> MockDDP:
    return MockDDP(MockModule(MockModule(params=1), MockModule(params=1, expert=True)))


def in_process_group(chunk: MockDDP, dense: Any, experts: Any) -> None:
    """What the real bucket groups have besides."""
    for groups, process_group in (
        (chunk.bucket_groups, dense),
        (chunk.expert_parallel_bucket_groups, experts),
    ):
        for group in groups:
            group.intra_distributed_optimizer_instance_group = process_group  # type: ignore[attr-defined]
            group.buckets = [SimpleNamespace(grad_data=torch.zeros(1))]  # type: ignore[attr-defined]


def step(chunk: MockDDP) -> None:
    """Of the optimizer, after which nobody has gathered."""
    for group in bucket_groups(chunk):
        group.is_stale, group.param_gather_dispatched = True, False


def stale(chunk: MockDDP) -> list[bool]:
    return [group.is_stale for group in bucket_groups(chunk)]


class TestNextEntry:
    def test_ranks_that_share_a_bucket_group_agree(self, one_rank: Any, mocker: MockerFixture) -> None:
        interrupted, other = with_experts(), with_experts()
        for chunk in (interrupted, other):
            in_process_group(chunk, one_rank, one_rank)
            step(chunk)
        all_reduce = mocker.spy(dist, "all_reduce")
        recovery.recover([interrupted], ERROR)
        recovery.synchronize_interrupted([interrupted, other])
        assert stale(interrupted) == [False, False]
        assert stale(other) == [True, True]
        assert all_reduce.call_count == 2  # dense and experts of a chunk have one process group here
        for call in all_reduce.call_args_list:
            assert call.args[0].numel() == 1 and call.kwargs["group"] is one_rank

    def test_dense_and_expert_parameters_have_process_groups_of_their_own(
        self, one_rank: Any, mocker: MockerFixture
    ) -> None:
        chunk, of_experts = with_experts(), dist.new_group([0])
        in_process_group(chunk, one_rank, of_experts)
        step(chunk)
        all_reduce = mocker.spy(dist, "all_reduce")
        recovery.recover([chunk], ERROR)
        recovery.synchronize_interrupted([chunk])
        assert stale(chunk) == [False, False]
        assert [call.kwargs["group"] for call in all_reduce.call_args_list] == [one_rank, of_experts]

    def test_another_rank_was_interrupted(self, one_rank: Any, mocker: MockerFixture) -> None:
        chunk = with_experts()
        in_process_group(chunk, one_rank, one_rank)
        step(chunk)

        def of_two_ranks(flag: torch.Tensor, op: Any, group: Any) -> None:
            assert op == dist.ReduceOp.MAX
            flag.fill_(max(int(flag), 1))

        mocker.patch.object(dist, "all_reduce", of_two_ranks)
        recovery.synchronize_interrupted([chunk])
        assert stale(chunk) == [False, False]

    def test_once_is_enough(self, one_rank: Any) -> None:
        chunk = with_experts()
        in_process_group(chunk, one_rank, one_rank)
        recovery.recover([chunk], ERROR)
        recovery.synchronize_interrupted([chunk])
        step(chunk)
        recovery.synchronize_interrupted([chunk])
        assert stale(chunk) == [True, True]

    def test_no_collective_without_overlap_and_without_distributed_optimizer(self) -> None:
        chunk = MockDDP(overlap_param_gather=False, use_distributed_optimizer=False)
        for without in (chunk, MockModule()):
            recovery.recover([without], ERROR)
            recovery.synchronize_interrupted([without])
        assert chunk.calls == []

    def test_what_cannot_be_staged_is_refused(self, mocker: MockerFixture) -> None:
        chunk = MockDDP(reuse_grad_buf_for_mxfp8_param_ag=True)
        with pytest.raises(MegatronRLPatchesError) as caught:
            recovery._stage(chunk, None)
        assert str(caught.value) == (
            "training was interrupted with reuse_grad_buf_for_mxfp8_param_ag, and the parameters cannot be "
            "gathered without an optimizer that stages them: pass the optimizer, or load a checkpoint and "
            "build the model anew"
        )
        recovery._stage(MockDDP(), None)


class TestRecover:
    def test_a_gather_in_flight_is_completed_and_no_other_started(self) -> None:
        chunk = MockDDP()
        groups = chunk.bucket_groups
        step(chunk)
        groups[-1].start_param_sync()
        recovery.recover([chunk], ERROR)
        assert stale(chunk) == [True] * (len(groups) - 1) + [False]
        assert all(group.param_gather_handle is None for group in groups)

    def test_a_reduction_in_flight_is_waited_for(self, mocker: MockerFixture) -> None:
        chunk = MockDDP()
        group = chunk.bucket_groups[0]
        group.start_grad_sync()
        wait = mocker.spy(group.grad_reduce_handle, "wait")
        recovery.recover([chunk], ERROR)
        assert wait.call_count == 1 and group.grad_reduce_handle is None

    @pytest.mark.parametrize("first_batch", [True, False])
    def test_counts_of_half_a_batch_are_forgotten(self, first_batch: bool) -> None:
        chunk = MockDDP()
        group: MockBucketGroup = chunk.bucket_groups[0]
        parameter = next(iter(group.params))
        whole = {parameter: 2}
        group.is_first_batch, group.golden_per_param_grad_ready_counts = first_batch, whole
        group.per_param_grad_ready_counts = {parameter: 1}
        recovery.recover([chunk], ERROR)
        assert group.per_param_grad_ready_counts == {}
        assert group.golden_per_param_grad_ready_counts is whole
        assert group.is_first_batch is first_batch

    def test_a_group_that_fails_is_told(
        self, mocker: MockerFixture, caplog: pytest.LogCaptureFixture
    ) -> None:
        chunk = MockDDP()
        mocker.patch.object(chunk.bucket_groups[0], "reset", side_effect=RuntimeError("gone"))
        with caplog.at_level(logging.WARNING):
            recovery.recover([chunk], ERROR)
        assert caplog.messages == ["recovering a bucket group failed: RuntimeError: gone"]

    def test_only_no_sync_contexts_are_left(self) -> None:
        left = []

        @contextmanager
        def other() -> Iterator[None]:
            try:
                yield
            finally:
                left.append("other")

        chunk = MockDDP()

        def schedule() -> None:
            contexts = chunk.no_sync(), other()
            for context in contexts:
                context.__enter__()
            not_last, its_own = contexts
            assert not chunk.bucket_groups[0].is_last_microbatch and its_own is not None
            del contexts
            raise ValueError(not_last)

        try:
            schedule()
        except ValueError as error:
            recovery._close_abandoned_no_sync(error)
            assert chunk.bucket_groups[0].is_last_microbatch
            assert left == []

    def test_frames_of_causes_contexts_and_circles(self) -> None:
        def frames(error: BaseException) -> set[str]:
            return {frame.f_code.co_name for frame in recovery._frames(error)}

        def cause() -> None:
            raise ValueError

        def context() -> None:
            try:
                cause()
            except ValueError as error:
                raise KeyError from error

        def last() -> None:
            try:
                context()
            except KeyError:
                raise ZeroDivisionError  # noqa: B904

        try:
            last()
        except ZeroDivisionError as error:
            assert {"last", "context", "cause"} <= frames(error)
            error.__context__.__cause__.__context__ = error  # type: ignore[union-attr]
            assert {"last", "context", "cause"} <= frames(error)


def test_the_config_is_found_through_wrappers() -> None:
    config = object()
    assert (
        config_of(SimpleNamespace(config=None, module=SimpleNamespace(module=SimpleNamespace(config=config))))
        is config
    )
    assert config_of(SimpleNamespace()) is None


def test_bucket_groups_of_experts_are_among_them() -> None:
    chunk = with_experts()
    assert bucket_groups(chunk) == [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    assert len(bucket_groups(chunk)) == 2
    assert bucket_groups(MockModule()) == []
