"""Megatron-Bridge's own ``_update_model_config_funcs`` and pre-wrap hooks, of the package of the registry.

Its module is the real one. Packages that it imports and that this function does not use are stubs.
"""

import importlib
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_rl_patches import revert
from tests.frameworks import import_stubs
from tests.frameworks.packages import BRIDGE, Packages
from tests.frameworks.rollouts import FINE, NO_SYNC, outcome, states_of
from tests.ranks import on_ranks
from tests.recording import installed, ran_on

pytestmark = pytest.mark.slow


@pytest.fixture
def bridge(packages: Packages, request: pytest.FixtureRequest) -> str:
    """The folder to import it from."""
    ran_on(request, BRIDGE, installed("megatron-core"))
    return str(packages.unpacked(BRIDGE))


@pytest.mark.runs("two setups", ranks=1)
@on_ranks(1, timeout=300)
def test_a_second_setup(bridge: str) -> None:
    sys.path[:0] = [bridge]
    # Before there are stubs, lest megatron-core should take TransformerEngine for installed.
    from tests.references import tiny_gpt

    first, second = (tiny_gpt.TinyModel().build() for _ in range(2))
    import_stubs.install(f"{import_stubs.PACKAGES} {import_stubs.OF_BRIDGE} transformer_engine")
    for reached in ("transformer_engine.pytorch.ops", "tensorboard.compat.tf.io.gfile"):
        importlib.import_module(reached)  # it takes these for attributes
    setup = importlib.import_module("megatron.bridge.training.setup")
    assert setup.__file__.startswith(bridge)

    def finish_setup(model: list[Any], optimizer: Any) -> str:
        return outcome(setup._update_model_config_funcs, model, config, model[0].ddp_config, optimizer)

    config = tiny_gpt.get_model_config(first[0][0])
    assert finish_setup(*first) == FINE
    assert finish_setup(*second).startswith(NO_SYNC)
    mixin = importlib.import_module("megatron.bridge.models.model_provider").ModelProviderMixin
    gpt = type("Provider", (mixin,), {"provide": lambda *unused, **options: None})()
    gpt.register_pre_wrap_hook(importlib.import_module("megatron_rl_patches.hooks").pre_wrap)
    chunks = [chunk.module for chunk in first[0]]
    assert gpt.pre_wrap_hook(chunks) is chunks
    states = states_of("megatron.bridge")
    assert [s for t, s in states.items() if t.endswith("_update_model_config_funcs")] == ["applied"]
    assert [finish_setup(*built) for built in (first, second)] == [FINE, FINE]
    chunk = second[0][0]
    assert (config.no_sync_func, config.grad_sync_func) == (chunk.no_sync, chunk.start_grad_sync)
    config.no_sync_func = nullcontext
    assert finish_setup(*second).startswith(NO_SYNC)
    revert()
