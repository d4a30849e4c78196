"""Enabling and disabling in any order, against mocked DDP."""

from __future__ import annotations

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


def set_children(chunk: MockDDP, children: list[Any]) -> None:
    chunk.module._modules = {str(number): child for number, child in enumerate(children)}


def syncs(chunk: MockDDP) -> list[dict[str, Any]]:
    return [kwargs for name, kwargs in chunk.calls if name == "start_param_sync"]


def step(chunk: MockDDP) -> None:
    """Run a training step, after which gradients are reduced and parameters of other ranks are stale."""
    chunk.zero_grad_buffer()
    chunk.backward()
    chunk.finish_grad_sync()
    MockOptimizer([chunk]).step()


def is_stale(chunk: MockDDP) -> bool:
    return any(group.is_stale for group in chunk.bucket_groups)


@given(
    st.lists(st.sampled_from(["enable", "disable", "disable without sync", "step", "forward"]), max_size=12)
)
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
            assert not is_stale(chunk)
        elif action == "disable without sync":
            disable(chunk, param_sync=False)
            on = False
        elif action == "step":
            step(chunk)
        elif on or not is_stale(chunk):
            chunk()
            assert not is_stale(chunk)
        assert set(hooked(chunk)) == {on}
        assert len(chunk.remove_forward_pre_hook_handles) == (len(hooked(chunk)) if on else 0)
    assert chunk.stale_forwards == 0


def test_off_already_still_synchronizes_what_a_step_left() -> None:
    chunk = MockDDP()
    disable(chunk, param_sync=False)
    step(chunk)
    chunk.calls.clear()
    disable(chunk, param_sync=False)
    assert syncs(chunk) == []
    disable(chunk)
    assert syncs(chunk) == [{"force_sync": True, "force_dispatch": False}]
    assert not is_stale(chunk)
    disable(chunk)
    assert len(syncs(chunk)) == 1


def test_off_already_waits_for_a_gather_in_flight() -> None:
    chunk = MockDDP()
    disable(chunk)
    chunk.start_param_sync()
    chunk.calls.clear()
    disable(chunk)
    assert len(syncs(chunk)) == 1
    assert all(group.param_gather_handle is None for group in chunk.bucket_groups)


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
@pytest.mark.parametrize("upstream_first", [True, False])
def test_a_submodule_added_since_does_not_stop_half_way(place: int, upstream_first: bool) -> None:
    chunk = MockDDP()
    children = [*chunk.module.children()]
    set_children(chunk, [*children[:place], MockModule(), *children[place:]])
    if upstream_first:
        with pytest.raises(KeyError):
            chunk.disable_forward_pre_hook()
        enable(chunk)
    disable(chunk)
    assert not any(hooked(chunk))
    assert chunk.remove_forward_pre_hook_handles == {}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_submodule_taken_away_since_leaves_no_hook(place: int) -> None:
    chunk = MockDDP()
    children = [*chunk.module.children()]
    gone = children.pop(place)
    set_children(chunk, children)
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
    model = [MockDDP(), MockDDP(overlap_param_gather=False), MockDDP()]
    if not on:
        for chunk in (model[0], model[2]):
            disable(chunk)
    try:
        with preserved_hooks(model):
            for chunk in (model[0], model[2]):
                disable(chunk)
            if raises:
                raise ZeroDivisionError
            for chunk in (model[0], model[2]):
                enable(chunk)
    except ZeroDivisionError:
        assert raises
    for chunk in (model[0], model[2]):
        assert set(hooked(chunk)) == {on}
    assert not any(hooked(model[1]))
