"""Putting in place and taking away, in every order."""

import importlib
import importlib.util
import itertools
import sys
import weakref
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import wrapt
from pytest import MonkeyPatch

from megatron_rl_patches import PatchError, apply, available, revert, status
from megatron_rl_patches.engine.wrapper import SwitchableWrapper

from .conftest import PATCHED, PLAIN, REFUSING, Engine, Framework, patch_of, states

ORDERS = sorted(set(itertools.permutations(("import", "apply", "apply", "revert", "revert", "apply"))))
COPIES = "in place, but copies made before, in a table or a closure, are the original"
TABLE = "TABLE = {'train': train}\n"


def test_every_order_wraps_at_most_once_and_restores_identity(tagged: Framework) -> None:
    package = tagged("train", "Trainer.step", "Trainer.scale", "Trainer.build")

    def targets() -> list[Any]:
        methods = vars(package.model.Trainer)
        return [package.model.train, *(methods[name] for name in ("step", "scale", "build"))]

    for order in ORDERS:
        sys.modules.pop(f"{package}.model", None)
        for action in order:
            {"import": targets, "apply": apply, "revert": revert}[action]()
        is_on = [action for action in order if action != "import"][-1] == "apply"
        assert {type(target) is SwitchableWrapper for target in targets()} == {is_on}, order
        originals = [target.__wrapped__ if is_on else target for target in targets()]
        assert [*map(type, originals)] == [FunctionType, FunctionType, staticmethod, classmethod], order
        revert()
        assert [*map(id, targets())] == [*map(id, originals)], order


@pytest.mark.parametrize("copied_first", [True, False])
def test_copied_names_are_rebound_and_restored(
    framework: Framework, tagged: Framework, monkeypatch: MonkeyPatch, copied_first: bool
) -> None:
    package = tagged("train")
    other = framework(actor=f"from {package}.model import train")
    if copied_first:
        monkeypatch.setattr("__main__.train", package.model.train, raising=False)
        before = id(package.actor.train), id(other.actor.train)
    apply()
    holders = [package.model, package.actor, other.actor, *[sys.modules["__main__"]] * copied_first]
    assert {id(holder.train) for holder in holders} == {id(package.actor.run)}
    assert package.actor.run("m") == PATCHED and status()[0].reason == "in place"
    revert()
    assert {id(holder.train) for holder in holders} == {id(package.actor.run)}
    assert package.actor.run("m") == PLAIN
    assert not copied_first or {id(holder.train) for holder in holders} == set(before)


def test_copies_that_cannot_be_reached_are_counted(framework: Framework, tagged: Framework) -> None:
    """That of a module that refuses to be changed is one, too."""
    package = tagged("train")
    closure = "def make(function):\n    return lambda model: function(model)\nrun = make(train)\n"
    default = "def go(model, function=train): ...\n"
    refuses = "class Stubborn(types.ModuleType):\n    def __setattr__(self, name, value): raise TypeError\n"
    stubborn = f"import sys, types\n{refuses}sys.modules[__name__].__class__ = Stubborn\n"
    module = framework(actor=f"from {package}.model import train\n{TABLE}{closure}{default}{stubborn}").actor
    apply()
    assert status()[0].reason == f"{COPIES}: 4"
    assert module.run("m") == module.train("m") == PLAIN


def test_the_wrapper_of_another_patch_is_no_copy(framework: Framework, engine: Engine) -> None:
    package = framework(table=f"from .model import train\n{TABLE}")
    engine.update({other: patch_of(package, "train", name=other) for other in ("first", "second")})
    module = package.model
    assert {site.reason for site in apply()} == {"in place"}
    assert module.train("m") == ("patched", PATCHED)
    revert("second")
    assert package.table.TABLE  # copies the wrapper of the first
    apply("second")
    assert status()[-1].reason == f"{COPIES}: 1"


def test_a_third_party_below_is_wrapped_with_its_copies(tagged: Framework) -> None:
    package = tagged("train")
    model, actor = package.model, package.actor
    below = wrapt.FunctionWrapper(model.train, lambda wrapped, _, args, kwargs: ("theirs", wrapped(*args)))
    model.train = actor.train = below
    apply()
    assert model.train("m") == actor.train("m") == ("patched", ("theirs", PLAIN))
    revert()
    assert model.train is actor.train is below


HALF = """
import megatron_rl_patches
megatron_rl_patches.apply()
SEEN = [s.state for s in megatron_rl_patches.status()]

def train(model):
    return ("trained", model, 1)
"""


@pytest.mark.parametrize("by", ["another import", "status()"])
def test_a_half_imported_module_is_patched_later(tagged: Framework, by: str) -> None:
    package = tagged("train", files={"model": HALF, "later": ""})
    module = package.model
    assert module.SEEN == ["waiting"]
    assert module.train("m") == PLAIN
    assert package.later if by == "another import" else status()
    assert module.train("m") == PATCHED
    revert()
    assert module.train("m") == PLAIN


def test_selection_by_name_and_exclusion(engine: Engine, tagged: Framework) -> None:
    engine["other"] = patch_of(tagged("train"), "save", name="other")
    assert available() == {"tagging": "tags results", "other": "tags results"}
    apply(exclude=["other"])
    assert states() == {"model.train": "waiting"}
    revert()
    apply("other")
    assert states() == {"model.save": "waiting"}, "what was never put in place is not reverted"
    for call in (apply, revert):
        with pytest.raises(PatchError, match=r"unknown patch 'othr'; known: default, all, tagging, other"):
            call("othr")
    with pytest.raises(PatchError, match="expected the name of a patch, not a Patch; a package registers"):
        apply(engine["other"])  # type: ignore[arg-type]
    with pytest.raises(PatchError, match="exclude: unknown patch 'all'; known: tagging, other"):
        apply(exclude=["all"])


@pytest.mark.parametrize("order", [("tagging", "other"), ("other", "tagging"), ()])
def test_two_patches_on_one_target(engine: Engine, tagged: Framework, order: tuple[str, ...]) -> None:
    package = tagged("train")
    engine["other"] = patch_of(package, "train", name="other")
    module, actor = package.model, package.actor
    original = weakref.ref(module.train)  # which is no copy
    apply()
    for patch in (*order, *order):
        assert module.train("m") == ("patched", PATCHED)
        assert actor.train is module.train and {site.reason for site in status()} == {"in place"}
        revert(patch)
        apply(patch)
    for patch in order:
        revert(patch)
    revert()
    assert module.train is actor.train is original()


@pytest.mark.parametrize("how", ["reload", "import anew"])
def test_after_a_reload_the_old_code_stays_patched_too(engine: Engine, tagged: Framework, how: str) -> None:
    """As without the patch, copies and instances go on with the code that they have."""
    package = tagged("train", "Trainer.step")
    engine["other"] = patch_of(package, "train", name="other")
    actor, model = package.actor, package.model
    original, trainer = model.train, model.Trainer()
    step = vars(model.Trainer)["step"]
    apply()
    table = {"train": model.train}
    for _ in range(2):
        if how == "reload":
            importlib.reload(model)
        else:
            del sys.modules[f"{package}.model"]
        model = package.model
        apply()
        for function in (model.train, actor.train, actor.run, table["train"]):
            assert function("m") == ("patched", PATCHED)
        assert trainer.step("x") == model.Trainer().step("x") == ("patched", ("step", "x"))
        assert actor.train is not model.train
    assert {site.state for site in status()} == {"applied"}
    revert("other")
    assert actor.train("m") == model.train("m") == PATCHED
    revert()
    assert actor.train is actor.run is original
    assert vars(type(trainer))["step"] is step
    assert model.train("m") == table["train"]("m") == PLAIN
    assert type(model.train) is type(vars(model.Trainer)["step"]) is FunctionType


def test_what_does_not_use_up_the_hook(tagged: Framework, tmp_path: Path) -> None:
    """An import that fails, a load that is no import, and a first import of a module that is removed."""
    package = tagged("train", files={"model": "raise ImportError('not yet')"})
    apply()
    with pytest.raises(ImportError, match="not yet"):
        package.model  # noqa: B018
    (tmp_path / package.name / "model.py").write_text("def train(model): return ('trained', model, 1)  # now")
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(f"{package}.model")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert package.model.train("m") == PATCHED
    del sys.modules[f"{package}.model"]
    assert states() == {"model.train": "lost"}
    assert package.model.train("m") == PATCHED


def test_an_interrupt_between_two_sites_leaves_none(tagged: Framework) -> None:
    interrupts = REFUSING.format("KeyboardInterrupt")
    package = tagged("train", "Trainer.step", files={"model": interrupts})
    apply()
    spec = importlib.util.find_spec(f"{package}.model")
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(interrupts, vars(module))
    with pytest.raises(KeyboardInterrupt):
        status()
    assert module.train("m") == PLAIN
