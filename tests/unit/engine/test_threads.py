"""Calls of several threads: each undoes what it did, and is judged on what it asked for."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, applied, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.records import Claim
from megatron_rl_patches.engine.settings import VARIABLE, variable_of

from .conftest import Engine, Framework, Tagged, patch_of, roles

PLAIN, PATCHED = ("trained", "m", 1), ("patched", ("trained", "m", 1))


def states() -> dict[str, str]:
    return {site.patch: site.state for site in status()}


class Pause:
    """Where another thread waits until the main one is done, or has to wait for the lock that it holds."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.lock = threading.RLock()

    def __call__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.go_on.wait(30)

    def __enter__(self) -> None:
        """Stand in for the lock of the installer."""
        if not self.lock.acquire(blocking=False):
            self.go_on.set()
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.fixture
def pause_at() -> Iterator[Callable[[str], Pause]]:
    """``pause_at(module)``: another thread pauses when it looks for the source of the module."""
    finders: list[Any] = []

    def install(module: str) -> Pause:
        pause = Pause()

        class Finder:
            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> None:
                if name == module:
                    pause()

        finders.append(Finder)
        sys.meta_path.insert(0, Finder)  # in place: wrapt puts its finder into this very list
        return pause

    yield install
    for finder in finders:
        sys.meta_path.remove(finder)


def conflict(framework: Framework) -> ModuleType:
    """A module whose function somebody has replaced, which its source does not show."""
    module: Any = importlib.import_module(f"{framework()}.model")
    module.train = lambda model: "replaced"
    return module


@pytest.fixture
def broken(framework: Framework, engine: Engine, pause_at: Callable[[str], Pause]) -> Pause:
    """A patch that fits by its source, and not when it is put in place; that is found out after the pause."""
    name, late = conflict(framework).__name__.partition(".")[0], framework()
    engine["broken"] = patch_of(name, "train", name="broken")
    engine["broken"].wrap(f"{late}.model", "train")(lambda call: None)
    pause = installer.installer._lock = pause_at(f"{late}.model")  # type: ignore[assignment]
    return pause


def test_a_call_that_fails_erases_nothing_of_another_thread(
    framework: Framework, engine: Engine, broken: Pause
) -> None:
    name = framework()
    engine["good"] = patch_of(name, "train", name="good")
    module = importlib.import_module(f"{name}.model")
    with ThreadPoolExecutor(1) as other:
        failing = other.submit(
            installer.installer.add, [engine["broken"]], Settings(), Claim(True, lasts=True)
        )
        assert broken.reached.wait(10)
        apply("good")
        broken.go_on.set()
        with pytest.raises(PatchError, match="conflict"):
            failing.result(10)
    assert module.train("m") == PATCHED
    assert states() == {"good": "applied"}


@pytest.mark.parametrize("first_out", ["this", "other"])
def test_a_failing_call_does_not_take_away_what_two_calls_asked_for(
    framework: Framework, engine: Engine, broken: Pause, first_out: str
) -> None:
    name = framework()
    engine["good"] = patch_of(name, "train", name="good")
    module = importlib.import_module(f"{name}.model")
    with ThreadPoolExecutor(1) as other:
        failing = other.submit(apply, "good", "broken")
        assert broken.reached.wait(10)
        if first_out == "other":
            broken.go_on.set()
            assert failing.exception(10)
        apply("good")
        broken.go_on.set()
        assert isinstance(failing.exception(10), PatchError)
    assert module.train("m") == PATCHED


@pytest.mark.parametrize("by_failing", [True, False])
def test_a_site_that_is_gone_again_holds_nobody_back(
    framework: Framework, engine: Engine, by_failing: bool
) -> None:
    name = framework()
    good, bad = patch_of(name, "train", name="same"), patch_of(name, "train", "no_such", name="same")
    module = importlib.import_module(f"{name}.model")
    installer.installer.add([good], Settings(), Claim(True, lasts=True))
    if by_failing:
        with pytest.raises(PatchError, match="no_such: missing"):
            installer.installer.add([bad], Settings(), Claim(True, lasts=True))
    else:
        claim = Claim(False, lasts=False)
        installer.installer.add([bad], Settings(), claim)
        assert module.train("m") == PLAIN
        installer.installer.release(claim)
    assert module.train("m") == PATCHED


def test_a_revert_meanwhile_is_not_undone(framework: Framework, engine: Engine, broken: Pause) -> None:
    name = framework()
    engine["good"] = patch_of(name, "train", name="good")
    module = importlib.import_module(f"{name}.model")
    original = module.train
    apply("good")
    with ThreadPoolExecutor(1) as other:
        failing = other.submit(apply, "broken")
        assert broken.reached.wait(10)
        revert("good")
        broken.go_on.set()
        assert isinstance(failing.exception(10), PatchError)
    assert module.train is original
    assert states() == {"good": "reverted"}


@pytest.fixture
def train(framework: Framework, engine: Engine) -> Callable[[], Any]:
    """A function whose adapter returns an option."""
    name = framework()
    engine["roles"] = patch_of(name, "train", name="roles", adapter=roles)
    engine["tagging"] = patch_of(name, "save")
    module = importlib.import_module(f"{name}.model")
    return lambda: module.train("m")


def chosen(role: str) -> Settings:
    return Settings(inference_roles=(role,))


class TestOptions:
    """Adapters get the options that their patch was last applied with."""

    def test_the_last_that_were_given(self, train: Callable[[], Any]) -> None:
        apply(settings=chosen("a"))
        assert train() == ("a",)
        apply(settings=chosen("b"))
        assert train() == ("b",)
        apply()  # says nothing of settings
        assert train() == ("b",)
        apply("tagging", settings=chosen("a"))  # of another patch
        assert train() == ("b",)

    def test_the_variable_leaves_those_of_a_call_in_force(self, train: Callable[[], Any]) -> None:
        apply(settings=chosen("a"))
        activate_from_environment({VARIABLE: "all", variable_of("inference_roles"): "b"})
        assert train() == ("a",)


class TestApplied:
    """Blocks of two threads that overlap."""

    def test_the_last_one_out_takes_the_patch_away(self, train: Callable[[], Any]) -> None:
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

    @pytest.mark.parametrize("is_block", [True, False])
    def test_other_options_than_those_of_a_running_block_are_refused(
        self, train: Callable[[], Any], is_block: bool
    ) -> None:
        blocks = ExitStack()

        def by(*names: str, **options: Any) -> None:
            blocks.enter_context(applied(*names, **options)) if is_block else apply(*names, **options)

        with applied("roles", settings=chosen("a")):
            for names in ((), ("roles",), ("tagging", "roles")):
                with pytest.raises(
                    PatchError,
                    match=r"roles is in an applied\(\) block .*'a'.*cannot .*'b'.*end of that block",
                ):
                    by(*names, settings=chosen("b"))
                assert train() == ("a",)
                assert states() == {"roles": "applied"}
            by("roles")  # says nothing of options
            by("roles", settings=chosen("a"))
            by("tagging", settings=chosen("b"))  # of another patch
            assert train() == ("a",)
        assert train() == ("a",)
        blocks.close()
        assert train() == (PLAIN if is_block else ("a",))

    def test_an_apply_inside_a_block_stays(self, train: Callable[[], Any]) -> None:
        with applied("roles", settings=chosen("a")):
            apply("roles")
        assert train() == ("a",)
        with applied("roles", settings=chosen("b")):
            with applied("roles"):
                apply("roles")
            assert train() == ("b",)
        assert train() == ("a",)

    def test_a_revert_inside_a_block_holds(self, train: Callable[[], Any]) -> None:
        with applied("roles"):
            revert("roles")
            assert train() == PLAIN
            apply("roles", settings=chosen("c"))
        assert train() == ("c",)

    def test_required_for_the_length_of_a_block_only(
        self, engine: Engine, framework: Framework, train: Callable[[], Any]
    ) -> None:
        apply("roles")
        replaced = framework(
            model="def train(model): ...\nimport posixpath\nglobals()['train'] = posixpath.join"
        )
        engine["late"] = patch_of(replaced, "train", name="late")
        apply()
        with applied("late"):
            assert installer.installer._records["late", f"{replaced}.model.train"].is_required
        importlib.import_module(f"{replaced}.model")  # a warning, as it would have been before the block
        assert train() == ()


def test_no_thread_waits_for_the_engine_while_it_holds_the_import_lock(tagged: Tagged) -> None:
    """Another one may hold the lock of the engine and import something."""
    half = "import megatron_rl_patches\nmegatron_rl_patches.apply()\ndef train(model): ...\n"
    name = tagged("train", files={"model": half, "later": "", "other": ""})
    importlib.import_module(f"{name}.model")
    with installer.installer._lock:
        later, other = (
            threading.Thread(target=importlib.import_module, args=(f"{name}.{module}",), daemon=True)
            for module in ("later", "other")
        )
        later.start()
        later.join(0.2)
        other.start()
        importlib.import_module(f"{name}.actor")
    later.join(10)
    other.join(10)
    assert not later.is_alive() and not other.is_alive()
