"""Judging code, and telling of it: each verdict with its words, its state and its fingerprint."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer, target_source
from megatron_rl_patches.engine.judge import judge_all, judge_site
from megatron_rl_patches.engine.patch import Site
from megatron_rl_patches.engine.records import Claim
from megatron_rl_patches.engine.sources import open_source

from .conftest import MODEL, Engine, Framework, Tagged, patch_of, tag

EVERYWHERE = """
if fast:
    def train(model): return "if"
else:
    def evaluate(model): return "else"
try:
    def save(model): return "try"
except ImportError:
    def load(model): return "except"
finally:
    def log(model): return "finally"
"""


LOOP = """
def save(chunks): ...

def train(model, optimizer, wide=False):
    for chunk in model:
        assert chunk.config.no_sync_func is None
        handles[chunk].remove()
    try:
        optimizer.step(scale(model, wide=True), wait=wide)
    finally:
        chunk.enable()
"""


class TestFacts:
    def test_questions_of_the_function_and_of_its_module(self) -> None:
        target = target_source.from_source("framework.model", "train", LOOP)
        assert target.mentions("enable") and not target.mentions("chunks")
        assert target.mentions("chunks", in_module=True)
        assert target.asserts("no_sync_func", in_loop=True) and not target.asserts("model")
        assert target.cleans_up("enable") and target.cleans_up() and not target.cleans_up("step")
        assert target.looks_up_unchecked("handles") and not target.looks_up_unchecked("model")
        assert target.defines("save") and not target.defines("enable")
        [call] = target.calls("step")
        assert (call.function, call.keywords) == ("optimizer.step", {"wait": ...})
        assert [call.keywords for call in target.calls("scale", in_module=True)] == [{"wide": True}]
        assert len(target.calls()) == 4

    @pytest.mark.parametrize(
        "asked", ["handles.get(chunk) and handles[chunk]", "handles[chunk] if handles else None"]
    )
    def test_a_look_up_that_is_checked(self, asked: str) -> None:
        checked = f"def train(model):\n    for chunk in model:\n        if handles: {asked}\n"
        assert not target_source.from_source("framework.model", "train", checked).looks_up_unchecked(
            "handles"
        )

    @pytest.mark.parametrize("name", ["train", "evaluate", "save", "load", "log"])
    def test_definitions_under_if_and_try(self, name: str) -> None:
        found = target_source.from_source("framework.model", name, EVERYWHERE)
        assert found.target == f"framework.model.{name}"
        assert found.function is not None and found.function.name == name

    def test_the_last_binding_counts(self) -> None:
        defined, imported = "def train(model): ...\n", "from .. import train\n"
        found = target_source.from_source("framework.model", "train", defined + imported)
        assert (found.function, found.imported_from) == (None, "..")
        found = target_source.from_source("framework.model", "train", imported + defined)
        assert found.function is not None and found.imported_from is None

    def test_where_a_live_function_comes_from(self, framework: Framework) -> None:
        name = framework()
        module: Any = importlib.import_module(f"{name}.model")
        found = target_source.from_source(module.__name__, "train", MODEL)
        assert found.with_live(module, "train").replaced_by is None
        module.train = test_somewhere_else
        assert found.with_live(module, "train").replaced_by == f"{__name__}.test_somewhere_else"
        module.train = len  # a function without Python code
        assert found.with_live(module, "train").replaced_by is None

    def test_what_is_inherited_is_not_there(self, framework: Framework) -> None:
        module = importlib.import_module(f"{framework()}.model")
        with pytest.raises(AttributeError, match=r"Trainer'> does not define 'fit'"):
            target_source.resolve(module, "Trainer.fit")


def test_somewhere_else() -> None:
    """A function of another file."""


def verdict(text: str, folder: Path, **options: Any) -> tuple[str, str]:
    (folder / "framework").mkdir(exist_ok=True)
    (folder / "framework" / "__init__.py").write_text("")
    (folder / "framework" / "model.py").write_text(text)
    judgement = judge_site(Site("framework.model", "train", tag, **options), open_source(str(folder)))
    assert judgement.fingerprint == "" or len(judgement.fingerprint) == 12
    return judgement.state, judgement.reason


class TestVerdicts:
    def test_words(self, tmp_path: Path) -> None:
        generator = "it is a generator or a coroutine function: it runs after the call is over"
        plain = "def train(model): return model.config"
        for text, options, reason in (
            (plain, {"parameters": ("data", "steps")}, "it no longer takes data, steps"),
            (plain, {"requires_names": ("data", "config", "steps")}, "its body no longer uses data, steps"),
            ("def train(model): yield", {}, generator),
            ("async def train(model): ...", {}, generator),
        ):
            assert verdict(text, tmp_path, **options) == ("drifted", reason)

    def test_what_cannot_be_parsed(self, tmp_path: Path) -> None:
        state, reason = verdict("def train(model:", tmp_path)
        assert state == "failed"
        assert reason.startswith("framework.model cannot be parsed: ")

    def test_in_the_source_but_not_in_the_module(self, framework: Framework, tmp_path: Path) -> None:
        name = framework()
        module: Any = importlib.import_module(f"{name}.model")
        del module.train
        judgement = judge_site(Site(f"{name}.model", "train", tag), open_source(str(tmp_path)), module)
        assert judgement.state == "missing"
        assert judgement.reason.startswith(
            f"{name}.model.train is in the source but not in the module: <module"
        )


PROPERTIES = """
from functools import cached_property, cache

class Ours:
    def __init__(self, function): self.__wrapped__ = function
    def __get__(self, instance, owner=None): return self.__wrapped__(instance)
    def __set__(self, instance, value): ...

class Trainer:
    @property
    def first(self): return 1
    @first.setter
    def first(self, value): ...
    @cached_property
    def second(self): return 2
    @Ours
    def third(self): return 3
    @cache
    def step(self): return 4
"""


@pytest.mark.parametrize(
    ("name", "kind"), [("first", "property"), ("second", "cached_property"), ("third", "Ours"), ("step", "")]
)
def test_what_runs_when_it_is_read_is_drift(tagged: Tagged, name: str, kind: str) -> None:
    framework = tagged(f"Trainer.{name}", files={"model": PROPERTIES})
    text = open_source(str(Path(importlib.import_module(framework).__path__[0]).parent))
    reason = f"it is a {kind}, which runs when it is read and not when it is called"
    expected = ("drifted", reason) if kind else ("applied", "in place")
    if kind.endswith("property"):
        judged = judge_site(Site(f"{framework}.model", f"Trainer.{name}", tag), text)
        assert (judged.state, judged.reason) == expected
    apply()
    model = importlib.import_module(f"{framework}.model")
    assert [(site.state, site.reason) for site in status()] == [expected]
    if not kind:
        assert model.Trainer().step() == ("patched", 4)


class TestStatus:
    def test_every_state_has_its_words_and_its_code(self, tagged: Tagged) -> None:
        name = tagged("train")
        apply()
        [waiting] = status()
        assert (waiting.state, waiting.reason) == ("waiting", f"waits for the import of {name}.model")
        module: Any = importlib.import_module(f"{name}.model")
        [applied] = status()
        assert (applied.state, applied.reason) == ("applied", "in place")
        expected = target_source.from_source(f"{name}.model", "train", MODEL).fingerprint
        assert applied.fingerprint == expected

        layer, module.train = module.train, test_somewhere_else
        apply()
        [lost] = status()
        assert lost.state == "lost" and lost.fingerprint == expected
        module.train = layer
        [again] = status()
        assert (again.state, again.reason, again.fingerprint) == ("applied", "in place", expected)

        revert()
        [reverted] = status()
        assert (reverted.state, reverted.reason) == ("reverted", "reverted")


class TestAdapters:
    def test_a_call_that_was_refused_leaves_no_must_behind(
        self, engine: Engine, framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replaced = framework()
        module: Any = importlib.import_module(f"{replaced}.model")
        module.train = test_somewhere_else
        engine["tagging"] = patch_of("later_framework", "train")
        apply()
        engine["tagging"].wrap(module.__name__, "train")(tag)
        with pytest.raises(PatchError, match="conflict: replaced by"):
            apply("tagging")
        (tmp_path / "more" / "later_framework").mkdir(parents=True)
        (tmp_path / "more" / "later_framework" / "model.py").write_text("def save(model): ...")
        monkeypatch.syspath_prepend(str(tmp_path / "more"))
        importlib.import_module("later_framework.model")  # a warning, as it was before


class TestOwnFaults:
    """What is wrong with this package itself costs its users one line."""

    @pytest.fixture
    def broken(self, framework: Framework, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
        name = framework()
        engine["tagging"] = patch_of(name, "train")

        def apply_ready(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a file\nis damaged")

        self.break_it = lambda: monkeypatch.setattr(installer.installer, "_apply_ready", apply_ready)
        return name

    def test_one_line(self, broken: str, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(PatchError):  # which is no fault of this package
            installer.installer.add([patch_of("pathlib", "gone")], Settings(), Claim(True, lasts=True))
        apply()
        self.break_it()
        importlib.import_module(f"{broken}.model")
        importlib.import_module(f"{broken}.actor")
        assert caplog.messages == [
            "megatron_rl_patches: internal error: RuntimeError: a file is damaged; continuing "
            "without patches here"
        ]

    def test_an_error_where_it_is_a_must(self, broken: str) -> None:
        apply("tagging")
        self.break_it()
        with pytest.raises(PatchError, match="internal error: RuntimeError: a file is damaged"):
            importlib.import_module(f"{broken}.model")


def test_every_site_of_every_patch_is_judged(framework: Framework, tmp_path: Path) -> None:
    name = framework()
    patches = [patch_of(name, "train", "gone"), patch_of(name, "save", name="other")]
    patches[1].wrap("nowhere.model", "train")(tag)
    statuses = judge_all(open_source(f"checkout={tmp_path}"), patches, Settings())
    gone = f"{name}.model.gone: {name}.model does not define gone"
    judged = [(f.patch, f.framework, f.target, f.state, f.reason) for f in statuses]
    assert judged == [
        ("tagging", name, f"{name}.model.train", "missing", f"another site cannot take effect: {gone}"),
        ("tagging", name, f"{name}.model.gone", "missing", gone.partition(": ")[2]),
        ("other", name, f"{name}.model.save", "fits", "has the bug that the patch fixes"),
        ("other", "nowhere", "nowhere.model.train", "absent", "no nowhere in checkout"),
    ]
    assert [bool(f.fingerprint) for f in statuses] == [False, False, True, False]


def test_a_site_that_only_helps_is_not_needed_where_what_it_helps_is_not(
    framework: Framework, tmp_path: Path, engine: Engine
) -> None:
    name = framework()
    patch = engine["tagging"] = patch_of(name, "train", skip_if=lambda code: "it is fine")
    patch.wrap(f"{name}.model", "save", helps=["train", "gone"])(tag)
    patch.wrap(f"{name}.model", "moved", helps="train")(tag)
    apply("tagging")
    module = importlib.import_module(f"{name}.model")
    helping = f"it only helps {name}.model.train, which is not needed: it is fine"
    for statuses in judge_all(open_source(str(tmp_path)), [patch], Settings()), status():
        assert [s.state for s in statuses] == ["not needed"] * 3
        assert [s.reason for s in statuses] == ["it is fine", helping, helping]
    assert vars(module)["save"].__class__.__name__ == "function"

    # Where one of the sites that it helps is needed, it has to fit.
    patch.wrap(f"{name}.model", "Trainer.step")(tag)
    patch.wrap(f"{name}.model", "Trainer.fit", helps=("train", "Trainer.step"))(tag)
    statuses = judge_all(open_source(str(tmp_path)), [patch], Settings())
    assert [s.state for s in statuses] == ["not needed"] * 3 + ["missing"] * 2


def test_what_only_helps_is_taken_away_when_what_it_helps_turns_out_not_to_be_needed(
    framework: Framework, engine: Engine, tmp_path: Path
) -> None:
    name = framework()
    patch = engine["tagging"] = patch_of(
        name, "train", skip_if=lambda code: None if code.mentions("model") else "it is fine"
    )
    patch.wrap(f"{name}.actor", "evaluate", helps="train")(tag)
    (tmp_path / name / "actor.py").write_text("def evaluate(): return 1")
    apply()
    actor = importlib.import_module(f"{name}.actor")
    assert [s.state for s in status()] == ["waiting", "applied"]
    (tmp_path / name / "model.py").write_text("def train(): ...")  # as a generated module is
    importlib.import_module(f"{name}.model")
    assert [s.state for s in status()] == ["not needed"] * 2
    assert actor.evaluate() == 1 and type(actor.evaluate).__name__ == "function"


class TestLost:
    def test_overwritten(self, patched: Any) -> None:

        def mine(model: object) -> None: ...

        patched.train = mine
        [lost] = status()
        assert (lost.state, lost.reason) == (
            "lost",
            f"overwritten by {__name__}.TestLost.test_overwritten.<locals>.mine; "
            "in force only if that calls what it replaced",
        )
        patched.train = 1
        [lost] = status()
        assert lost.reason.startswith("overwritten by ?.?;")

    def test_gone(self, tagged: Tagged) -> None:
        name = tagged("train")
        apply()
        del importlib.import_module(f"{name}.model").train
        [lost] = status()
        assert (lost.state, lost.reason) == ("lost", f"{name}.model.train is gone")

    def test_a_class_that_was_imported_anew(self, tagged: Tagged) -> None:
        name = tagged("Trainer.step")
        apply()
        _execute_again(importlib.import_module(f"{name}.model"))
        [lost] = status()
        assert (lost.state, lost.reason) == ("lost", f"{name}.model was imported anew; call apply() again")

    def test_a_replacement_in_a_class_that_was_imported_anew_is_a_conflict(self, tagged: Tagged) -> None:
        name = tagged("Trainer.step")
        apply()
        module: Any = importlib.import_module(f"{name}.model")
        _execute_again(module)
        module.Trainer.step = test_somewhere_else
        apply()
        assert [s.state for s in status()] == ["conflict"]


def _execute_again(module: ModuleType) -> None:
    """As a reload, which no import hook sees."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
