"""Everything that an exception leaves behind in megatron-core is there without the guard, and gone with it.

The installed release has no ``params_with_grad`` (E4, up to 0.15). Unit tests show that, and attributes that
nothing of Megatron acts upon meanwhile: ``force_all_reduce`` (E12), ``optimizer.step`` (E13). That stale
parameters (E2) are gathered is shown by ``test_interruption.py``; this file shows them without the guard.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import applied
from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.testing import cpu_backend, spawn_ranks


def _guard(guarded: bool, model: Any, **options: Any) -> Any:
    return reentrant_train(model, **options) if guarded else nullcontext()


def _interrupt(
    guarded: bool, options: Any, stage: str, before: int = 1, failing_step: int = 0
) -> tuple[Any, ...]:
    """Train ``before`` steps in one call, fail in the next one, and return model, optimizer and data."""
    from tests.real import faults, tiny_gpt

    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    if before:
        tiny_gpt.train(model, optimizer, data, [2] * before, options)
        for chunk in model:
            chunk.config.no_sync_func = None
    with pytest.raises(faults.Injected):
        guard = _guard(guarded, model, optimizer=optimizer)
        with guard, faults.fault(stage, failing_step, optimizer):
            tiny_gpt.train(model, optimizer, data, [2, 2], options)
    return model, optimizer, data


def _retry(guarded: bool, options: Any, stage: str, **where: int) -> str:
    from tests.real import tiny_gpt

    model, optimizer, data = _interrupt(guarded, options, stage, **where)
    for chunk in model:
        chunk.config.no_sync_func = None
    try:
        guard = _guard(guarded, model, optimizer=optimizer)
        with guard:
            tiny_gpt.train(model, optimizer, data, [2, 2], options)
    except AssertionError as error:
        return f"AssertionError: {error}"
    return ""


def e1_param_sync_func_is_lost(guarded: bool) -> bool:
    from tests.real.tiny_gpt import Options

    model, _, _ = _interrupt(guarded, Options(align_param_gather=True), "forward 0")
    return model[0].config.param_sync_func is None


def e3_reduction_is_outstanding(guarded: bool) -> str:
    from tests.real.tiny_gpt import Options

    return _retry(guarded, Options(), "backward 1", failing_step=1)


def e5_first_batch_is_half_counted(guarded: bool) -> bool:
    from tests.real.tiny_gpt import Options

    return _retry(guarded, Options(), "backward 1", before=0) != ""


def e6_gather_is_in_flight(guarded: bool) -> bool:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from tests.real import tiny_gpt

    model, optimizer = tiny_gpt.build(tiny_gpt.Options())
    data = tiny_gpt.data_iterators(tiny_gpt.Options())
    finish, calls = Group.finish_param_sync, []

    def finish_once(self: Any, **kwargs: Any) -> None:
        finish(self, **kwargs)
        calls.append(self)
        if len(calls) == 1:
            raise ZeroDivisionError

    guard = _guard(guarded, model, optimizer=optimizer)
    with pytest.raises(ZeroDivisionError), guard, mock.patch.object(Group, "finish_param_sync", finish_once):
        tiny_gpt.train(model, optimizer, data, [2, 2], tiny_gpt.Options())
    return any(group.param_gather_handle is not None for group in model[0].bucket_groups)


def e9_step_is_skipped(guarded: bool) -> list[bool]:
    """Return whether the next two steps run forward and backward."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    from tests.real import tiny_gpt

    model, _ = tiny_gpt.build(tiny_gpt.Options())
    machine = get_rerun_state_machine()
    with pytest.raises(ZeroDivisionError), _guard(guarded, model):
        while machine.should_run_forward_backward(None):
            raise ZeroDivisionError
    ran = []
    for _ in range(2):
        ran.append(machine.should_run_forward_backward(None))
        while machine.should_run_forward_backward(None):
            pass
    return ran


def e10_evaluation_is_left_half_way(guarded: bool) -> tuple[Any, ...]:
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    from megatron.core.timers import Timers

    from tests.real import tiny_gpt

    model, _ = tiny_gpt.build(tiny_gpt.Options())
    model[0].config.timers = timers = Timers(2, "max")
    machine = get_rerun_state_machine()
    machine.set_mode(RerunMode.VALIDATE_RESULTS)
    try:
        with pytest.raises(ZeroDivisionError), _guard(guarded, model):
            machine.set_mode(RerunMode.DISABLED)
            model[0].config.timers = None
            model[0].eval()
            raise ZeroDivisionError
        return machine.mode == RerunMode.VALIDATE_RESULTS, model[0].config.timers is timers, model[0].training
    finally:
        machine.set_mode(RerunMode.DISABLED)


def e11_timer_is_running(guarded: bool) -> bool:
    from megatron.core.timers import Timers

    from tests.real import tiny_gpt

    model, _ = tiny_gpt.build(tiny_gpt.Options())
    model[0].config.timers = timers = Timers(2, "max")
    with pytest.raises(ZeroDivisionError), _guard(guarded, model):
        timers("forward-backward", log_level=1).start()
        raise ZeroDivisionError
    return bool(timers("forward-backward")._started)


def gradient_is_on_its_way(guarded: bool) -> bool:
    """Return whether a parameter has a gradient after memory ran out while it was added to the buffer.

    The next backward pass would add its own gradient to it.
    """
    from tests.real import tiny_gpt

    options = tiny_gpt.Options()
    model, optimizer = tiny_gpt.build(options)
    first_parameter = next(model[0].parameters())
    full = mock.Mock(**{"add_.side_effect": MemoryError})
    guard = _guard(guarded, model, optimizer=optimizer)
    with pytest.raises(MemoryError), guard, mock.patch.object(first_parameter, "main_grad", full):
        tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(options), [2], options)
    return first_parameter.grad is not None


# Scenario -> what it returns without the guard, and with it.
ONE_RANK: dict[Callable[[bool], Any], tuple[Any, Any]] = {
    e1_param_sync_func_is_lost: (True, False),
    e3_reduction_is_outstanding: (
        "AssertionError: Should not have multiple communication calls outstanding at once",
        "",
    ),
    e5_first_batch_is_half_counted: (True, False),
    e6_gather_is_in_flight: (True, False),
    e9_step_is_skipped: ([False, True], [True, True]),
    e10_evaluation_is_left_half_way: ((False, False, False), (True, True, True)),
    e11_timer_is_running: (True, False),
    gradient_is_on_its_way: (True, False),
}


def e2_parameters_are_stale(guarded: bool) -> str:
    """Return a checksum of the parameters that the next call would start from."""
    from tests.real import tiny_gpt
    from tests.real.outcomes import Checksums

    model, optimizer, _ = _interrupt(guarded, tiny_gpt.Options(), "after step", failing_step=0)
    with _guard(guarded, model, optimizer=optimizer):
        return Checksums.of(model, optimizer).params


def e7_abandoned_no_sync_ends_a_later_accumulation(guarded: bool) -> bool:
    """Return whether freeing the exception changes ``is_last_microbatch``, which a later batch has set."""
    import torch.distributed as dist

    from tests.real import faults, tiny_gpt

    options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2))
    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    # The stages raise where neither still waits for the other.
    stage = "forward 1" if dist.get_rank() == 0 else "backward 0"
    error: BaseException | None = None
    guard = _guard(guarded, model, optimizer=optimizer)
    try:
        with guard, faults.fault(stage, 0, optimizer):
            tiny_gpt.train(model, optimizer, data, [2], options)
    except faults.Injected as raised:
        error = raised
    assert error is not None
    for group in model[0].bucket_groups:
        group.is_last_microbatch = False
    error = None
    gc.collect()
    return any(group.is_last_microbatch for group in model[0].bucket_groups)


def e8_interleaved_schedule_drops_the_functions(guarded: bool) -> bool:
    """Return whether ``grad_sync_func`` is lost; frameworks that install it once rely on it."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from tests.real import tiny_gpt

    options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2, vpp=2))
    model, _ = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    config = model[0].config
    config.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    guard = _guard(guarded, model, installs=False)
    with (
        pytest.raises(ZeroDivisionError),
        guard,
        mock.patch.object(P2PCommunicator, "recv_forward", side_effect=ZeroDivisionError),
    ):
        tiny_gpt.get_forward_backward_func()(
            forward_step_func=tiny_gpt.forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=2,
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=tiny_gpt.BATCH,
            forward_only=True,
        )
    return config.grad_sync_func is None


def _observe(names: list[str]) -> dict[str, tuple[Any, Any]]:
    # The hooks are patched in both cases, since the scenarios are about what an exception leaves behind.
    with cpu_backend(), applied("reentrant-train"):
        return {name: (globals()[name](False), globals()[name](True)) for name in names}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, tuple[Any, Any]]:
    [observed] = spawn_ranks(_observe, 1, [scenario.__name__ for scenario in ONE_RANK], timeout=120)
    return observed


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple[Any, Any]]]:
    scenarios = [
        e2_parameters_are_stale,
        e7_abandoned_no_sync_ends_a_later_accumulation,
        e8_interleaved_schedule_drops_the_functions,
    ]
    return spawn_ranks(_observe, 2, [scenario.__name__ for scenario in scenarios], timeout=120)


@pytest.mark.parametrize("scenario", ONE_RANK, ids=lambda scenario: scenario.__name__)
def test_one_rank(one_rank: dict[str, tuple[Any, Any]], scenario: Callable[[bool], Any]) -> None:
    assert one_rank[scenario.__name__] == ONE_RANK[scenario]


def test_parameters_are_stale_without_the_guard_only(two_ranks: list[dict[str, tuple[str, str]]]) -> None:
    (bare, guarded), (other_bare, other_guarded) = (r[e2_parameters_are_stale.__name__] for r in two_ranks)
    assert bare != other_bare
    assert guarded == other_guarded


def test_abandoned_no_sync(two_ranks: list[dict[str, tuple[bool, bool]]]) -> None:
    first_stage, _ = (rank[e7_abandoned_no_sync_ends_a_later_accumulation.__name__] for rank in two_ranks)
    assert first_stage == (True, False)


def test_interleaved_functions(two_ranks: list[dict[str, tuple[bool, bool]]]) -> None:
    for rank in two_ranks:
        assert rank[e8_interleaved_schedule_drops_the_functions.__name__] == (True, False)
