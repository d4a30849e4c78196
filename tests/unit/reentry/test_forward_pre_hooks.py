"""Forward pre-hooks, switched in any order, and functions in configs, ours or foreign, on mocked DDP."""

import functools
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from megatron_rl_patches.common.chunks import SYNC_FUNCTIONS
from megatron_rl_patches.reentry import forward_pre_hooks, preserved_hooks
from megatron_rl_patches.reentry.sync_functions import clear_installed, install_per_config
from megatron_rl_patches.testing import MockConfig, MockDDP, MockModule, MockOptimizer


def enable(chunk: MockDDP) -> None:
    forward_pre_hooks.enable(chunk.enable_forward_pre_hook, chunk)


def disable(chunk: MockDDP, **kwargs: bool) -> None:
    forward_pre_hooks.disable(chunk.disable_forward_pre_hook, chunk, **kwargs)


def gathers(module: Any) -> bool:
    return any(hook.__name__ == "_pre_hook" for hook in module._forward_pre_hooks.values())


def hooked(chunk: MockDDP) -> list[bool]:
    return [gathers(module) for module in chunk.module.modules()]


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


SWITCHES: dict[str, Callable[[MockDDP], None]] = {
    "enable": enable,
    "disable": disable,
    "disable without sync": functools.partial(disable, param_sync=False),
}


@given(st.lists(st.sampled_from([*SWITCHES, "step", "forward"]), max_size=12))
def test_any_order_keeps_parameters_and_hooks_in_order(actions: list[str]) -> None:
    chunk = MockDDP()
    on = True
    for action in actions:
        if action in SWITCHES:
            SWITCHES[action](chunk)
            on = action == "enable"
            assert action != "disable" or is_complete(chunk)
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
    assert not any(hooked(chunk)) and not gathers(gone)
    assert chunk.remove_forward_pre_hook_handles == {}


def test_errors_of_megatron_itself_are_not_swallowed(mocker: MockerFixture) -> None:
    for action in (enable, disable):
        with pytest.raises(AssertionError):
            action(MockDDP(overlap_param_gather=False))
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


@pytest.mark.parametrize("is_former", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_former_call_installed_makes_room(count: int, is_former: bool) -> None:
    """No framework asserts on functions other than ``no_sync``, so they stay with their own model."""
    config = MockConfig()
    model = [MockDDP(config=config) for _ in range(count)]
    owners = [MockDDP() for _ in range(count)] if is_former else model
    for attribute, method in SYNC_FUNCTIONS.items():
        functions = [getattr(chunk, method) for chunk in owners]
        setattr(config, attribute, functions if count > 1 else functions[0])
    installed = {**vars(config)}
    clear_installed(model)
    assert vars(config) == installed | dict.fromkeys(SYNC_FUNCTIONS if is_former else ["no_sync_func"])


def test_a_foreign_function_stays() -> None:
    chunk, of_no_wrapper = MockDDP(), MethodType(MockDDP.no_sync, object())
    partial = functools.partial(chunk.no_sync)
    for function in (abs, partial, chunk.start_grad_sync, [chunk.no_sync, abs], of_no_wrapper):
        chunk.config.no_sync_func = function
        clear_installed([chunk])
        assert chunk.config.no_sync_func is function


def _install(model: list[MockDDP]) -> None:
    """In the shape of verl's installer: one round per chunk, an assertion in each."""
    for chunk in model:
        assert chunk.config.no_sync_func is None, "When overlap_grad_reduce is True"
        for attribute in ("no_sync_func", "grad_sync_func"):
            functions = [getattr(each, SYNC_FUNCTIONS[attribute]) for each in model]
            setattr(chunk.config, attribute, functions if len(model) > 1 else functions[0])


def test_all_functions_are_installed_in_a_config_that_chunks_share() -> None:
    """Real verl shows it, too; a foreign function and nothing to install stay."""
    config = MockConfig()
    model = [MockDDP(config=config) for _ in range(3)]
    with pytest.raises(AssertionError):
        _install(model)
    for _ in range(2):
        install_per_config(_install, model)
        assert config.no_sync_func == [chunk.no_sync for chunk in model]
        assert config.grad_sync_func == [chunk.start_grad_sync for chunk in model]
        assert config.param_sync_func is None
    install_per_config(_install, model[:1])
    assert config.no_sync_func == model[0].no_sync  # of one chunk, as upstream does it
    install_per_config(lambda chunks: None, model)
    assert config == MockConfig()
    config.no_sync_func = abs
    with pytest.raises(AssertionError, match="overlap_grad_reduce"):
        install_per_config(_install, model)
