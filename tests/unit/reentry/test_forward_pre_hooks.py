"""Enabling and disabling in any order, against mocked DDP."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from megatron_rl_patches.reentry import forward_pre_hooks, preserved_hooks
from megatron_rl_patches.testing import MockDDP, MockModule, MockOptimizer


def enable(chunk: MockDDP) -> None:
    forward_pre_hooks.enable(chunk.enable_forward_pre_hook, chunk)


def disable(chunk: MockDDP, **kwargs: bool) -> None:
    forward_pre_hooks.disable(chunk.disable_forward_pre_hook, chunk, **kwargs)


def hooked(chunk: MockDDP) -> list[bool]:
    return [bool(module._forward_pre_hooks) for module in chunk.module.modules()]


def syncs(chunk: MockDDP) -> list[dict[str, Any]]:
    return [kwargs for name, kwargs in chunk.calls if name == "start_param_sync"]


def step(chunk: MockDDP) -> None:
    """Run a training step, after which gradients are reduced and parameters of other ranks are stale."""
    chunk.zero_grad_buffer()
    chunk.backward()
    chunk.finish_grad_sync()
    MockOptimizer([chunk]).step()


def is_complete(chunk: MockDDP) -> bool:
    return not any(group.is_stale or group.param_gather_handle for group in chunk.bucket_groups)


ACTIONS = ("enable", "disable", "disable without sync", "step", "forward")


@given(st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_any_order_keeps_parameters_and_hooks_in_order(actions: list[str]) -> None:
    chunk = MockDDP()
    on = True
    for action in actions:
        if action == "enable":
            enable(chunk)
            on = True
        elif action == "disable":
            disable(chunk)
            on = False
            assert is_complete(chunk)
        elif action == "disable without sync":
            disable(chunk, param_sync=False)
            on = False
        elif action == "step":
            step(chunk)
        elif on or is_complete(chunk):
            chunk()
            assert is_complete(chunk)
        assert set(hooked(chunk)) == {on}
        assert len(chunk.remove_forward_pre_hook_handles) == (len(hooked(chunk)) if on else 0)
    assert chunk.stale_forwards == 0


def test_off_already_synchronizes_once_what_a_step_or_a_gather_left() -> None:
    chunk = MockDDP()
    disable(chunk, param_sync=False)
    step(chunk)
    for leave in (lambda: None, chunk.start_param_sync):
        leave()
        chunk.calls.clear()
        disable(chunk, param_sync=False)
        assert syncs(chunk) == []
        disable(chunk)
        assert syncs(chunk) == [{"force_sync": True, "force_dispatch": False}]
        assert is_complete(chunk)
        disable(chunk)
        assert len(syncs(chunk)) == 1


def test_an_unstaged_mxfp8_gather_is_never_dispatched(mocker: MockerFixture) -> None:
    chunk = MockDDP(reuse_grad_buf_for_mxfp8_param_ag=True)
    disable(chunk)
    step(chunk)
    chunk.bucket_groups[-1].start_param_sync()
    dispatched = [mocker.spy(group, "start_param_sync") for group in chunk.bucket_groups]
    finished = [mocker.spy(group, "finish_param_sync") for group in chunk.bucket_groups]
    chunk.calls.clear()
    disable(chunk)
    assert [spy.call_count for spy in dispatched] == [0] * len(dispatched)
    assert [spy.call_count for spy in finished] == [0] * (len(finished) - 1) + [1]
    assert [group.is_stale for group in chunk.bucket_groups] == [True] * (len(finished) - 1) + [False]
    assert syncs(chunk) == []


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("change", ["added", "added, and upstream stopped half-way", "taken away"])
def test_a_submodule_added_or_taken_away_since(change: str, place: int) -> None:
    chunk = MockDDP()
    children: list[Any] = [*chunk.module.children()]
    gone = children[min(place, len(children) - 1)]
    if change == "taken away":
        children.remove(gone)
    else:
        children.insert(place, MockModule())
    chunk.module._modules = {str(number): child for number, child in enumerate(children)}
    if "upstream" in change:
        with pytest.raises(KeyError):
            chunk.disable_forward_pre_hook()
        enable(chunk)
    disable(chunk)
    assert not any(hooked(chunk)) and not gone._forward_pre_hooks
    assert chunk.remove_forward_pre_hook_handles == {}


@pytest.mark.parametrize("action", [enable, disable])
def test_the_assertion_on_use_forward_hook_stays(action: Any) -> None:
    with pytest.raises(AssertionError):
        action(MockDDP(overlap_param_gather=False))


def test_errors_of_the_gather_itself_are_not_swallowed(mocker: MockerFixture) -> None:
    for error in (KeyError("bucket"), AssertionError("in flight")):
        chunk = MockDDP()
        mocker.patch.object(chunk, "start_param_sync", side_effect=error)
        with pytest.raises(type(error)) as caught:
            disable(chunk)
        assert caught.value is error


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_saving_leaves_the_hooks_as_they_were(on: bool, raises: bool) -> None:
    overlapping, plain = [MockDDP(), MockDDP()], MockDDP(overlap_param_gather=False)
    for chunk in overlapping:
        if not on:
            disable(chunk)
    with suppress(ZeroDivisionError), preserved_hooks([overlapping[0], plain, overlapping[1]]):
        for chunk in overlapping:
            disable(chunk)
        if raises:
            raise ZeroDivisionError
        for chunk in overlapping:
            enable(chunk)
    for chunk in overlapping:
        assert set(hooked(chunk)) == {on}
    assert not any(hooked(plain))
