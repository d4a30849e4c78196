"""The variable in a fresh environment: what it loads and when, and what a broken install costs."""

from __future__ import annotations

from .conftest import check_all

AFTER_THE_FRAMEWORK = (
    "import probe; patched = probe.patched(); probe.report(patched=patched, **probe.state())"
)
WITHOUT_A_FRAMEWORK = "import json, logging, probe; probe.report(**probe.state())"
COUNTS_TRIGGERS = (
    "import probe, sys; import _megatron_rl_patches_startup as startup; startup.main();"
    "probe.report(triggers=sum(finder is startup.finder for finder in sys.meta_path))"
)
ON = ("1", "all", "reentrant-train")
OFF = (None, "", "0", "off", "False", " no ")


def test_what_the_variable_does(installed):
    def state_is(expected, code=AFTER_THE_FRAMEWORK, value="1", **variables):
        def fact():
            state = installed.program(code, value=value, **variables)
            assert {name: state[name] for name in expected} == expected

        return fact

    (installed.path / "own_framework.py").touch()
    own_framework = "import probe, own_framework; probe.report(**probe.state())"
    functions = "other.module:train, own_framework.model:Trainer.train"
    everything = {"patched": True, "trigger": True, "wrapt": True, "package": True}
    nothing = {"trigger": False, "wrapt": False, "package": False}
    check_all(
        {
            **{f"patches: {value}": state_is(everything, value=value) for value in ON},
            **{f"no trace: {value}": state_is(nothing | {"patched": False}, value=value) for value in OFF},
            "loads nothing before a framework is imported": state_is(
                nothing | {"trigger": True}, WITHOUT_A_FRAMEWORK
            ),
            "an excluded patch": state_is({"patched": False}, value="all,-reentrant-train"),
            "one trigger, though startup files run twice in a virtual environment": state_is(
                {"triggers": 1}, COUNTS_TRIGGERS
            ),
            "fires for a configured train function": state_is(
                {"package": True}, own_framework, MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS=functions
            ),
            "does not fire for another module": state_is({"package": False}, own_framework),
            "an unknown name": lambda: _unknown_name_costs_one_line(installed),
            "an unknown name, strict": lambda: _unknown_name_is_an_error_at_every_import(installed),
        }
    )


def _unknown_name_costs_one_line(installed):
    done = installed.run("-c", AFTER_THE_FRAMEWORK, variables={"MEGATRON_RL_PATCHES": "reentrant-trian"})
    assert done.returncode == 0, done
    (line,) = done.stderr.splitlines()
    assert "reentrant-trian" in line and "reentrant-train" in line


def _unknown_name_is_an_error_at_every_import(installed):
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
