"""``megatron_rl_patches.hooks`` called by unmodified frameworks, with no variable set.

slime, vime, miles call it from their ``init(args)`` (checkouts, see ``docs/frameworks.md``). verl, a package,
imports it as a plugin. ``test_real_bridge.py`` and ``test_real_verl.py`` have the hooks of these two.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import pytest

from megatron_rl_patches import status
from tests.frameworks.import_stubs import prepare
from tests.frameworks.packages import Packages
from tests.frameworks.rollouts import FINE, NO_SYNC, outcome
from tests.frameworks.test_real_verl import RELEASE as VERL
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOOK = "megatron_rl_patches.hooks.on_megatron_init"


def _states() -> set[str]:
    return {site.state for site in status() if site.state not in ("waiting", "absent")}


# --- slime, vime, miles -------------------------------------------------------------------------------------


@pytest.mark.frameworks
@pytest.mark.runs("switched on by its own hook", ranks=1)
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
@on_ranks(1, timeout=300)
def test_custom_megatron_init_path(framework: str, paths: list[str]) -> None:
    prepare(paths)
    from megatron.core import parallel_state
    from megatron.training import global_vars

    from tests.frameworks.loss_jobs import Arguments
    from tests.frameworks.real_jobs import JOBS

    job = JOBS[framework]()
    assert outcome(job.train) == FINE
    assert outcome(job.train).startswith(NO_SYNC)
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
    assert "applied" in _states() <= {"applied", "not needed"}
    parallel_state.destroy_model_parallel()
    global_vars.unset_global_variables()
    job = JOBS[framework]()
    assert [outcome(job.train), outcome(job.train), outcome(job.save)] == [FINE] * 3


# --- verl ---------------------------------------------------------------------------------------------------


@pytest.fixture
def verl(packages: Packages) -> str:
    return str(packages.unpacked(VERL))


_IMPORT_VERL = """
import sys
from tests.frameworks import import_stubs
import_stubs.install()
import verl
print("loaded:", "megatron_rl_patches.engine.installer" in sys.modules)
"""
WRONG = {"MEGATRON_RL_PATCHES": "no-such-patch"}


@pytest.mark.parametrize(
    ("variables", "code", "printed"),
    [
        ({}, 0, "loaded: False"),
        ({"MEGATRON_RL_PATCHES": "1"}, 0, "loaded: True"),
        (WRONG, 0, "unknown patch 'no-such-patch'"),
        (
            {**WRONG, "MEGATRON_RL_PATCHES_STRICT": "1"},
            1,
            "not activated: MEGATRON_RL_PATCHES: unknown patch 'no-such-patch'",
        ),
    ],
)
def test_the_plugin(verl: str, variables: dict[str, str], code: int, printed: str) -> None:
    """It arms what the variable names, in a process without startup files (``pip install --target``)."""
    folders = [verl, str(ROOT), sysconfig.get_path("purelib")]
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL_PATCHES")
    }
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", _IMPORT_VERL],
        env={**environ, "PYTHONPATH": os.pathsep.join(folders), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert printed in done.stdout + done.stderr
