"""Nobody has to guess whether a patch is in place."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch

from megatron_rl_patches import __version__, apply
from megatron_rl_patches.common.messages import is_rank_0
from megatron_rl_patches.engine import statuses
from megatron_rl_patches.engine.statuses import Announcer, SiteStatus, summary
from tests.worlds.program import run_program

from .conftest import Framework


@pytest.fixture(autouse=True)
def single_process(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("has_handler", "level"), [(True, "INFO"), (True, "WARNING"), (False, "INFO")])
def test_one_summary_line_at_the_first_call(
    tagged: Framework, monkeypatch: MonkeyPatch, caplog: Any, capsys: Any, has_handler: bool, level: str
) -> None:
    package = tagged("train", "save")
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: has_handler)
    caplog.set_level(level)
    apply()
    assert package.model and caplog.messages == []
    for _ in range(3):
        package.model.train("m")
    is_logged = has_handler and level == "INFO"
    [line] = caplog.messages if is_logged else capsys.readouterr().err.splitlines()
    assert line == f"megatron_rl_patches {__version__} in {package}: tagging"


@pytest.mark.parametrize("level", [logging.ERROR, logging.WARNING])
def test_a_skipped_site_is_warned_of_once_unless_our_logger_is_quiet(
    tagged: Framework, caplog: LogCaptureFixture, capsys: CaptureFixture[str], level: int
) -> None:
    package = tagged("run")
    caplog.set_level(level, "megatron_rl_patches")
    for _ in range(2):
        apply()
        package.model.train("m")
    assert capsys.readouterr().err == ""
    assert len(caplog.records) == (level == logging.WARNING)
    for record in caplog.records:
        assert record.levelno == logging.WARNING
        assert f"skipped tagging: {package}.model.run: missing" in record.message


AT_EXIT = """
import io, logging, os, sys, tempfile
import megatron_rl_patches
from megatron_rl_patches.engine import registry
for number, (handler, at_the_end) in enumerate({cases}):
    if not os.fork():
        os.dup2(os.open(f"{{__file__}}.{{number}}", os.O_WRONLY | os.O_CREAT), 2)
        break
    assert os.wait()[1] == 0
else:
    sys.exit()
exec(handler)
registry.patches = lambda: {{"tagging": patch}}
patch = megatron_rl_patches.Patch("tagging", "")
patch.wrap("exiting_framework.model", "train")(lambda call: None)
patch.wrap("exiting_framework.other", "train")(lambda call: None)
patch.wrap("exiting_framework.optional", "train", optional_module=True)(lambda *call: None)
megatron_rl_patches.apply()
import exiting_framework.model
exec(at_the_end)
"""
IS_SAID, IS_LOST = True, False
#: What makes a handler, what the program does before its exit, and whether a line is said.
EXITS = [
    ("", "", IS_SAID),
    ("logging.basicConfig(level=20)", "", IS_SAID),
    ("stream = io.StringIO(); logging.basicConfig(level=20, stream=stream)", "stream.close()", IS_LOST),
    # As pytest's own handler, which lets a test fail whose messages cannot be formatted.
    (
        "class Raising(logging.Handler):\n    def emit(self, record): raise RuntimeError\n"
        "logging.getLogger('megatron_rl_patches').addHandler(Raising(0)); logging.root.setLevel(20)",
        "",
        IS_LOST,
    ),
    ("", "sys.stderr.close()", IS_LOST),
    ("", "sys.stderr = None", IS_LOST),
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_at_exit_a_line_is_said_or_lost_in_silence(tmp_path: Path) -> None:
    modules = ("__init__", "model", "other", "optional")
    files = {f"exiting_framework/{module}.py": "def train(): ..." for module in modules}
    program = AT_EXIT.format(cases=[exit[:2] for exit in EXITS])
    done = run_program(tmp_path, {**files, "program.py": program})
    assert (done.returncode, done.stderr) == (0, "")
    for number, (*_, is_said) in enumerate(EXITS):
        stderr = (tmp_path / f"program.py.{number}").read_text()
        assert (" in exiting_framework: tagging" if is_said else "") in stderr
        # Some releases do without the optional module, and so may a program.
        unwanted = ("Logging error", "Traceback", "internal error", "exiting_framework.optional")
        assert not [text for text in unwanted if text in stderr] and bool(stderr) is is_said


def site(patch: str, framework: str, state: str, function: str = "train") -> SiteStatus:
    return SiteStatus(patch, framework, f"{framework}.{function}", state, "a reason")  # type: ignore[arg-type]


def test_summary_names_each_patch_once() -> None:
    statuses = [
        site("one", "slime.model", "applied"),
        site("one", "slime.loss", "applied", "save"),
        site("one", "verl", "missing"),
        site("one", "miles", "waiting"),
        site("two", "megatron.core", "applied"),
        site("three", "slime", "waiting"),
    ]
    in_place = "megatron_rl_patches 1.2 in slime, megatron: one, two"
    assert summary(statuses, "1.2") == f"{in_place}; skipped: one; idle: 1"
    lost = site("one", "slime", "lost")
    assert summary([*statuses, lost], "1.2") == f"{in_place}; skipped: one; overwritten: one; idle: 1"
    assert summary([lost], "1.2") == "megatron_rl_patches 1.2: nothing in place; overwritten: one"
    assert summary([], "1.2") == "megatron_rl_patches 1.2: nothing in place"


def test_what_is_said_of_used_frameworks(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "used", ModuleType("used"))
    caplog.set_level(logging.INFO, "megatron_rl_patches")

    def said(call: Callable[[list[SiteStatus]], object], *sites: SiteStatus) -> list[str]:
        caplog.clear()
        call(list(sites))
        return [message.removeprefix("megatron_rl_patches: ") for message in caplog.messages]

    # Nothing was in place.
    assert said(Announcer().at_exit, site("one", "slime", "waiting"), site("one", "used", "reverted")) == []
    _, *skipped = said(Announcer().once, site("one", "used", "missing"), site("one", "unused", "missing"))
    assert [line.partition(". ")[0] for line in skipped] == ["skipped one: used.train: missing: a reason"]
    applied = [site("one", root, "applied") for root in ("used", "unused")]
    assert said(Announcer().at_exit, *applied) == [f"megatron_rl_patches {__version__} in used: one"]
    # Patched modules that never came.
    functions = [("used", "train"), ("unused", "go"), ("used", "save")]
    [line] = said(Announcer().at_exit, *(site("one", root, "waiting", name) for root, name in functions))
    assert "so they are not patched: used.train, used.save. " in line
    # Other ranks are silent.
    monkeypatch.setattr(statuses, "is_rank_0", lambda: False)
    assert said(Announcer().warn, site("one", "used", "missing")) == []


@pytest.mark.parametrize(
    ("variable", "group", "is_first"),
    [
        *((variable, None, True) for variable in ("0", "-1", "x", "9" * 5000, None)),
        ("1", None, False),
        ("1", (1, 0), False),
        ("1", (0, 1), False),
        ("0", (1, 1), False),
    ],
)
def test_the_rank(variable: str | None, group: Any, is_first: bool, monkeypatch: MonkeyPatch) -> None:
    """By the variable, unless torch.distributed, which may not be imported, is available and initialized."""
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    if group:
        answers = dict(zip(("is_available", "is_initialized", "get_rank"), (*group, 2), strict=True))
        functions = {name: lambda answer=answer: answer for name, answer in answers.items()}
        monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(**functions))  # type: ignore[arg-type]
    if variable:
        monkeypatch.setenv("RANK", variable)
    assert is_rank_0() is is_first
