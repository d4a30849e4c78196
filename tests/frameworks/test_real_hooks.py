"""``megatron_rl_patches.hooks`` called by unmodified frameworks, with no variable set.

slime, vime, miles call it from their ``init(args)`` (checkouts, see ``docs/frameworks.md``), Megatron-Bridge
(a package) among its pre-wrap hooks, and verl (a package) imports it as ``external_lib`` or as a plugin.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks import import_stubs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.test_real_bridge import PACKAGES as BRIDGE_IMPORTS
from tests.frameworks.test_real_bridge import RELEASE as BRIDGE
from tests.frameworks.test_real_reentry import prepare
from tests.frameworks.test_real_verl import RELEASE as VERL
from tests.frameworks.test_reentry import FINE, NO_SYNC, outcome

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOOK = "megatron_rl_patches.hooks.on_megatron_init"


def _states() -> set[str]:
    return {site.state for site in status() if site.state != "waiting"}


# --- slime, vime, miles -------------------------------------------------------------------------------------


def _init(framework: str, paths: list[str]) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from megatron.core import parallel_state
        from megatron.training import global_vars

        from tests.frameworks.loss_jobs import Arguments
        from tests.frameworks.real_jobs import JOBS

        job = JOBS[framework]()
        seen: dict[str, Any] = {"unpatched": [outcome(job.train), outcome(job.train)]}
        parallel_state.destroy_model_parallel()
        global_vars.unset_global_variables()

        initialize = importlib.import_module(f"{framework}.backends.megatron_utils.initialize")
        args = Arguments(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            num_distributed_optimizer_instances=1,
            distributed_timeout_minutes=1,
            enable_gloo_process_groups=True,
            rank=0,
            seed=1,
            global_batch_size=2,
            micro_batch_size=1,
            data_parallel_size=1,
            custom_megatron_init_path=HOOK,
        )
        # What asks for a tokenizer, for a package that is a stub here, or for an older numpy.
        for name in ("_build_tokenizer", "init_num_microbatches_calculator", "register_hf_config_aliases"):
            if hasattr(initialize, name):
                setattr(initialize, name, lambda *unused: None)
        with mock.patch("numpy.__version__", "1.26"):
            initialize.init(args)
        seen["states"] = _states()
        parallel_state.destroy_model_parallel()
        global_vars.unset_global_variables()
        job = JOBS[framework]()
        seen["patched"] = [outcome(job.train), outcome(job.train), outcome(job.save)]
        return seen


@pytest.mark.frameworks
@pytest.mark.runs("switched on by its own hook", ranks=1)
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_custom_megatron_init_path(framework: str, checkouts: Checkouts) -> None:
    [seen] = spawn_ranks(_init, 1, framework, checkouts(framework), timeout=300)
    assert seen["unpatched"][0] == FINE
    assert seen["unpatched"][1].startswith(NO_SYNC)
    assert "applied" in seen["states"] <= {"applied", "not needed"}
    assert seen["patched"] == [FINE] * 3


# --- Megatron-Bridge ----------------------------------------------------------------------------------------


def _pre_wrap(folder: str) -> dict[str, Any]:
    sys.path[:0] = [folder]
    with cpu_backend():
        from tests.real import tiny_gpt

        import_stubs.install(
            BRIDGE_IMPORTS, modules=["transformer_engine.pytorch.ops", "tensorboard.compat.tf.io.gfile"]
        )
        setup = importlib.import_module("megatron.bridge.training.setup")
        provider = importlib.import_module("megatron.bridge.models.model_provider")
        hooks = importlib.import_module("megatron_rl_patches.hooks")

        first, second = (tiny_gpt.build(tiny_gpt.Options()) for _ in range(2))
        config = tiny_gpt.get_model_config(first[0][0])

        class Provider(provider.ModelProviderMixin):  # type: ignore[misc, name-defined]
            def provide(self, *unused: Any, **options: Any) -> Any: ...

        gpt = Provider()
        gpt.register_pre_wrap_hook(hooks.pre_wrap)
        chunks = [chunk.module for chunk in first[0]]
        seen: dict[str, Any] = {"returned": gpt.pre_wrap_hook(chunks) is chunks, "states": _states()}

        def finish_setup(model: list[Any], optimizer: Any) -> str:
            return outcome(setup._update_model_config_funcs, model, config, model[0].ddp_config, optimizer)

        seen["setups"] = [finish_setup(*first), finish_setup(*second)]
        return seen


def test_pre_wrap(packages: Packages) -> None:
    [seen] = spawn_ranks(_pre_wrap, 1, str(packages.unpacked(BRIDGE)), timeout=300)
    assert seen["returned"]
    assert "applied" in seen["states"] <= {"applied", "not needed"}
    assert seen["setups"] == [FINE, FINE]  # unpatched the second one raises: test_real_bridge.py


# --- verl ---------------------------------------------------------------------------------------------------


def _external_lib(folder: str) -> dict[str, Any]:
    prepare([folder])
    with cpu_backend():
        from tests.real import tiny_gpt

        megatron_utils = importlib.import_module("verl.utils.megatron_utils")
        import_utils = importlib.import_module("verl.utils.import_utils")
        options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2, vpp=2), overlap_param_gather=False)
        register = megatron_utils.register_megatron_training_hooks
        seen: dict[str, Any] = {"unpatched": outcome(register, *tiny_gpt.build(options))}
        import_utils.import_external_libs("megatron_rl_patches.hooks.verl")
        seen["states"] = _states()
        register = megatron_utils.register_megatron_training_hooks
        seen["patched"] = outcome(register, *tiny_gpt.build(options))
        return seen


def test_external_lib(packages: Packages) -> None:
    for seen in spawn_ranks(_external_lib, 2, str(packages.unpacked(VERL)), timeout=300):
        assert seen["unpatched"].startswith(NO_SYNC)
        assert "applied" in seen["states"] <= {"applied", "not needed"}
        assert seen["patched"] == FINE


_IMPORT_VERL = """
import sys
from tests.frameworks import import_stubs
import_stubs.install()
import verl
print("loaded:", "megatron_rl_patches.engine.installer" in sys.modules)
"""


def _import_verl(packages: Packages, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process that reads no startup file, as after ``pip install --target``."""
    folders = [str(packages.unpacked(VERL)), str(ROOT), sysconfig.get_path("purelib")]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL_PATCHES")
    }
    return subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", _IMPORT_VERL],
        env={**environ, "PYTHONPATH": os.pathsep.join(folders), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("value", "loaded"), [("", False), ("1", True)])
def test_the_plugin_arms_what_the_variable_names(packages: Packages, value: str, loaded: bool) -> None:
    done = _import_verl(packages, MEGATRON_RL_PATCHES=value)
    assert done.returncode == 0, done.stderr
    assert f"loaded: {loaded}" in done.stdout


def test_a_plugin_that_fails_is_heard(packages: Packages) -> None:
    wrong = {"MEGATRON_RL_PATCHES": "no-such-patch"}
    done = _import_verl(packages, **wrong)
    assert done.returncode == 0, done.stderr
    assert "unknown patch 'no-such-patch'" in done.stderr
    done = _import_verl(packages, **wrong, MEGATRON_RL_PATCHES_STRICT="1")
    assert done.returncode == 1
    assert "not activated: " in done.stderr
    assert "unknown patch 'no-such-patch'" in done.stderr
