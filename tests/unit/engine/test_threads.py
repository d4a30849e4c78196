"""Calls of several threads, each of which undoes what it did; forks, and ranks that differ."""

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import PatchError, Settings, applied, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.records import ApplyCall
from megatron_rl_patches.engine.settings import VARIABLE, variable_of
from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.testing import MockDDP
from tests.worlds.program import run_program

from .conftest import PATCHED, PLAIN, Engine, Framework, patch_of


def states() -> dict[str, str]:
    return {site.patch: site.state for site in status()}


class Pause:
    """The lock of the installer, and a finder, where another thread waits until the main one is done."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.lock = threading.RLock()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.module and threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.go_on.wait(30)

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.go_on.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.fixture
def broken(framework: Framework, engine: Engine) -> Iterator[Pause]:
    """A patch that fits by its source, and not when it is put in place; that is found out after the pause."""
    replaced, late = framework(), framework()
    replaced.model.train = lambda model: "replaced"  # which the source does not show
    engine["broken"] = patch_of(replaced, "train", name="broken")
    engine["broken"].wrap(f"{late}.model", "train")(lambda call: None)
    pause: Any = Pause(f"{late}.model")
    installer.installer._lock = pause
    sys.meta_path.insert(0, type("Finder", (), {"find_spec": pause.find_spec}))  # type: ignore[arg-type]
    finder = sys.meta_path[0]
    yield pause
    sys.meta_path.remove(finder)  # in place: wrapt puts its finder into this very list


@pytest.fixture
def good(framework: Framework, engine: Engine) -> Any:
    """The module of a framework with a patch "good" that fits."""
    package = framework()
    engine["good"] = patch_of(package, "train", name="good")
    return package.model


@pytest.mark.parametrize("first_out", ["this", "other", "alone"])
def test_a_failing_call_leaves_others_alone(engine: Engine, broken: Pause, good: Any, first_out: str) -> None:
    names = ("broken",) if first_out == "alone" else ("good", "broken")
    patches = [engine[name] for name in names]
    with ThreadPoolExecutor(1) as other:
        failing = other.submit(installer.installer.add, patches, Settings(), ApplyCall(True, lasts=True))
        assert broken.reached.wait(10)
        if first_out == "other":
            broken.go_on.set()
            assert failing.exception(10)
        apply("good")
        broken.go_on.set()
        with pytest.raises(PatchError, match="conflict"):
            failing.result(10)
    assert good.train("m") == PATCHED
    assert states() == {"good": "applied"}


def test_a_revert_meanwhile_is_not_undone(broken: Pause, good: Any) -> None:
    original = good.train
    apply("good")
    with ThreadPoolExecutor(1) as other:
        failing = other.submit(apply, "broken")
        assert broken.reached.wait(10)
        revert("good")
        broken.go_on.set()
        assert isinstance(failing.exception(10), PatchError)
    assert good.train is original
    assert states() == {"good": "reverted"}


@pytest.mark.parametrize("by_failing", [True, False])
def test_a_site_that_is_gone_again_holds_nobody_back(engine: Engine, good: Any, by_failing: bool) -> None:
    bad = patch_of(good.__name__.partition(".")[0], "train", "no_such", name="good")
    installer.installer.add([engine["good"]], Settings(), ApplyCall(True, lasts=True))
    if by_failing:
        with pytest.raises(PatchError, match="no_such: missing"):
            installer.installer.add([bad], Settings(), ApplyCall(True, lasts=True))
    else:
        apply_call = ApplyCall(False, lasts=False)
        installer.installer.add([bad], Settings(), apply_call)
        assert good.train("m") == PLAIN
        installer.installer.release(apply_call)
    assert good.train("m") == PATCHED


@pytest.fixture
def train(framework: Framework, engine: Engine) -> Callable[[], Any]:
    """A function whose adapter returns an option."""
    package = framework()
    adapter = lambda call: call.options.inference_roles  # noqa: E731
    engine["roles"] = patch_of(package, "train", name="roles", adapter=adapter)
    engine["tagging"] = patch_of(package, "save")
    return lambda: package.model.train("m")


def chosen(role: str) -> Settings:
    return Settings(inference_roles=(role,))


def test_adapters_get_the_options_that_their_patch_was_last_applied_with(train: Callable[[], Any]) -> None:
    apply(settings=chosen("a"))
    # The variable leaves those of a call in force.
    activate_from_environment({VARIABLE: "all", variable_of("inference_roles"): "b"})
    assert train() == ("a",)
    apply(settings=chosen("b"))
    assert train() == ("b",)
    apply()  # says nothing of settings
    apply("tagging", settings=chosen("a"))  # of another patch
    assert train() == ("b",)


def test_the_last_one_out_takes_the_patch_away(train: Callable[[], Any]) -> None:
    apply("roles", settings=chosen("a"))
    first, second = (applied("roles", settings=chosen("b")) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert train() == ("b",)
    second.__exit__(None, None, None)
    assert train() == ("a",)
    with applied("roles", settings=chosen("b")):
        revert("roles")
    assert train() == PLAIN


def test_other_options_in_a_block_are_refused(train: Callable[[], Any]) -> None:
    message = r"roles is in an applied\(\) block .*'a'.*cannot .*'b'.*end of that block"
    with applied("roles", settings=chosen("a")):
        for names in ((), ("roles",), ("tagging", "roles")):
            with pytest.raises(PatchError, match=message):
                apply(*names, settings=chosen("b"))
        with pytest.raises(PatchError, match=message), applied("roles", settings=chosen("b")):
            pass
        assert (train(), states()) == (("a",), {"roles": "applied"})
        apply("roles")  # says nothing of options
        apply("roles", settings=chosen("a"))
        apply("tagging", settings=chosen("b"))  # of another patch
        assert train() == ("a",)
    assert train() == ("a",)


def test_calls_inside_a_block_stay(train: Callable[[], Any]) -> None:
    apply("roles", settings=chosen("a"))
    with applied("roles", settings=chosen("b")):
        with applied("roles"):
            apply("roles")
        assert train() == ("b",)
    assert train() == ("a",)


def test_no_thread_waits_for_the_engine_while_it_holds_the_import_lock(tagged: Framework) -> None:
    """Another one may hold the lock of the engine and import something."""
    half = "import megatron_rl_patches\nmegatron_rl_patches.apply()\ndef train(model): ...\nsave = train\n"
    package = tagged("train", files={"model": half, "later": "", "other": ""})
    assert package.model
    with installer.installer._lock:
        later, other = (
            threading.Thread(target=importlib.import_module, args=(f"{package}.{module}",), daemon=True)
            for module in ("later", "other")
        )
        later.start()
        later.join(0.2)
        other.start()
        assert package.actor
    later.join(10)
    other.join(10)
    assert not later.is_alive() and not other.is_alive()


HOLDS_THE_LOCK = """
import os, threading
from megatron_rl_patches.engine import installer
held = threading.Event()

def hold():
    with installer.installer._lock:
        held.set()
        threading.Event().wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    installer.installer.status()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_while_another_thread_holds_the_lock_goes_on(tmp_path: Path) -> None:
    assert run_program(tmp_path, {"program.py": HOLDS_THE_LOCK}).returncode == 0


def _verify() -> list[str]:
    """Return what stops the first ``train()`` of each round.

    A rank does not come, all agree, a rank has another patch, and all are without the patch that compares.
    """
    import torch.distributed as dist

    from megatron_rl_patches.frameworks import training

    messages = []
    for place in ("late", "agree", "differ", "reverted"):
        apply("reentrant-train", settings=Settings(verify=True))
        is_other = dist.get_rank() == 1
        if place == "differ" and is_other:
            apply("scheduler-resume")
        if place == "reverted":
            revert()
        try:
            with mock.patch.object(training, "PATIENCE", timedelta(seconds=1 if place == "late" else 60)):
                _ = (place == "late" and is_other) or reentrant_train(lambda model: None)(MockDDP())
        except PatchError as error:
            messages.append(str(error))
        dist.barrier()
    return messages


def test_ranks_that_agree_and_ranks_that_differ(ranks: Any) -> None:
    """The latter are named on every rank, and those that do not come on the others."""
    [absent, message], [other], last = ranks(_verify, 3, timeout=60)
    assert last == [absent, message] and other == message
    assert absent == "rank 1 called no patched train() with verify: set its variables there"
    by_rank = r"absent \(code \w+\) on rank 1; not selected on rank 0, 2"
    assert re.search(rf"scheduler-resume: [\w.]+: {by_rank}$", message, re.MULTILINE)
    assert "reentrant-train" not in message  # also not a function that is decorated on some ranks
