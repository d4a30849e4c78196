"""Megatron-Bridge's own ``_update_model_config_funcs``, of the package of the registry, once for each setup.

Its module is the real one. Packages that it imports and that this function does not use are stubs.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks import import_stubs
from tests.frameworks.packages import Packages
from tests.frameworks.test_reentry import FINE, NO_SYNC, outcome
from tests.recording import installed, ran_on

pytestmark = pytest.mark.slow

RELEASE = "megatron-bridge 0.3.1"
PACKAGES = (
    *import_stubs.PACKAGES,
    "datasets",
    "einops",
    "google",
    "modelopt",
    "tensorboard",
    "transformer_engine",
)


def _two_setups(paths: list[str]) -> dict[str, Any]:
    sys.path[:0] = paths
    with cpu_backend():
        # Before there are stubs, lest megatron-core should take TransformerEngine for installed.
        from tests.real import tiny_gpt

        import_stubs.install(
            PACKAGES, modules=["transformer_engine.pytorch.ops", "tensorboard.compat.tf.io.gfile"]
        )
        setup = importlib.import_module("megatron.bridge.training.setup")

        def finish_setup(model: list[Any], optimizer: Any, config: Any) -> str:
            return outcome(setup._update_model_config_funcs, model, config, model[0].ddp_config, optimizer)

        seen: dict[str, Any] = {"file": setup.__file__}
        first, second = (tiny_gpt.build(tiny_gpt.Options()) for _ in range(2))
        config = tiny_gpt.get_model_config(first[0][0])
        seen["unpatched"] = [finish_setup(*first, config), finish_setup(*second, config)]
        apply("reentrant-train")
        [seen["state"]] = [s.state for s in status() if s.target.endswith("_update_model_config_funcs")]
        seen["patched"] = [finish_setup(*built, config) for built in (first, second)]
        chunk = second[0][0]
        seen["installed"] = (config.no_sync_func, config.grad_sync_func) == (
            chunk.no_sync,
            chunk.start_grad_sync,
        )
        config.no_sync_func = nullcontext
        seen["foreign"] = finish_setup(*second, config)
        revert()
        return seen


@pytest.mark.runs("two setups", ranks=1)
def test_a_second_setup(packages: Packages, request: pytest.FixtureRequest) -> None:
    ran_on(request, RELEASE, installed("megatron-core"))
    folder = str(packages.unpacked(RELEASE))
    [seen] = spawn_ranks(_two_setups, 1, [folder], timeout=300)
    assert seen["file"].startswith(folder)
    assert seen["unpatched"][0] == FINE
    assert seen["unpatched"][1].startswith(NO_SYNC)
    assert seen["state"] == "applied"
    assert seen["patched"] == [FINE, FINE]
    assert seen["installed"]
    assert seen["foreign"].startswith(NO_SYNC)
