"""The import trigger on its own: a framework of the test, and an activation that the test chooses."""

import importlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import wrapt
from pytest import MonkeyPatch

import _megatron_rl_patches_startup as startup
from megatron_rl_patches.engine.settings import parse_selection
from tests.worlds.files import write
from tests.worlds.program import run_program

_numbers = itertools.count()


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported, configured as a root; no trigger is armed before or afterwards."""
    name = f"trigger_framework_{next(_numbers)}"
    monkeypatch.syspath_prepend(write(tmp_path, {f"{name}/__init__.py": "", f"{name}/model.py": ""}))
    finder = startup.Finder()
    monkeypatch.setattr(startup, "finder", finder)
    monkeypatch.setenv("MEGATRON_RL_PATCHES", "1")
    monkeypatch.setenv("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", f"somewhere.else:train, {name}.model:train")
    monkeypatch.delenv("MEGATRON_RL_PATCHES_STRICT", raising=False)
    yield name
    sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]
    for module in [module for module in sys.modules if module.partition(".")[0] in (name, "somewhere")]:
        del sys.modules[module]


@pytest.fixture
def arm(monkeypatch: MonkeyPatch) -> Callable[..., Mock]:
    """Arms the trigger with another activation, which it returns; an exception is one that fails."""

    def arm(activation: object = lambda: None) -> Mock:
        module: Any = ModuleType("megatron_rl_patches.engine.api")
        module.activate_from_environment = Mock(side_effect=activation)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        startup.main()
        return module.activate_from_environment

    return arm


def armed() -> list[object]:
    return [finder for finder in sys.meta_path if finder is startup.finder]


@pytest.mark.parametrize("value", ["", "0", "false", "OFF", "no", "None", " 0 "])
def test_words_that_mean_off_are_those_of_the_settings(framework, monkeypatch, value):
    monkeypatch.setenv("MEGATRON_RL_PATCHES", value)
    startup.main()
    assert not armed()
    assert parse_selection(value) == ([], [])


def test_fires_at_the_first_import_of_a_root_and_never_again(framework, arm):
    calls = arm()
    startup.main()
    assert armed() == sys.meta_path[:1]
    assert importlib.util.find_spec(framework).origin
    assert importlib.util.find_spec("no_framework_at_all") is None
    # Names that are no framework, and frameworks that are not there, do not fire.
    for name, missing in ((f"{framework}_extra", f"{framework}_extra"), ("somewhere.else", "somewhere")):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
            importlib.import_module(name)
    assert not calls.called
    importlib.import_module(framework)
    importlib.import_module(f"{framework}.model")
    assert calls.call_count == 1
    startup.main()
    del sys.modules[framework]
    importlib.import_module(framework)
    assert calls.call_count == 1


@pytest.mark.parametrize("is_namespace", [True, False])
def test_fires_for_a_submodule_of_a_namespace_or_of_an_imported_root(framework, arm, tmp_path, is_namespace):
    """`megatron` is a namespace: several distributions share it."""
    if is_namespace:
        (tmp_path / framework / "__init__.py").unlink()
    else:
        importlib.import_module(framework)
    calls = arm()
    importlib.import_module(framework)
    assert not calls.called
    importlib.import_module(f"{framework}.model")
    assert calls.call_count == 1


def test_leaves_no_mark_on_the_module(framework, arm):
    importlib.import_module(framework)
    before = vars(sys.modules.pop(framework))
    arm()
    after = vars(importlib.import_module(framework))
    assert set(before) == set(after)
    assert type(before["__loader__"]) is type(after["__loader__"]) is type(after["__spec__"].loader)
    assert before["__spec__"].origin == after["__spec__"].origin
    assert after["__loader__"] is after["__spec__"].loader


def test_spec_of_a_mere_look_up_can_be_read_and_loaded(framework, arm):
    calls = arm()
    spec = importlib.util.find_spec(framework)
    assert spec.loader.get_source(framework) == "" and not calls.called
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[framework] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert calls.call_count == 1 and module.__doc__ is None


@pytest.mark.parametrize("wrapt_before", [True, False])
def test_root_that_activation_imports_is_executed_once(framework, arm, tmp_path, monkeypatch, wrapt_before):
    """As the entry point of a framework that ships its own patch does."""
    model = f"import {framework}\nclass Model({framework}.Base): ...\n"
    write(tmp_path / framework, {"__init__.py": "class Base: ...\n", "model.py": model})
    if wrapt_before:  # another package's hooks, whose finder wraps our loader
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        wrapt.register_post_import_hook(lambda module: None, framework)
    calls = arm(lambda: importlib.import_module(f"{framework}.model"))
    root = importlib.import_module(framework)
    assert issubclass(importlib.import_module(f"{framework}.model").Model, root.Base)
    assert calls.call_count == 1


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_failure_costs_one_line_and_disarms(framework, arm, capsys, kind):
    calls = arm(kind("two\nlines"))
    importlib.import_module(framework)
    importlib.import_module(f"{framework}.model")
    assert calls.call_count == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not activated" in line and f"{kind.__name__}: two lines" in line


def test_failure_without_anybody_to_tell(framework, arm, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    arm(ZeroDivisionError())
    importlib.import_module(framework)


@pytest.mark.parametrize(
    "error", [RuntimeError("drifted"), ModuleNotFoundError("No module named 'wrapt'"), SystemExit(0)]
)
def test_strict_failure_is_raised_at_every_import(framework, arm, monkeypatch, capsys, error):
    """It cannot be mistaken for a missing framework, or for an end of the program."""
    monkeypatch.setenv("MEGATRON_RL_PATCHES_STRICT", "1")
    calls = arm(error)
    is_raised = type(error) is RuntimeError
    message = f"could not be activated: {type(error).__name__}: {error}$"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=str(error) if is_raised else message) as caught:
            importlib.import_module(framework)
        assert (caught.value if is_raised else caught.value.__cause__) is error
    assert calls.call_count == 2 and framework not in sys.modules
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("patience", [60.0, 0.05])
def test_second_thread_waits_for_activation_but_not_for_ever(framework, arm, monkeypatch, tmp_path, patience):
    """It may hold the import lock of something that the activation imports."""
    monkeypatch.setattr(startup, "_PATIENCE_SECONDS", patience)
    (tmp_path / "somewhere.py").write_text("")
    inside, finish = threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert finish.wait(30)

    calls = arm(slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(importlib.import_module, framework)
        assert inside.wait(30)
        second = threads.submit(importlib.import_module, "somewhere")
        if patience < 1:
            assert second.result(30) and not first.done()
        else:
            with pytest.raises(TimeoutError):
                second.result(0.2)
        finish.set()
        assert first.result(30) and second.result(30)
    assert calls.call_count == 1


def test_activation_needs_a_module_that_another_thread_is_importing(framework, arm, tmp_path, monkeypatch):
    """The other one needs the global import lock to go on: the activation must not hold it."""
    half_way, go_on = threading.Event(), threading.Event()
    needed = f"import sys\nsys.half_way.set()\nsys.go_on.wait(30)\nimport {framework}_other\n"
    write(tmp_path, {f"{framework}_needed.py": needed, f"{framework}_other.py": ""})
    monkeypatch.setattr(sys, "half_way", half_way, raising=False)
    monkeypatch.setattr(sys, "go_on", go_on, raising=False)

    def activation() -> None:
        threading.Timer(0.1, go_on.set).start()
        importlib.import_module(f"{framework}_needed")

    calls = arm(activation)
    threads = [
        threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
        for name in (f"{framework}_needed", framework)
    ]
    threads[0].start()
    assert half_way.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and calls.call_count == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("outcome", ["ends", "never ends", "never ends, strict"])
def test_fork_while_another_thread_activates(tmp_path, outcome):
    """The child has the patches; it never waits for a thread that it does not have."""
    script = f"""
import os, sys, threading, types
import _megatron_rl_patches_startup as startup
startup._PATIENCE_SECONDS, startup._FORK_PATIENCE_SECONDS = 1000, 20 if {outcome == "ends"} else 0.1
inside, release, activated = threading.Event(), threading.Event(), []

def activate_from_environment():
    inside.set()
    release.wait(60)
    activated.append(1)

activation = types.ModuleType("megatron_rl_patches.engine.api")
activation.activate_from_environment = activate_from_environment
sys.modules["megatron_rl_patches.engine.api"] = activation
startup.main()
threading.Thread(target=lambda: __import__("framework_a"), daemon=True).start()
inside.wait()
if {outcome == "ends"}:
    threading.Timer(0.2, release.set).start()
if pid := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
try:
    import framework_b
    error = None
except RuntimeError as raised:
    error = raised
print(len(activated), error, flush=True)
os._exit(0)
"""
    variables = {
        "MEGATRON_RL_PATCHES": "1",
        "MEGATRON_RL_PATCHES_ROOTS": "framework_a,framework_b",
        "MEGATRON_RL_PATCHES_STRICT": str(int("strict" in outcome)),
    }
    files = {"framework_a.py": "", "framework_b.py": "", "program.py": script}
    done = run_program(tmp_path, files, **variables)
    refusal = "this process was forked while another thread activated the patches"
    if outcome == "ends":
        assert (done.stdout, done.stderr) == ("1 None\n", "")
    elif "strict" in outcome:
        assert done.stdout.startswith(f"0 {refusal}")
    else:
        assert done.stdout == "0 None\n" and refusal in done.stderr and len(done.stderr.splitlines()) == 1
