"""The screen of `doctor`: what stands on it, and that a terminal of 80 x 24 holds it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl_patches import doctor
from megatron_rl_patches.cli.screens import show_diagnosis, show_problems
from megatron_rl_patches.doctor import Diagnosis, Framework, Problem, Startup
from megatron_rl_patches.engine.statuses import SiteStatus

FITS = SiteStatus("lean-loss", "slime", "slime.loss.log_probs", "fits", "has the bug that the patch fixes")
SITES = (
    FITS,
    replace(FITS, target="slime.loss.Loss.entropy"),
    replace(FITS, target="slime.loss.gather", state="not needed", reason="it gathers nothing"),
    replace(FITS, framework="verl", target="verl.loss", state="absent", reason="no verl here"),
    SiteStatus("lean-head", "megatron.core", "megatron.core.gpt.GPT.forward", "drifted", "it is gone"),
    SiteStatus("lean-head", "megatron.core", "a.b", "drifted", "another site", because_of="GPT.forward"),
    SiteStatus("distillation", "verl", "verl.actor", "absent", "no verl here"),
)
DIAGNOSIS = Diagnosis(
    version="0.2.0",
    path="/venv/megatron_rl_patches",
    python="3.11.7",
    executable="/venv/bin/python",
    torch=None,
    wrapt="2.5.2",
    frameworks=(Framework("slime", "/slime", None), Framework("verl", None, None)),
    variables={"MEGATRON_RL_PATCHES": "lean-loss", "MEGATRON_RL_PATCHES_STRICT": "1"},
    selected=("lean-loss",),
    sites=SITES,
    startup=Startup("/venv/startup.pth", True, ""),
    notes=(),
    problems=(),
)


def screen(show: object, *facts: object, width: int = 80, terminal: bool = False) -> list[str]:
    """Return the lines that are printed, without trailing blanks and colors."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    show(*facts, console)  # type: ignore[operator]
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_row_for_each_patch_and_framework_and_reasons_for_the_rest() -> None:
    assert screen(show_diagnosis, DIAGNOSIS) == [
        "megatron-rl-patches 0.2.0, Python 3.11.7, torch absent, wrapt 2.5.2",
        "python                        /venv/bin/python",
        "megatron_rl_patches           /venv/megatron_rl_patches",
        "startup file         fires    /venv/startup.pth",
        "slime                unknown  /slime",
        "absent: verl",
        "",
        "MEGATRON_RL_PATCHES_STRICT=1",
        "MEGATRON_RL_PATCHES=lean-loss: selected: lean-loss",
        "",
        "patch      framework      sites",
        "lean-loss  slime          2 fit, 1 not needed",
        "lean-head  megatron.core  2 drifted (not selected)",
        "without a framework: distillation",
        "lean-head: GPT.forward is drifted: it is gone",
        "why a site is not needed: megatron-rl-patches check",
        "",
        "no problems in this Python with these variables",
    ]


def test_where_the_variable_does_not_reach_is_shown_where_it_does_not_fire() -> None:
    dead = replace(DIAGNOSIS, startup=Startup(None, False, "why"))
    assert "- python -S: startup files of site-packages are not read" in screen(show_diagnosis, dead)
    assert not any("python -S" in line for line in screen(show_diagnosis, replace(dead, selected=())))


def test_problems_with_one_remedy_share_it_and_the_line_to_copy_is_not_broken() -> None:
    problems = [Problem("one", "unset A"), Problem("two", "unset B"), Problem("three", "unset A")]
    assert screen(show_problems, problems)[1:] == ["- one", "- three", "  unset A", "- two", "  unset B"]
    remedy = "export MEGATRON_RL_PATCHES=all,-inference-only,-lean-head,-lean-loss"
    assert f"  {remedy}" in screen(show_problems, [Problem("why", remedy)], width=40, terminal=True)


def test_paths_are_shortened_and_brackets_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    found = replace(DIAGNOSIS, executable="/home/me/[bold]/python")
    assert "python                        ~/[bold]/python" in screen(show_diagnosis, found, terminal=True)


@pytest.mark.parametrize("value", ["", "1", "reentrant-train"])
def test_with_megatron_core_alone_it_fits_a_terminal_of_80_by_24(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """23 lines, and one for the prompt."""
    has_package = doctor.Environment.has_package
    monkeypatch.setattr(
        doctor.Environment,
        "has_package",
        lambda self, name: name == "megatron.core" and has_package(self, name),
    )
    monkeypatch.setattr(doctor, "examine_startup", lambda environ: Startup("startup.pth", True, ""))
    found = doctor.examine({"MEGATRON_RL_PATCHES": value} if value else {})
    assert [s.state for s in found.sites if s.framework == "megatron.core"].count("fits") >= 7
    frameworks = [f if f.name == "megatron.core" else replace(f, path=None) for f in found.frameworks]
    found = replace(found, path="/p", executable="/venv/bin/python", frameworks=tuple(frameworks))
    lines = screen(show_diagnosis, found, terminal=True)
    assert len(lines) <= 23, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("no problems")
    assert value != "1" or "MEGATRON_RL_PATCHES=1: selected: all but distillation" in lines
