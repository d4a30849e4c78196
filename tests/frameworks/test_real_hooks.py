"""``megatron_rl_patches.hooks`` called by unmodified frameworks, with no variable set.

slime, vime, miles call it from their ``init(args)`` (checkouts, see ``docs/frameworks.md``). verl, a package,
imports it as a plugin. ``test_real_bridge.py`` and ``test_real_verl.py`` have the hooks of these two.
"""

import importlib
import os
import subprocess
import sys
import sysconfig
from unittest import mock

import pytest

from megatron_rl_patches import status
from tests.frameworks.import_stubs import job_of
from tests.frameworks.packages import VERL, Packages
from tests.frameworks.rollouts import FINE, outcome
from tests.ranks import on_ranks
from tests.worlds.program import ROOT, without_ours

pytestmark = pytest.mark.slow

HOOK = "megatron_rl_patches.hooks.on_megatron_init"


@pytest.mark.frameworks
@pytest.mark.runs("its own hook", ranks=1)
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
@on_ranks(1, timeout=300)
def test_custom_megatron_init_path(framework: str, paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    from megatron.core import parallel_state
    from megatron.training import global_vars

    from tests.frameworks.real_jobs import TinyModel, parse_arguments

    importlib.import_module(*job_type.homes)  # as actors have before init
    initialize = importlib.import_module(f"{framework}.backends.megatron_utils.initialize")
    flags = {"custom_megatron_init_path": HOOK, "disable_gloo_process_groups": False}
    args = parse_arguments(framework, TinyModel(), 2, **flags)
    global_vars.unset_global_variables()  # init sets them
    # What asks for a tokenizer, for a package that is a stub here, or for an older numpy.
    for name in ("_build_tokenizer", "init_num_microbatches_calculator", "register_hf_config_aliases"):
        if hasattr(initialize, name):
            setattr(initialize, name, lambda *unused: None)
    with mock.patch("numpy.__version__", "1.26"):
        initialize.init(args)
    states = {site.state for site in status()} - {"waiting", "absent"}
    assert "applied" in states <= {"applied", "not needed"}
    parallel_state.destroy_model_parallel()
    global_vars.unset_global_variables()
    job = job_type()
    assert [outcome(job.train), outcome(job.train), outcome(job.save)] == [FINE] * 3


_IMPORT_VERL = """
import sys
from tests.frameworks import import_stubs
import_stubs.install()
import verl
print("loaded:", "megatron_rl_patches.engine.installer" in sys.modules)
"""


@pytest.mark.parametrize(
    ("names", "strict", "code", "printed"),
    [
        ("1", "", 0, "loaded: True"),
        ("no-such-patch", "1", 1, "not activated: MEGATRON_RL_PATCHES: unknown patch 'no-such-patch'"),
    ],
)
def test_the_plugin(packages: Packages, names: str, strict: str, code: int, printed: str) -> None:
    """It arms what the variable names, in a process without startup files (``pip install --target``)."""
    folders = [str(packages.unpacked(VERL)), str(ROOT), sysconfig.get_path("purelib")]
    ours = {"MEGATRON_RL_PATCHES": names, "MEGATRON_RL_PATCHES_STRICT": strict}
    ours = {name: value for name, value in ours.items() if value}
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", _IMPORT_VERL],
        env={**without_ours(), **ours, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert printed in done.stdout + done.stderr
