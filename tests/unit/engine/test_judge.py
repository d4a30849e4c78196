"""Judging code: verdicts and their words, and what asking by name, for all and strictly makes of them."""

import ast
import gc
import importlib
import sys
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import Mock

import pytest
from pytest import LogCaptureFixture, MonkeyPatch

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.judge import judge_all, judge_site
from megatron_rl_patches.engine.patch import Patch, Site
from megatron_rl_patches.engine.records import ApplyCall
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches.engine.target_source import TargetSource, from_source
from tests.worlds.files import write

from .conftest import MODEL, PLAIN, REFUSING, REPLACED, Engine, Framework, patch_of, states, tag, verdicts

DEFINED = "def train(model): ..."
#: Places of a definition, which are looked at although they may not run.
PLACES = (
    *("if fast: {}", "if fast: pass\nelse: {}", "try: {}\nfinally: pass", "try: pass\nfinally: {}"),
    "try: pass\nexcept ImportError: {}",
)


def read(text: str) -> TargetSource:
    return from_source("framework.model", "train", text)


ELSEWHERE = "not needed: this release has it in framework."


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (DEFINED, None, ["fits", f"{ELSEWHERE}old"]),
        ("", DEFINED, [f"{ELSEWHERE}new", "fits"]),  # a folder now
        ("from framework.new import train", DEFINED, [f"{ELSEWHERE}new", "fits"]),
        (None, None, ["missing: no source of", "missing: no source of"]),
    ],
)
def test_a_function_that_has_moved(tmp_path: Path, old: Any, new: Any, expected: list[str]) -> None:
    """Another framework that has it in a module of that name does not count."""
    patch = Patch("moved", "a function in one of two modules")
    patch.wrap(["framework.old", "framework.new", "other.old"], "train", to="adapter")
    texts = {"__init__.py": "", "old.py": old, "new.py": new}
    write(tmp_path, {f"framework/{name}": text for name, text in texts.items() if text is not None})
    write(tmp_path, {"other/__init__.py": "", "other/old.py": DEFINED})
    found = judge_all(open_source(str(tmp_path)), [patch], Settings())
    assert found[-1].state == "fits"
    for one, start in zip(found, expected, strict=False):
        assert f"{one.state}: {one.reason}".startswith(start)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("step()", {}),
        ("if a: step()\n    elif b: c", {"a": True}),
        ("if a: pass\n    elif b: pass\n    else: step()", {"a": False, "b": False}),
        ("if a: return\n    if b: pass\n    if c: d = step()", {"a": False, "c": True}),
        ("for b in c:\n        if a: continue\n        step()", {"a": False}),
        ("if a:\n        if b: return\n    c if d else step()", {"d": False}),
        ("step()\n    if a: return", {}),
    ],
)
def test_the_tests_before_a_call(body: str, expected: dict[str, bool]) -> None:
    assert read(f"def train(model):\n    {body}").tests_before("step") == [expected]


def test_where_a_definition_is_found() -> None:
    """Under ``if`` and ``try``, too; and the last binding counts."""
    for place in PLACES:
        found = read(place.format(f"\n    {DEFINED}"))
        assert found.function is not None and found.function.name == "train"
    imported = "from .. import train"
    found = read(f"{DEFINED}\n{imported}")
    assert (found.function, found.imported_from) == (None, "..")
    found = read(f"{imported}\n{DEFINED}")
    assert found.function is not None and found.imported_from is None


def test_the_source_and_the_module_differ_or_do_not_parse(framework: Framework, tmp_path: Path) -> None:
    module = framework().model
    del module.train
    judgement = judge_site(Site(module.__name__, "train", tag), open_source(str(tmp_path)), module)
    words = f"{module.__name__}.train is in the source but not in the module: <module"
    assert judgement.state == "missing" and judgement.reason.startswith(words)
    write(tmp_path, {f"{module.__name__.replace('.', '/')}.py": "def train(model:"})
    judgement = judge_site(Site(module.__name__, "train", tag), open_source(str(tmp_path)))
    assert judgement.state == "failed"
    assert judgement.reason.startswith(f"{module.__name__} cannot be parsed: ")


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


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_a_module_is_parsed(is_on: bool) -> None:
    """With torch imported, a full collection takes 0.2 s. What the user has switched off stays off."""
    collections: list[str] = []
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        read(f"is_on = {is_on}\n" + "x = [a, b]\n" * 20_000)
        assert gc.isenabled() == is_on and len(collections) < 20
    finally:
        gc.callbacks.pop()
        (gc.enable if was_on else gc.disable)()


def test_a_file_is_parsed_once_for_all_its_sites_and_judged_again_when_it_changes(
    tagged: Framework, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    asked = Mock(return_value=None)
    package = tagged("train", "save", files={"model": f"{MODEL}\n# not parsed before"}, skip_if=asked)
    parse = Mock(side_effect=ast.parse)
    monkeypatch.setattr(ast, "parse", parse)
    for _ in range(3):
        apply("tagging")
        assert package.actor and package.model
        revert()
    assert (parse.call_count, asked.call_count) == (1, 2)
    (tmp_path / package.name / "model.py").write_text(f"{MODEL}\n# changed")
    apply("tagging")
    assert (parse.call_count, asked.call_count) == (2, 4)


@pytest.mark.parametrize(
    ("name", "kind"), [("first", "property"), ("second", "cached_property"), ("third", "Ours"), ("step", "")]
)
def test_what_runs_when_it_is_read_is_drift(tagged: Framework, tmp_path: Path, name: str, kind: str) -> None:
    package = tagged(f"Trainer.{name}", files={"model": PROPERTIES})
    reason = f"it is a {kind}, which runs when it is read and not when it is called"
    expected = ("drifted", reason) if kind else ("applied", "in place")
    judged = judge_site(Site(f"{package}.model", f"Trainer.{name}", tag), open_source(str(tmp_path)))
    assert (judged.state == "drifted") is kind.endswith("property")
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
    assert len(expected) == 12
    apply()
    assert seen() == ("waiting", f"waits for the import of {package}.model")
    module = package.model
    assert seen() == ("applied", "in place")
    layer = module.train
    module.train = lambda model: ("third", layer(model))
    for _ in range(2):
        overwritten = f"overwritten by {__name__}.{module.train.__qualname__}"
        assert seen() == ("lost", f"{overwritten}; the patch works only if that calls the patched function")
        assert module.train("m") == ("third", ("patched", PLAIN))
        apply()
    module.train = 1
    assert seen()[1].startswith("overwritten by ?.?; ")
    del module.train
    assert seen() == ("lost", f"{package}.model.train is gone")
    module.train = layer
    assert seen() == ("applied", "in place")
    module.train = original = layer.__wrapped__
    assert seen()[0] == "lost"
    apply()
    assert seen()[0] == "applied" and module.train("m") == ("patched", PLAIN)
    revert()
    assert seen() == ("reverted", "reverted") and module.train is original


def test_a_class_that_was_imported_anew(tagged: Framework) -> None:
    package = tagged("Trainer.step")
    apply()
    module = package.model
    module.__spec__.loader.exec_module(module)  # as a reload, which no import hook sees
    anew = f"{package}.model was imported anew; call apply() again"
    assert verdicts() == {"model.Trainer.step": ("lost", anew)}
    module.Trainer.step = read
    apply()
    assert states() == {"model.Trainer.step": "conflict"}


def test_a_refused_call_leaves_no_must(engine: Engine, framework: Framework, tmp_path: Path) -> None:
    module = framework().model
    module.train = read
    engine["tagging"] = patch_of("later_framework", "train")
    apply()
    engine["tagging"].wrap(module.__name__, "train")(tag)
    with pytest.raises(PatchError, match="conflict: replaced by"):
        apply("tagging")
    write(tmp_path, {"later_framework/model.py": "def save(model): ..."})
    import later_framework.model  # noqa: F401  # a warning, as it was before


@pytest.mark.parametrize("is_must", [False, True])
def test_a_fault_of_this_package_costs_one_line_or_an_error_where_it_is_a_must(
    tagged: Framework, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, is_must: bool
) -> None:
    package = tagged("train")
    with pytest.raises(PatchError):  # which is no fault of this package
        installer.installer.add([patch_of("pathlib", "gone")], Settings(), ApplyCall(True, lasts=True))
    apply(*["tagging"] * is_must)
    damaged = Mock(side_effect=RuntimeError("a file\nis damaged"))
    monkeypatch.setattr(installer.installer, "_apply_ready", damaged)
    message = "internal error: RuntimeError: a file is damaged"
    if is_must:
        with pytest.raises(PatchError, match=message):
            package.model  # noqa: B018
    else:
        assert package.model and package.actor
        [line] = caplog.messages
        assert line.startswith(f"megatron_rl_patches: {message}. The program continues without patches here")


def test_every_site_of_every_patch_is_judged(framework: Framework, tmp_path: Path) -> None:
    package = framework()
    patches = [patch_of(package, "train", "gone"), patch_of(package, "save", name="other")]
    patches[1].wrap("nowhere.model", "train")(tag)
    statuses = judge_all(open_source(f"checkout={tmp_path}"), patches, Settings())
    model = f"{package}.model"
    gone = f"{model} does not define gone"
    cannot = f"another function of this patch cannot be patched: {model}.gone: {gone}"
    judged = [(f.patch, f.framework, f.target, f.state, f.reason) for f in statuses]
    assert judged == [
        ("tagging", package.name, f"{model}.train", "missing", cannot),
        ("tagging", package.name, f"{model}.gone", "missing", gone),
        ("other", package.name, f"{model}.save", "fits", "has the bug that the patch fixes"),
        ("other", "nowhere", "nowhere.model.train", "absent", "no nowhere in checkout"),
    ]
    assert [bool(f.fingerprint) for f in statuses] == [False, False, True, False]


def test_a_site_that_helps_nothing_is_not_needed(tagged: Framework, tmp_path: Path, engine: Engine) -> None:
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


def test_what_helps_goes_with_what_it_helps(tagged: Framework, engine: Engine, tmp_path: Path) -> None:
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


def test_states_print_as_a_table(framework: Framework, engine: Engine) -> None:
    assert str(status()) == "no patch is selected"
    package = framework()
    engine["tagging"] = patch_of(package, "train", "save")
    engine["other"] = patch_of(package, "run", name="other")
    engine["nowhere"] = patch_of("no_such_framework", "train", name="nowhere")
    assert package.model
    apply()
    header, *rows, fault = str(status()).splitlines()
    assert header.split() == ["patch", "framework", "functions"]
    counted = [["tagging", package.name, "2 patched"], ["other", package.name, "1 missing"]]
    counted += [["nowhere", "-", "absent"]]
    assert [row.split(maxsplit=2) for row in rows] == counted
    assert "does not define run" in fault
    revert()
    assert [(site.patch, site.state) for site in status()] == [("tagging", "reverted")] * 2


GENERATOR = "it is a generator or a coroutine function: it runs after the call is over"
CONFIG = "def train(model): return model.config"


@pytest.mark.parametrize(
    ("text", "site", "options", "state", "reason"),
    [
        (MODEL, "run", {}, "missing", "{}.model does not define run"),
        (MODEL, "Trainer.run", {}, "missing", "{}.model does not define Trainer.run"),
        (CONFIG, "train", {"parameters": ("a", "model", "b")}, "drifted", "it no longer takes a, b"),
        (CONFIG, "train", {"requires_names": ("a", "config")}, "drifted", "its body no longer uses a"),
        (CONFIG, "train", {"skip_if": lambda facts: 1 / 0}, "failed", "checking it raised ZeroDivisionError"),
        ("def train(model): yield", "train", {}, "drifted", GENERATOR),
        ("async def train(model): ...", "train", {}, "drifted", GENERATOR),
        ("from .loop import train", "train", {}, "drifted", "moved: {}.model imports it from .loop"),
    ],
)
@pytest.mark.parametrize("imported_first", [True, False])
def test_a_site_that_does_not_fit_is_left_alone(
    tagged: Framework, text: str, site: str, options: Any, state: str, reason: str, imported_first: bool
) -> None:
    package = tagged(site, files={"model": text, "loop": CONFIG}, **options)
    assert not imported_first or package.model
    apply()
    assert type(package.model.train) is FunctionType
    [(found, because)] = verdicts().values()
    assert found == state and because.startswith(reason.format(package))


def test_a_missing_module_shows_before_anything_is_imported(framework: Framework, engine: Engine) -> None:
    patch = engine["tagging"] = Patch("tagging", "")
    patch.wrap(f"{framework()}.gone", "train")(tag)
    with pytest.raises(PatchError, match=r"no source of module \w+\.gone is found"):
        apply("tagging")
    assert status() == []
    apply()
    assert states() == {"gone.train": "missing"}


def test_absent_and_not_needed_are_never_an_error(engine: Engine, tagged: Framework) -> None:
    engine["nowhere"] = patch_of("no_such_framework", "train", name="nowhere")
    package = tagged("save", skip_if=lambda facts: "mended upstream")
    apply("tagging", "nowhere", strict=True)
    assert package.model.train("m") == PLAIN
    not_needed, absent = ("not needed", "mended upstream"), ("absent", "no_such_framework is not installed")
    assert verdicts() == {"model.save": not_needed, "model.train": absent}


@pytest.mark.parametrize("first", ["model", "other"])
@pytest.mark.parametrize(("model", "state"), [(None, "missing"), (REPLACED, "conflict")])
def test_all_or_none(engine: Engine, tagged: Framework, first: str, model: str | None, state: str) -> None:
    files = {"other": "def go(model):\n    return 'gone'", **({"model": model} if model else {})}
    package = tagged("train", *([] if model else ["run"]), files=files)
    engine["tagging"].wrap(f"{package}.other", "go")(tag)
    apply()
    for module in (first, "model", "other"):
        importlib.import_module(f"{package}.{module}")
    assert set(states().values()) == {state}
    assert package.other.go("m") == "gone"
    if not model:
        assert package.model.train("m") == PLAIN
        for target in ("model.train", "other.go"):
            reason = verdicts()[target][1]
            assert reason.startswith(f"another function of this patch cannot be patched: {package}.model.run")


@pytest.mark.parametrize("calls", [[(), ("tagging",)], [("tagging",), ()]])
def test_by_name_is_a_must_whatever_else_is_asked(tagged: Framework, calls: list[tuple[str, ...]]) -> None:
    package = tagged("train", files={"model": REPLACED})
    for names in calls:
        apply(*names)
    for _ in range(2):
        with pytest.raises(PatchError, match="conflict"):
            package.model  # noqa: B018


def test_strict_on_half_imported_modules_fails_no_other(tagged: Framework, caplog: LogCaptureFixture) -> None:
    half = "import megatron_rl_patches\nmegatron_rl_patches.apply(strict=True)\nglobals()['train'] = len\n"
    package = tagged("train", files={"model": half + REPLACED, "later": ""})
    assert package.model and package.later
    assert "conflict" in caplog.text


def test_a_target_that_cannot_be_wrapped_fails_and_nothing_stays(tagged: Framework) -> None:
    package = tagged("train", "Trainer.step", files={"model": REFUSING.format("TypeError('frozen')")})
    apply()
    assert package.model.train("m") == PLAIN
    assert verdicts()["model.Trainer.step"] == ("failed", "wrapping it raised TypeError: frozen")
    assert states()["model.train"] == "failed"


def test_frameworks_stand_alone_but_by_name_all_are_a_must(framework: Framework, engine: Engine) -> None:
    good, bad = framework(), framework(model="")
    engine["tagging"] = patch_of(good, "train")
    engine["tagging"].wrap(f"{bad}.model", "train")(tag)
    original = good.model.train
    with pytest.raises(PatchError, match=f"{bad}.model.train: missing") as caught:
        apply("tagging")
    lines = str(caught.value).splitlines()
    assert [line[:10] for line in lines] == ["cannot tak", "  tagging:", "The code o"]
    assert lines[-1].endswith("or use a release in docs/compatibility.md.")
    assert "(apply(exclude=...), MEGATRON_RL_PATCHES=1,-NAME)" in lines[-1]
    assert isinstance(caught.value, RuntimeError) and not isinstance(caught.value, ImportError)
    assert good.model.train is original
    assert status() == []
    apply()
    assert good.model.train("m")[0] == "patched" and bad.model
    assert [site.state for site in status()] == ["applied", "missing"]


def test_for_all_is_a_may_unless_strict(tagged: Framework) -> None:
    package = tagged("run")
    apply()
    revert()
    for options in ({"strict": True}, {"settings": Settings(strict=True)}):
        with pytest.raises(PatchError):
            apply(**options)
    apply(strict=False, settings=Settings(strict=True))
    revert()
    activate_from_environment({"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_STRICT": "1"})
    with pytest.raises(PatchError, match="missing"):
        package.model  # noqa: B018
    assert f"{package}.model" not in sys.modules
    revert()
    assert package.model
