"""Judging code, and telling of it: each verdict with its words, its state and its fingerprint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.judge import judge_all, judge_site
from megatron_rl_patches.engine.patch import Site
from megatron_rl_patches.engine.records import Claim
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches.engine.target_source import TargetSource, from_source, resolve
from tests.worlds.files import write

from .conftest import MODEL, Engine, Framework, patch_of, states, tag, verdicts

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


def test_somewhere_else() -> None:
    """A function of another file."""


def read(text: str, name: str = "train") -> TargetSource:
    return from_source("framework.model", name, text)


def test_questions_of_the_function_and_of_its_module() -> None:
    target = read(LOOP)
    assert target.mentions("enable") and not target.mentions("chunks")
    assert target.mentions("chunks", in_module=True)
    assert target.asserts("no_sync_func", in_loop=True) and not target.asserts("model")
    assert target.cleans_up("enable") and target.cleans_up() and not target.cleans_up("step")
    assert target.looks_up_unchecked("handles") and not target.looks_up_unchecked("model")
    for checked in ("handles.get(chunk) and handles[chunk]", "handles[chunk] if handles else None"):
        text = f"def train(model):\n    for chunk in model:\n        if handles: {checked}\n"
        assert not read(text).looks_up_unchecked("handles")
    assert target.defines("save") and not target.defines("enable")
    [call] = target.calls("step")
    assert (call.function, call.keywords) == ("optimizer.step", {"wait": ...})
    assert [call.keywords for call in target.calls("scale", in_module=True)] == [{"wide": True}]
    assert len(target.calls()) == 4


def test_where_a_definition_is_found() -> None:
    """Under ``if`` and ``try``, too; and the last binding counts."""
    for name in ("train", "evaluate", "save", "load", "log"):
        found = read(EVERYWHERE, name)
        assert found.target == f"framework.model.{name}"
        assert found.function is not None and found.function.name == name
    defined, imported = "def train(model): ...\n", "from .. import train\n"
    found = read(defined + imported)
    assert (found.function, found.imported_from) == (None, "..")
    found = read(imported + defined)
    assert found.function is not None and found.imported_from is None


def test_where_a_live_function_comes_from(framework: Framework) -> None:
    module = framework().model
    found = from_source(module.__name__, "train", MODEL)
    # The last one is a function without Python code.
    for live, replaced_by in (
        (module.train, None),
        (test_somewhere_else, f"{__name__}.test_somewhere_else"),
        (len, None),
    ):
        module.train = live
        assert found.with_live(module, "train").replaced_by == replaced_by
    with pytest.raises(AttributeError, match=r"Trainer'> does not define 'fit'"):
        resolve(module, "Trainer.fit")  # which is inherited


GENERATOR = "it is a generator or a coroutine function: it runs after the call is over"
CONFIG = "def train(model): return model.config"


@pytest.mark.parametrize(
    ("text", "options", "state", "reason"),
    [
        (CONFIG, {"parameters": ("data", "steps")}, "drifted", "it no longer takes data, steps"),
        (
            CONFIG,
            {"requires_names": ("data", "config", "steps")},
            "drifted",
            "its body no longer uses data, steps",
        ),
        ("def train(model): yield", {}, "drifted", GENERATOR),
        ("async def train(model): ...", {}, "drifted", GENERATOR),
        ("def train(model:", {}, "failed", "framework.model cannot be parsed: "),
    ],
)
def test_words(text: str, options: Any, state: str, reason: str, tmp_path: Path) -> None:
    source = open_source(str(write(tmp_path, {"framework/__init__.py": "", "framework/model.py": text})))
    judgement = judge_site(Site("framework.model", "train", tag, **options), source)
    assert len(judgement.fingerprint) in (0, 12)
    assert judgement.state == state and judgement.reason.startswith(reason)


def test_in_the_source_but_not_in_the_module(framework: Framework, tmp_path: Path) -> None:
    module = framework().model
    del module.train
    judgement = judge_site(Site(module.__name__, "train", tag), open_source(str(tmp_path)), module)
    words = f"{module.__name__}.train is in the source but not in the module: <module"
    assert judgement.state == "missing" and judgement.reason.startswith(words)


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
def test_what_runs_when_it_is_read_is_drift(tagged: Framework, tmp_path: Path, name: str, kind: str) -> None:
    package = tagged(f"Trainer.{name}", files={"model": PROPERTIES})
    reason = f"it is a {kind}, which runs when it is read and not when it is called"
    expected = ("drifted", reason) if kind else ("applied", "in place")
    if kind.endswith("property"):
        judged = judge_site(Site(f"{package}.model", f"Trainer.{name}", tag), open_source(str(tmp_path)))
        assert (judged.state, judged.reason) == expected
    apply()
    model = package.model
    assert verdicts() == {f"model.Trainer.{name}": expected}
    assert kind or model.Trainer().step() == ("patched", 4)


def test_every_state_has_its_words_and_its_code(tagged: Framework) -> None:
    package = tagged("train")

    def seen() -> tuple[str, str]:
        [site] = status()
        assert site.state in ("waiting", "reverted") or site.fingerprint == expected
        return site.state, site.reason

    expected = from_source(f"{package}.model", "train", MODEL).fingerprint
    apply()
    assert seen() == ("waiting", f"waits for the import of {package}.model")
    module = package.model
    assert seen() == ("applied", "in place")
    layer, module.train = module.train, test_somewhere_else
    apply()
    only_if = "in force only if that calls what it replaced"
    assert seen() == ("lost", f"overwritten by {__name__}.test_somewhere_else; {only_if}")
    module.train = 1
    assert seen() == ("lost", f"overwritten by ?.?; {only_if}")
    del module.train
    assert seen() == ("lost", f"{package}.model.train is gone")
    module.train = layer
    assert seen() == ("applied", "in place")
    revert()
    assert seen() == ("reverted", "reverted")


def test_a_class_that_was_imported_anew(tagged: Framework) -> None:
    package = tagged("Trainer.step")
    apply()
    module = package.model
    _execute_again(module)
    anew = f"{package}.model was imported anew; call apply() again"
    assert verdicts() == {"model.Trainer.step": ("lost", anew)}
    module.Trainer.step = test_somewhere_else
    apply()
    assert states() == {"model.Trainer.step": "conflict"}


def _execute_again(module: ModuleType) -> None:
    """As a reload, which no import hook sees."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)


def test_a_call_that_was_refused_leaves_no_must_behind(
    engine: Engine, framework: Framework, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = framework().model
    module.train = test_somewhere_else
    engine["tagging"] = patch_of("later_framework", "train")
    apply()
    engine["tagging"].wrap(module.__name__, "train")(tag)
    with pytest.raises(PatchError, match="conflict: replaced by"):
        apply("tagging")
    write(tmp_path, {"later_framework/model.py": "def save(model): ..."})
    import later_framework.model  # noqa: F401  # a warning, as it was before


@pytest.mark.parametrize("is_must", [False, True])
def test_a_fault_of_this_package_costs_one_line_or_an_error_where_it_is_a_must(
    tagged: Framework, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_must: bool
) -> None:
    package = tagged("train")
    with pytest.raises(PatchError):  # which is no fault of this package
        installer.installer.add([patch_of("pathlib", "gone")], Settings(), Claim(True, lasts=True))
    apply(*["tagging"] * is_must)

    def apply_ready(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a file\nis damaged")

    monkeypatch.setattr(installer.installer, "_apply_ready", apply_ready)
    message = "internal error: RuntimeError: a file is damaged"
    if is_must:
        with pytest.raises(PatchError, match=message):
            package.model  # noqa: B018
    else:
        assert package.model and package.actor
        assert caplog.messages == [f"megatron_rl_patches: {message}; continuing without patches here"]


def test_every_site_of_every_patch_is_judged(framework: Framework, tmp_path: Path) -> None:
    package = framework()
    patches = [patch_of(package, "train", "gone"), patch_of(package, "save", name="other")]
    patches[1].wrap("nowhere.model", "train")(tag)
    statuses = judge_all(open_source(f"checkout={tmp_path}"), patches, Settings())
    model = f"{package}.model"
    gone = f"{model} does not define gone"
    cannot = f"another site cannot take effect: {model}.gone: {gone}"
    judged = [(f.patch, f.framework, f.target, f.state, f.reason) for f in statuses]
    assert judged == [
        ("tagging", package.name, f"{model}.train", "missing", cannot),
        ("tagging", package.name, f"{model}.gone", "missing", gone),
        ("other", package.name, f"{model}.save", "fits", "has the bug that the patch fixes"),
        ("other", "nowhere", "nowhere.model.train", "absent", "no nowhere in checkout"),
    ]
    assert [bool(f.fingerprint) for f in statuses] == [False, False, True, False]


def test_a_site_that_only_helps_is_not_needed_where_what_it_helps_is_not(
    tagged: Framework, tmp_path: Path, engine: Engine
) -> None:
    package = tagged("train", skip_if=lambda code: "it is fine")
    patch = engine["tagging"]
    patch.wrap(f"{package}.model", "save", helps=["train", "gone"])(tag)
    patch.wrap(f"{package}.model", "moved", helps="train")(tag)
    apply("tagging")
    module = package.model
    helping = f"it only helps {package}.model.train, which is not needed: it is fine"
    for statuses in judge_all(open_source(str(tmp_path)), [patch], Settings()), status():
        assert [s.state for s in statuses] == ["not needed"] * 3
        assert [s.reason for s in statuses] == ["it is fine", helping, helping]
    assert vars(module)["save"].__class__.__name__ == "function"

    # Where one of the sites that it helps is needed, it has to fit.
    patch.wrap(f"{package}.model", "Trainer.step")(tag)
    patch.wrap(f"{package}.model", "Trainer.fit", helps=("train", "Trainer.step"))(tag)
    statuses = judge_all(open_source(str(tmp_path)), [patch], Settings())
    assert [s.state for s in statuses] == ["not needed"] * 3 + ["missing"] * 2


def test_what_only_helps_is_taken_away_when_what_it_helps_turns_out_not_to_be_needed(
    tagged: Framework, engine: Engine, tmp_path: Path
) -> None:
    needed = {"actor": "def evaluate(): return 1"}
    package = tagged("train", files=needed, skip_if=lambda code: None if code.mentions("model") else "fine")
    engine["tagging"].wrap(f"{package}.actor", "evaluate", helps="train")(tag)
    apply()
    actor = package.actor
    assert list(states().values()) == ["waiting", "applied"]
    (tmp_path / package.name / "model.py").write_text("def train(): ...")  # as a generated module is
    assert package.model
    assert list(states().values()) == ["not needed"] * 2
    assert actor.evaluate() == 1 and type(actor.evaluate).__name__ == "function"
