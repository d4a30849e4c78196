"""Putting in place and taking away, in every order."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import wrapt

from megatron_rl_patches import PatchError, Settings, applied, apply, available, revert, status
from megatron_rl_patches.engine.layer import Layer
from megatron_rl_patches.engine.spec import Patch

from .conftest import patch_of, sites_in

Host = Callable[..., str]
Engine = dict[str, Patch]

PLAIN, PATCHED = ("trained", "m", 1), ("patched", ("trained", "m", 1))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def states() -> dict[str, str]:
    return {s.target.split(".", 2)[2]: s.state for s in status()}


@pytest.mark.parametrize("imported_first", [True, False])
def test_applies_before_and_after_the_import(host: Host, engine: Engine, imported_first: bool) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    if imported_first:
        load(f"{name}.model")
    apply()
    assert states() == {"train": "applied" if imported_first else "waiting"}
    assert load(f"{name}.model").train("m") == PATCHED
    assert states() == {"train": "applied"}


def test_applying_does_not_import_the_host(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply("tagging")
    assert not [module for module in sys.modules if module.startswith(name)]


@pytest.mark.parametrize("imported_first", [True, False])
def test_applying_twice_wraps_once(host: Host, engine: Engine, imported_first: bool) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    if imported_first:
        load(f"{name}.model")
    apply()
    apply("tagging")
    assert load(f"{name}.model").train("m") == PATCHED


@pytest.mark.parametrize("qualname", ["train", "Trainer.step", "Trainer.scale", "Trainer.build"])
def test_revert_restores_the_identical_object(host: Host, engine: Engine, qualname: str) -> None:
    name = host()
    owner_name, _, attribute = qualname.rpartition(".")
    engine["tagging"] = patch_of(name, qualname)
    module = load(f"{name}.model")
    owner = getattr(module, owner_name) if owner_name else module
    before = inspect.getattr_static(owner, attribute)
    entries = dict(vars(owner))
    apply()
    assert type(inspect.getattr_static(owner, attribute)) is Layer
    revert("tagging")
    assert inspect.getattr_static(owner, attribute) is before
    assert dict(vars(owner)) == entries
    assert states() == {qualname: "reverted"}


def test_every_kind_of_method_is_called_as_before(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "Trainer.step", "Trainer.scale", "Trainer.build", "Base.fit")
    apply()
    trainer = load(f"{name}.model").Trainer
    assert trainer().step(1) == ("patched", ("step", 1))
    assert trainer.step(trainer(), x=1) == ("patched", ("step", 1))
    assert trainer.scale(2) == trainer().scale(2) == ("patched", 4)
    assert trainer.build(3) == ("patched", ("Trainer", 3))
    assert trainer().fit(4) == ("patched", ("fit", 4))


def test_can_be_applied_reverted_and_applied_again(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    for _ in range(3):
        apply()
        module = load(f"{name}.model")
        assert module.train("m") == PATCHED
        revert()
        assert module.train("m") == PLAIN


def test_reverting_before_the_import_disarms_the_hook(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    revert()
    assert load(f"{name}.model").train("m") == PLAIN


@pytest.mark.parametrize("copied_first", [True, False])
def test_copied_names_are_rebound_and_restored(host: Host, engine: Engine, copied_first: bool) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    if copied_first:
        load(f"{name}.actor")
    apply()
    actor, model = load(f"{name}.actor"), load(f"{name}.model")
    assert actor.train is actor.run is model.train
    assert actor.run("m") == PATCHED
    revert()
    assert actor.train is actor.run is model.train
    assert actor.run("m") == PLAIN


def test_copies_in_another_hosts_package_are_rebound_when_named(host: Host, engine: Engine) -> None:
    name = host()
    other, stranger = (host(actor=f"from {name}.model import train") for _ in range(2))
    engine["tagging"] = patch_of(name, "train", copied_by=(other,))
    load(f"{other}.actor"), load(f"{stranger}.actor")
    apply()
    assert load(f"{other}.actor").train("m") == PATCHED
    assert load(f"{stranger}.actor").train("m") == PLAIN


def test_copies_out_of_reach_are_inert_after_revert(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    table = {"train": load(f"{name}.model").train}
    assert table["train"]("m") == PATCHED
    revert()
    assert table["train"]("m") == PLAIN


def test_a_third_party_on_top_stays_and_ours_goes_inert(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    module = load(f"{name}.model")
    theirs = wrapt.FunctionWrapper(module.train, lambda w, i, a, k: ("theirs", w(*a, **k)))
    module.train = theirs
    assert states() == {"train": "applied"}
    assert module.train("m") == ("theirs", PATCHED)
    revert()
    assert module.train is theirs
    assert module.train("m") == ("theirs", PLAIN)
    apply()
    assert module.train is theirs
    assert module.train("m") == ("theirs", PATCHED)


def test_a_third_party_below_is_kept(host: Host, engine: Engine) -> None:
    name = host()
    module = load(f"{name}.model")
    theirs = wrapt.FunctionWrapper(module.train, lambda w, i, a, k: ("theirs", w(*a, **k)))
    module.train = theirs
    engine["tagging"] = patch_of(name, "train")
    apply()
    assert module.train("m") == ("patched", ("theirs", PLAIN))
    revert()
    assert module.train is theirs


def test_overwriting_is_seen_and_mended_by_another_apply(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    module = load(f"{name}.model")
    original = module.train.__wrapped__
    module.train = original
    assert states() == {"train": "lost"}
    apply()
    assert states() == {"train": "applied"}
    assert module.train("m") == PATCHED
    revert()
    assert module.train is original


def test_reload_is_seen_and_mended_by_another_apply(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train", "Trainer.step")
    apply()
    module = importlib.reload(load(f"{name}.model"))
    assert states() == {"train": "lost", "Trainer.step": "lost"}
    assert module.train("m") == PLAIN
    apply()
    assert states() == {"train": "applied", "Trainer.step": "applied"}
    assert module.train("m") == PATCHED
    assert module.Trainer().step(1) == ("patched", ("step", 1))


HALF = """
import megatron_rl_patches
megatron_rl_patches.apply()
SEEN = [s.state for s in megatron_rl_patches.status()]

def train(model):
    return ("trained", model, 1)
"""


def test_a_half_imported_module_is_settled_later(host: Host, engine: Engine) -> None:
    name = host(model=HALF, later="")
    engine["tagging"] = patch_of(name, "train")
    module = load(f"{name}.model")
    assert module.SEEN == ["waiting"]
    assert module.train("m") == PLAIN
    load(f"{name}.later")
    assert module.train("m") == PATCHED
    revert()
    assert module.train("m") == PLAIN


def test_a_half_imported_module_is_settled_when_asked(host: Host, engine: Engine) -> None:
    name = host(model=HALF)
    engine["tagging"] = patch_of(name, "train")
    module = load(f"{name}.model")
    assert states() == {"train": "applied"}
    assert module.train("m") == PATCHED


def test_applied_is_scoped(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    engine["other"] = patch_of(name, "save", name="other")
    module = load(f"{name}.model")
    apply("other")
    with pytest.raises(ZeroDivisionError), applied("tagging", "other"):
        assert module.train("m") == PATCHED
        raise ZeroDivisionError
    assert module.train("m") == PLAIN
    assert module.save("m") == ("patched", ("saved", "m"))


def test_selection_by_name_and_exclusion(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    engine["other"] = patch_of(name, "save", name="other")
    assert available() == {"tagging": "tags results", "other": "tags results"}
    apply(exclude=["other"])
    assert states() == {"train": "waiting"}
    revert()
    apply("other")
    assert states() == {"train": "reverted", "save": "waiting"}
    with pytest.raises(PatchError, match=r"unknown patch 'othr'; known: tagging, other"):
        apply("othr")
    with pytest.raises(PatchError, match="known: tagging, other"):
        revert("othr")


def test_threads_applying_and_importing_at_once(host: Host, engine: Engine) -> None:
    for _ in range(10):
        name = host()
        engine.clear()
        engine["tagging"] = patch_of(name, "train", "Trainer.step")
        barrier = threading.Barrier(8)
        results = []

        def work(
            turn: int, name: str = name, barrier: threading.Barrier = barrier, results: list = results
        ) -> None:
            barrier.wait()
            if turn % 2:
                apply()
            module = load(f"{name}.model")
            apply()
            results.append(module.train("m"))

        threads = [threading.Thread(target=work, args=(turn,)) for turn in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert results == [PATCHED] * 8
        revert()
        assert load(f"{name}.model").train("m") == PLAIN


def test_two_patches_on_one_target_are_both_in_place_and_come_off_in_any_order(
    host: Host, engine: Engine
) -> None:
    for order in (("tagging", "other"), ("other", "tagging"), ()):
        name = host()
        engine["tagging"] = patch_of(name, "train")
        engine["other"] = patch_of(name, "train", name="other")
        module = load(f"{name}.model")
        original = module.train
        apply()
        assert module.train("m") == ("patched", PATCHED)
        for patch in order:
            revert(patch)
        revert()
        assert module.train is original


def test_copies_are_rebound_again_when_reapplied_under_a_third_party(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
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


def test_a_plain_replacement_that_calls_ours_stays_in_force(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    module = load(f"{name}.model")
    inner = module.train
    module.train = lambda model: ("third", inner(model))
    for _ in range(2):
        assert states() == {"train": "lost"}
        assert module.train("m") == ("third", PATCHED)
        apply()


def test_a_copy_from_before_a_reload_is_inert_after_revert(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    module = load(f"{name}.model")
    old = module.train
    importlib.reload(module)
    apply()
    revert()
    assert old("m") == module.train("m") == PLAIN


def test_a_module_removed_and_imported_again_is_patched_again(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    load(f"{name}.model")
    del sys.modules[f"{name}.model"]
    assert states() == {"train": "lost"}
    apply()
    assert load(f"{name}.model").train("m") == PATCHED


def test_an_import_that_no_hook_saw_is_settled_when_asked(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    apply()
    location = importlib.machinery.PathFinder.find_spec(f"{name}.model", load(name).__path__)
    assert location is not None and location.loader is not None
    module = importlib.util.module_from_spec(location)
    sys.modules[module.__name__] = module
    location.loader.exec_module(module)
    assert states() == {"train": "applied"}
    assert module.train("m") == PATCHED


def test_a_second_apply_adds_sites_and_makes_them_a_must(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    engine["tagging"].configured = sites_in
    apply()
    module = load(f"{name}.model")
    apply("tagging", settings=Settings(train_functions=(f"{name}.model:save",)))
    assert module.save("m") == ("patched", ("saved", "m"))
    revert()
    apply()
    assert states() == {"train": "applied", "save": "reverted"}


def test_applied_takes_away_only_what_it_added(host: Host, engine: Engine) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    engine["tagging"].configured = sites_in
    apply()
    module = load(f"{name}.model")
    with applied("tagging", settings=Settings(train_functions=(f"{name}.model:save",))):
        assert module.save("m") == ("patched", ("saved", "m"))
    assert module.save("m") == ("saved", "m")
    assert module.train("m") == PATCHED


def test_a_module_that_refuses_rebinding_keeps_its_copy(host: Host, engine: Engine) -> None:
    stubborn = (
        "import sys, types\nfrom .model import train\n"
        "class Stubborn(types.ModuleType):\n"
        "    def __setattr__(self, name, value): raise TypeError\n"
        "sys.modules[__name__].__class__ = Stubborn\n"
    )
    name = host(actor=stubborn)
    engine["tagging"] = patch_of(name, "train")
    actor = load(f"{name}.actor")
    apply()
    assert load(f"{name}.model").train("m") == PATCHED
    assert actor.train("m") == PLAIN
