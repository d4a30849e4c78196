"""Whose function is it? Ours and stale ones make room, a foreign one stays."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron_rl_patches.common.chunks import SYNC_FUNCTIONS
from megatron_rl_patches.reentry.sync_functions import clear_installed, install_per_config
from megatron_rl_patches.testing import MockConfig, MockDDP


class NoDataParallelWrapper:
    def no_sync(self) -> None: ...


def test_no_sync_of_this_model_makes_room() -> None:
    for count in (1, 2):
        config = MockConfig()
        model = [MockDDP(config=config) for _ in range(count)]
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions if count > 1 else functions[0]
        clear_installed(model)
        assert config.no_sync_func is None


def test_functions_of_a_former_model_make_room() -> None:
    former, chunk = MockDDP(), MockDDP()
    for attribute, method in SYNC_FUNCTIONS.items():
        setattr(chunk.config, attribute, [getattr(former, method)])
    clear_installed([chunk])
    assert [getattr(chunk.config, attribute) for attribute in SYNC_FUNCTIONS] == [None] * 3


def test_what_no_framework_asserts_on_stays_with_its_own_model() -> None:
    chunk = MockDDP()
    chunk.config.grad_sync_func = chunk.start_grad_sync
    chunk.config.param_sync_func = chunk.start_param_sync
    clear_installed([chunk])
    assert chunk.config.grad_sync_func == chunk.start_grad_sync
    assert chunk.config.param_sync_func == chunk.start_param_sync


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
        chunk.config.no_sync_func = [c.no_sync for c in model]
        chunk.config.grad_sync_func = [c.start_grad_sync for c in model]
        if len(model) == 1:
            chunk.config.no_sync_func = chunk.config.no_sync_func[0]
            chunk.config.grad_sync_func = chunk.config.grad_sync_func[0]


def test_a_foreign_function_trips_the_installers_assertion() -> None:
    config = MockConfig(no_sync_func=lambda: None)
    with pytest.raises(AssertionError, match="overlap_grad_reduce"):
        install_per_config(_install, [MockDDP(config=config) for _ in range(2)])


def test_nothing_is_installed_without_overlap() -> None:
    config = MockConfig()
    install_per_config(lambda chunks: None, [MockDDP(config=config) for _ in range(2)])
    assert config == MockConfig()


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


def test_one_chunk_is_installed_as_upstream_does() -> None:
    chunk = MockDDP()
    install_per_config(_install, [chunk])
    assert chunk.config.no_sync_func == chunk.no_sync
