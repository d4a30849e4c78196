"""Other packages that patch Megatron, put in place before this one or after it.

The stand-ins do what the real ones do to modules and classes. ``liger`` is Liger-Kernel's
``apply_liger_kernel_to_megatron()``: the attribute of the defining module becomes a function that has
``__wrapped__`` and does not call it. ``MindSpeed`` is that project's ``Patch``: every module in which the
name is the original, by ``id()``, gets a function in its place, which replaces it or wraps it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from megatron_rl_patches import PatchError, apply, revert, status

from .conftest import PLAIN, Engine, Framework, patch_of


def ours(result: Any) -> Any:
    return ("patched", result)


def theirs(result: Any) -> Any:
    return ("theirs", result)


def replacing(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model: "replaced"


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return theirs(function(*args, **kwargs))

    return wrapper


class MindSpeed:
    def __init__(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self.name, self.original = name, getattr(owner, name)
        self.final = new(self.original)
        setattr(owner, name, self.final)
        self._replace(self.original, self.final)

    def remove(self) -> None:
        self._replace(self.final, self.original)

    def _replace(self, old: object, new: object) -> None:
        for module in list(sys.modules.values()):
            if id(vars(module).get(self.name)) == id(old):
                setattr(module, self.name, new)


@pytest.fixture
def world(framework: Framework, engine: Engine) -> tuple[Any, Any]:
    """A module, of which ``train`` and ``Trainer.step`` are patched, and one with copies."""
    package = framework()
    engine["tagging"] = patch_of(package, "train")
    engine["methods"] = patch_of(package, "Trainer.step", name="methods")
    return package.model, package.actor


def results(world: tuple[Any, Any]) -> list[Any]:
    """Return what the target and its copies return."""
    model, actor = world
    return [model.train("m"), actor.train("m"), actor.run("m")]


def target() -> tuple[str, str]:
    site = status()[0]
    return site.state, site.reason


REPLACING = f"{__name__}.replacing.<locals>.<lambda>"
UNDER = f"in place, under code of {__name__}; in force only if that calls what it wraps"


def test_liger_before(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(actor.train)

    def liger(model: str) -> str:
        return "replaced"

    liger.__wrapped__ = model.train  # type: ignore[attr-defined]
    model.train, before = liger, id(liger)
    del liger  # or it counts as a copy
    apply()
    assert results(world) == [ours("replaced"), PLAIN, PLAIN]  # Liger has no copies, so nobody has
    reason = f"in place, but not in {actor.__name__}, with a function that another package has replaced"
    assert target() == ("applied", reason)
    revert()
    assert results(world) == ["replaced", PLAIN, PLAIN]
    assert (id(model.train), id(actor.train), id(actor.run)) == (before, original, original)


def test_mindspeed_replaces_before(world: tuple[Any, Any]) -> None:
    model, _ = world
    train = MindSpeed(model, "train", replacing)
    apply("methods")
    for _ in range(2):
        apply()
        state, reason = next((s.state, s.reason) for s in status() if s.patch == "tagging")
        assert state == "conflict" and reason.startswith(f"replaced by {REPLACING}")
        with pytest.raises(PatchError, match="put this patch in place before it"):
            apply("tagging")
        assert results(world) == ["replaced", "replaced", PLAIN]
        assert model.train is train.final
        revert()
    train.remove()
    apply()
    assert results(world) == [ours(PLAIN)] * 3


def test_mindspeed_replaces_after(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(model.train)
    apply()
    train = MindSpeed(model, "train", replacing)
    for _ in range(2):
        # A copy under another name is one that MindSpeed does not look for.
        assert results(world) == ["replaced", "replaced", ours(PLAIN)]
        only_if = "in force only if that calls what it replaced"
        assert target() == ("lost", f"overwritten by {REPLACING}; {only_if}")
        apply()
    revert()
    assert results(world) == ["replaced", "replaced", PLAIN]
    assert model.train is actor.train is train.final
    train.remove()  # It puts this package's wrapper back, which revert() has switched off.
    assert results(world) == [PLAIN] * 3
    apply()
    assert results(world) == [ours(PLAIN)] * 3
    revert()
    assert [id(each) for each in (model.train, actor.train, actor.run)] == [original] * 3


def test_mindspeed_wraps(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(model.train)
    apply()
    train = MindSpeed(model, "train", wrapping)
    step = MindSpeed(model.Trainer, "step", wrapping)  # read from the class
    for _ in range(2):
        assert results(world) == [theirs(ours(PLAIN)), theirs(ours(PLAIN)), ours(PLAIN)]
        assert model.Trainer().step("x") == theirs(ours(("step", "x")))
        assert [site.state for site in status()] == ["applied"] * 2
        assert all(site.reason.endswith(UNDER.removeprefix("in place")) for site in status())
        revert()
        assert results(world) == [theirs(PLAIN), theirs(PLAIN), PLAIN]
        assert model.Trainer().step("x") == theirs(("step", "x"))
        assert model.train is actor.train is train.final
        assert model.Trainer.step is step.final and id(actor.run) == original
        apply()
    train.remove()  # takes its layer away, and finds this package's in place
    assert results(world) == [ours(PLAIN)] * 3
    assert target() == ("applied", "in place")
    revert()
    assert [id(each) for each in (model.train, actor.train, actor.run)] == [original] * 3
