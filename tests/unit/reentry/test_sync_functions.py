"""Whose function is it? Ours and stale ones make room, a foreign one stays."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_patches.common.chunks import SYNC_FUNCTIONS, config_of
from megatron_rl_patches.reentry.sync_functions import clear_installed, install_per_config
from megatron_rl_patches.testing import MockConfig, MockDDP


class NoDataParallelWrapper:
    def no_sync(self) -> None: ...


@pytest.mark.parametrize("is_former", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_former_call_installed_makes_room(count: int, is_former: bool) -> None:
    """No framework asserts on functions other than ``no_sync``, so they stay with their own model."""
    config = MockConfig()
    model = [MockDDP(config=config) for _ in range(count)]
    owners = [MockDDP() for _ in range(count)] if is_former else model
    installed: dict[str, Any] = {
        attribute: [getattr(chunk, method) for chunk in owners]
        for attribute, method in SYNC_FUNCTIONS.items()
    }
    if count == 1:
        installed = {attribute: functions[0] for attribute, functions in installed.items()}
    vars(config).update(installed)
    clear_installed(model)
    stay = {} if is_former else installed | {"no_sync_func": None}
    assert {attribute: getattr(config, attribute) for attribute in SYNC_FUNCTIONS} == {
        attribute: stay.get(attribute) for attribute in SYNC_FUNCTIONS
    }


@pytest.mark.parametrize(
    "foreign",
    [
        lambda chunk: lambda: None,
        lambda chunk: functools.partial(chunk.no_sync),
        lambda chunk: chunk.start_grad_sync,
        lambda chunk: [chunk.no_sync, lambda: None],
        lambda chunk: NoDataParallelWrapper().no_sync,
    ],
)
def test_a_foreign_function_stays(foreign: Any) -> None:
    chunk = MockDDP()
    chunk.config.no_sync_func = function = foreign(chunk)
    clear_installed([chunk])
    assert chunk.config.no_sync_func is function


def _install(model: list[MockDDP]) -> None:
    """In the shape of verl's installer: one round per chunk, an assertion in each."""
    for chunk in model:
        assert chunk.config.no_sync_func is None, "When overlap_grad_reduce is True"
        for attribute in ("no_sync_func", "grad_sync_func"):
            functions = [getattr(each, SYNC_FUNCTIONS[attribute]) for each in model]
            setattr(chunk.config, attribute, functions if len(model) > 1 else functions[0])


@pytest.mark.parametrize("shared", [True, False])
def test_all_functions_are_installed_in_each_config(shared: bool) -> None:
    config = MockConfig()
    model = [MockDDP(config=config if shared else None) for _ in range(3)]
    if shared:
        with pytest.raises(AssertionError):
            _install(model)
    for _ in range(2 if shared else 1):
        install_per_config(_install, model)
        for chunk in model:
            assert chunk.config.no_sync_func == [c.no_sync for c in model]
            assert chunk.config.grad_sync_func == [c.start_grad_sync for c in model]
            assert chunk.config.param_sync_func is None
    [alone] = model[:1]
    install_per_config(_install, [alone])
    assert alone.config.no_sync_func == alone.no_sync  # of one chunk, as upstream does it


def test_a_foreign_function_and_nothing_to_install_stay() -> None:
    config = MockConfig()
    model = [MockDDP(config=config) for _ in range(2)]
    install_per_config(lambda chunks: None, model)
    assert config == MockConfig()
    config.no_sync_func = lambda: None
    with pytest.raises(AssertionError, match="overlap_grad_reduce"):
        install_per_config(_install, model)


def test_the_config_is_that_of_the_wrapped_model() -> None:
    config = object()
    wrapped = SimpleNamespace(module=SimpleNamespace(config=config))
    assert config_of(SimpleNamespace(config=None, module=wrapped)) is config
    assert config_of(SimpleNamespace()) is None
