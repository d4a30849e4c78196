"""Putting in place and taking away, in every order."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import wrapt

from megatron_rl_patches import PatchError, Settings, applied, apply, available, revert, status
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.wrapper import SwitchableWrapper

from .conftest import Engine, Framework, Tagged, patch_of, sites_in

ORDERS = sorted(set(itertools.permutations(("import", "apply", "apply", "revert", "revert", "apply"))))
PLAIN, PATCHED = ("trained", "m", 1), ("patched", ("trained", "m", 1))
COPIES = "in place, but copies made before, in a table or a closure, are the original"


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def states() -> dict[str, str]:
    return {s.target.split(".", 2)[2]: s.state for s in status()}


@pytest.mark.parametrize("qualname", ["train", "Trainer.step", "Trainer.scale", "Trainer.build"])
def test_every_order_wraps_at_most_once_and_restores_identity(tagged: Tagged, qualname: str) -> None:
    name = f"{tagged(qualname)}.model"
    owner_name, _, attribute = qualname.rpartition(".")
    for order in ORDERS:
        sys.modules.pop(name, None)
        for action in order:
            {"import": lambda: load(name), "apply": apply, "revert": revert}[action]()
        owner = getattr(load(name), owner_name) if owner_name else load(name)
        now = vars(owner)[attribute]
        is_on = [action for action in order if action != "import"][-1] == "apply"
        assert (type(now) is SwitchableWrapper) is is_on, order
        original = now.__wrapped__ if is_on else now
        assert type(original) in (FunctionType, staticmethod, classmethod), order
        revert()
        assert vars(owner)[attribute] is original, order


@pytest.mark.parametrize("copied_first", [True, False])
def test_copied_names_are_rebound_and_restored(tagged: Tagged, copied_first: bool) -> None:
    name = tagged("train")
    if copied_first:
        load(f"{name}.actor")
    apply()
    actor, model = load(f"{name}.actor"), load(f"{name}.model")
    assert actor.train is actor.run is model.train
    assert actor.run("m") == PATCHED
    revert()
    assert actor.train is actor.run is model.train
    assert actor.run("m") == PLAIN


def test_copies_in_main_and_in_other_packages_are_rebound(
    framework: Framework, tagged: Tagged, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tagged("train")
    other = framework(actor=f"from {name}.model import train")
    module = load(f"{name}.model")
    monkeypatch.setattr("__main__.train", module.train, raising=False)
    before = id(module.train)
    holders = load(f"{other}.actor"), sys.modules["__main__"]
    apply()
    assert [holder.train("m") for holder in holders] == [PATCHED, PATCHED]
    assert status()[0].reason == "in place"
    revert()
    assert [id(holder.train) for holder in holders] == [before, before]


def test_copies_of_a_plugin_that_the_module_imports_at_its_end_are_rebound(
    framework: Framework, tagged: Tagged, tmp_path: Path
) -> None:
    name = tagged("train", files={"table": ""})
    plugin = framework(actor=f"from {name}.model import train\nTABLE = {{'train': train}}\n")
    with (tmp_path / name / "model.py").open("a") as file:
        file.write(f"import {plugin}.actor\n")
    apply()
    model, actor = load(f"{name}.model"), load(f"{plugin}.actor")
    assert actor.train is model.train
    assert actor.train("m") == PATCHED
    assert status()[0].reason == f"{COPIES}: 1"
    revert()
    assert actor.train is model.train is actor.TABLE["train"]


def test_copies_that_cannot_be_reached_are_counted(framework: Framework, tagged: Tagged) -> None:
    name = tagged("train")
    table = f"from {name}.model import train\nTABLE = {{'train': train}}\n"
    closure = "def make(function):\n    return lambda model: function(model)\nrun = make(train)\n"
    default = "def go(model, function=train): ...\n"
    module = load(f"{framework(actor=table + closure + default)}.actor")
    apply()
    assert status()[0].reason == f"{COPIES}: 3"
    assert module.run("m") == PLAIN


def test_the_wrapper_of_another_patch_is_no_copy(framework: Framework, engine: Engine) -> None:
    name = framework(table="from .model import train\nTABLE = {'train': train}\n")
    engine.update({other: patch_of(name, "train", name=other) for other in ("first", "second")})
    module = load(f"{name}.model")
    assert {site.reason for site in apply()} == {"in place"}
    assert module.train("m") == ("patched", PATCHED)
    revert("second")
    load(f"{name}.table")  # copies the wrapper of the first
    apply("second")
    assert status()[-1].reason == f"{COPIES}: 1"


def test_a_third_party_on_top_stays_and_ours_goes_inert(patched: Any) -> None:
    theirs = wrapt.FunctionWrapper(patched.train, lambda w, i, a, k: ("theirs", w(*a, **k)))
    patched.train = theirs
    assert states() == {"train": "applied"}
    assert patched.train("m") == ("theirs", PATCHED)
    revert()
    assert patched.train is theirs
    assert patched.train("m") == ("theirs", PLAIN)
    apply()
    assert patched.train is theirs
    assert patched.train("m") == ("theirs", PATCHED)


def test_a_third_party_below_is_kept(framework: Framework, engine: Engine) -> None:
    name = framework()
    module = load(f"{name}.model")
    theirs = wrapt.FunctionWrapper(module.train, lambda w, i, a, k: ("theirs", w(*a, **k)))
    module.train = theirs
    engine["tagging"] = patch_of(name, "train")
    apply()
    assert module.train("m") == ("patched", ("theirs", PLAIN))
    revert()
    assert module.train is theirs


def test_overwriting_is_seen_and_mended_by_another_apply(patched: Any) -> None:
    original = patched.train.__wrapped__
    patched.train = original
    assert states() == {"train": "lost"}
    apply()
    assert states() == {"train": "applied"}
    assert patched.train("m") == PATCHED
    revert()
    assert patched.train is original


HALF = """
import megatron_rl_patches
megatron_rl_patches.apply()
SEEN = [s.state for s in megatron_rl_patches.status()]

def train(model):
    return ("trained", model, 1)
"""


@pytest.mark.parametrize("by", ["another import", "status()"])
def test_a_half_imported_module_is_patched_later(tagged: Tagged, by: str) -> None:
    name = tagged("train", files={"model": HALF, "later": ""})
    module = load(f"{name}.model")
    assert module.SEEN == ["waiting"]
    assert module.train("m") == PLAIN
    load(f"{name}.later") if by == "another import" else status()
    assert module.train("m") == PATCHED
    revert()
    assert module.train("m") == PLAIN


def test_selection_by_name_and_exclusion(engine: Engine, tagged: Tagged) -> None:
    name = tagged("train")
    engine["other"] = patch_of(name, "save", name="other")
    assert available() == {"tagging": "tags results", "other": "tags results"}
    apply(exclude=["other"])
    assert states() == {"train": "waiting"}
    revert()
    apply("other")
    assert states() == {"save": "waiting"}, "what was never put in place is not reverted"
    with pytest.raises(PatchError, match=r"unknown patch 'othr'; known: tagging, other"):
        apply("othr")
    with pytest.raises(PatchError, match="known: tagging, other"):
        revert("othr")


def test_the_built_in_patches_are_the_files() -> None:
    folder = Path(registry.__file__).parent.parent / "patches"
    files = {path.stem.replace("_", "-") for path in folder.glob("[!_]*.py")}
    assert {patch.name for patch in registry._built_in()} == files


def test_two_patches_on_one_target_are_both_in_place_and_come_off_in_any_order(
    engine: Engine, tagged: Tagged
) -> None:
    for order in (("tagging", "other"), ("other", "tagging"), ()):
        name = tagged("train")
        engine["other"] = patch_of(name, "train", name="other")
        module, actor = load(f"{name}.model"), load(f"{name}.actor")
        original = module.train
        apply()
        assert module.train("m") == ("patched", PATCHED)
        assert actor.train is module.train
        for patch in order:
            revert(patch)
        revert()
        assert module.train is actor.train is original


def test_copies_are_rebound_again_when_reapplied_under_a_third_party(tagged: Tagged) -> None:
    name = tagged("train")
    actor, module = load(f"{name}.actor"), load(f"{name}.model")
    original = module.train
    apply()
    module.train = wrapt.FunctionWrapper(module.train, lambda w, i, a, k: ("theirs", w(*a, **k)))
    revert()
    apply()
    assert actor.train("m") == PATCHED
    module.train = module.train.__wrapped__  # the third party takes its layer away
    revert()
    assert module.train is actor.train is original


def test_a_plain_replacement_that_calls_ours_stays_in_force(patched: Any) -> None:
    inner = patched.train
    patched.train = lambda model: ("third", inner(model))
    for _ in range(2):
        assert states() == {"train": "lost"}
        assert patched.train("m") == ("third", PATCHED)
        apply()


@pytest.mark.parametrize("how", ["reload", "import anew"])
def test_what_was_patched_before_a_reload_stays_patched_until_revert(
    engine: Engine, tagged: Tagged, how: str
) -> None:
    """As without the patch, copies and instances go on with the code that they have."""
    name = tagged("train", "Trainer.step")
    engine["other"] = patch_of(name, "train", name="other")
    actor, model = load(f"{name}.actor"), load(f"{name}.model")
    original, trainer = model.train, model.Trainer()
    step = vars(model.Trainer)["step"]
    apply()
    table = {"train": model.train}
    for _ in range(2):
        if how == "reload":
            importlib.reload(model)
        else:
            del sys.modules[f"{name}.model"]
        model = load(f"{name}.model")
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


def test_a_module_removed_and_imported_again_is_patched_again(tagged: Tagged) -> None:
    name = tagged("train")
    apply()
    load(f"{name}.model")
    del sys.modules[f"{name}.model"]
    assert states() == {"train": "lost"}
    assert load(f"{name}.model").train("m") == PATCHED


def test_an_interrupt_between_two_sites_leaves_none(tagged: Tagged) -> None:
    interrupts = """
class Meta(type):
    def __setattr__(cls, name, value):
        raise KeyboardInterrupt

class Trainer(metaclass=Meta):
    def step(self, x): ...

def train(model):
    return ("trained", model, 1)
"""
    name = tagged("train", "Trainer.step", files={"model": interrupts})
    apply()
    spec = importlib.util.find_spec(f"{name}.model")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(interrupts, vars(module))
    with pytest.raises(KeyboardInterrupt):
        status()
    assert module.train("m") == PLAIN


def test_a_load_that_is_not_an_import_does_not_use_up_the_hook(tagged: Tagged) -> None:
    name = tagged("train")
    apply()
    spec = importlib.util.find_spec(f"{name}.model")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert load(f"{name}.model").train("m") == PATCHED


def test_an_import_that_fails_does_not_use_up_the_hook(tagged: Tagged, tmp_path: Path) -> None:
    name = tagged("train", files={"model": "raise ImportError('not yet')"})
    apply()
    with pytest.raises(ImportError, match="not yet"):
        load(f"{name}.model")
    (tmp_path / name / "model.py").write_text("def train(model): return ('trained', model, 1)  # now")
    importlib.invalidate_caches()
    assert load(f"{name}.model").train("m") == PATCHED


def test_a_second_apply_adds_sites_and_makes_them_a_must(engine: Engine, tagged: Tagged) -> None:
    name = tagged("train")
    engine["tagging"].configured = sites_in
    apply()
    module = load(f"{name}.model")
    apply("tagging", settings=Settings(train_functions=(f"{name}.model:save",)))
    assert module.save("m") == ("patched", ("saved", "m"))
    revert()
    apply()
    assert states() == {"train": "applied", "save": "reverted"}


def test_applied_takes_away_only_what_it_added(engine: Engine, tagged: Tagged) -> None:
    name = tagged("train")
    engine["tagging"].configured = sites_in
    apply()
    module = load(f"{name}.model")
    settings = Settings(train_functions=(f"{name}.model:save",))
    with pytest.raises(ZeroDivisionError), applied("tagging", settings=settings):
        assert module.save("m") == ("patched", ("saved", "m"))
        raise ZeroDivisionError
    assert module.save("m") == ("saved", "m")
    assert module.train("m") == PATCHED


def test_a_module_that_refuses_rebinding_keeps_its_copy(tagged: Tagged) -> None:
    stubborn = (
        "import sys, types\nfrom .model import train\n"
        "class Stubborn(types.ModuleType):\n"
        "    def __setattr__(self, name, value): raise TypeError\n"
        "sys.modules[__name__].__class__ = Stubborn\n"
    )
    name = tagged("train", files={"actor": stubborn})
    actor = load(f"{name}.actor")
    apply()
    assert load(f"{name}.model").train("m") == PATCHED
    assert actor.train("m") == PLAIN
