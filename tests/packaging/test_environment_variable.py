"""The variable in a fresh environment: what it loads, when, and what happens when things are broken."""

from __future__ import annotations

import pytest

AFTER_THE_HOST = "import probe; patched = probe.patched(); probe.report(patched=patched, **probe.state())"
WITHOUT_A_HOST = "import json, logging, probe; probe.report(**probe.state())"
NOTHING = {"trigger": False, "wrapt": False, "package": False}


@pytest.mark.parametrize("value", ["1", "all", "reentrant-train"])
def test_set_patches_the_host(installed, value):
    found = installed.program(AFTER_THE_HOST, value=value)
    assert found == {"patched": True, "trigger": True, "wrapt": True, "package": True}


@pytest.mark.parametrize("value", [None, "", "0", "off", "False", " no "])
def test_unset_or_off_leaves_no_trace(installed, value):
    assert installed.program(AFTER_THE_HOST, value=value) == {"patched": False} | NOTHING


def test_set_loads_nothing_before_a_host_is_imported(installed):
    assert installed.program(WITHOUT_A_HOST) == NOTHING | {"trigger": True}


def test_excluded_patch_is_not_applied(installed):
    assert installed.program(AFTER_THE_HOST, value="all,-reentrant-train")["patched"] is False


def test_only_one_trigger_though_startup_files_run_twice_in_a_virtual_environment(installed):
    code = (
        "import probe, sys; import _megatron_rl_patches_startup as startup; startup.main();"
        "probe.report(triggers=sum(isinstance(finder, startup._Trigger) for finder in sys.meta_path))"
    )
    assert installed.program(code) == {"triggers": 1}


def test_roots_of_configured_train_functions_fire_too(installed):
    code = "import probe, own_host; probe.report(**probe.state())"
    (installed.path / "own_host.py").touch()
    variables = {"MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS": "other.module:train, own_host.model:Trainer.train"}
    assert installed.program(code, **variables)["package"] is True
    assert installed.program(code)["package"] is False


def test_unknown_name_costs_one_line(installed):
    done = installed.run("-c", AFTER_THE_HOST, variables={"MEGATRON_RL_PATCHES": "reentrant-trian"})
    assert done.returncode == 0, done
    (line,) = done.stderr.splitlines()
    assert "reentrant-trian" in line and "reentrant-train" in line


def test_unknown_name_is_an_error_when_strict_and_again_at_a_second_import(installed):
    code = """
import probe
for attempt in range(2):
    try:
        probe.patched()
    except RuntimeError as error:
        assert not isinstance(error, ImportError)
        print(error)
"""
    variables = {"MEGATRON_RL_PATCHES": "reentrant-trian", "MEGATRON_RL_PATCHES_STRICT": "1"}
    done = installed.run("-c", code, variables=variables)
    assert done.returncode == 0, done
    first, second = done.stdout.splitlines()
    assert first == second and "reentrant-trian" in first


def _break(environment, what):
    package = environment.site_packages / "megatron_rl_patches"
    if what == "syntax error in the package":
        (package / "__init__.py").write_text("def\n")
    elif what == "exception in the package":
        (package / "activation.py").write_text("def activate_from_environment():\n    1 / 0\n")
    else:
        assert what == "wrapt is missing"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("wrapt is missing", "ModuleNotFoundError: No module named 'wrapt'"),
        ("syntax error in the package", "SyntaxError"),
        ("exception in the package", "ZeroDivisionError: division by zero"),
    ],
)
def test_broken_install_costs_one_line(disposable, what, reason):
    _break(disposable, what)
    done = disposable.run("-c", AFTER_THE_HOST, variables={"MEGATRON_RL_PATCHES": "1"})
    assert done.returncode == 0 and '"patched": false' in done.stdout, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron_rl_patches: not activated") and reason in line

    idle = disposable.run("-c", "pass", variables={"MEGATRON_RL_PATCHES": "1"})
    assert (idle.returncode, idle.stderr) == (0, "")

    strict = {"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_STRICT": "1"}
    assert disposable.run("-c", "pass", variables=strict).returncode == 0
    # A host whose import is optional would swallow an ImportError, and the mistake with it.
    optional = "try:\n    import megatron.core\nexcept ImportError:\n    pass"
    done = disposable.run("-c", optional, variables=strict)
    assert done.returncode == 1 and reason in done.stderr


def test_package_gone_but_its_startup_file_left_does_not_stop_the_interpreter(disposable):
    (disposable.site_packages / "_megatron_rl_patches_startup.py").unlink()
    done = disposable.run("-c", "print('on')", variables={"MEGATRON_RL_PATCHES": "1"})
    assert (done.returncode, done.stdout) == (0, "on\n")
