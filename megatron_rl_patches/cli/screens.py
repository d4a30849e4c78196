"""What commands print. All of it goes through :class:`Screen`, which knows how wide the terminal is."""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from ..doctor import OUT_OF_REACH, Diagnosis
from ..engine import registry
from ..engine.settings import VARIABLE
from ..engine.statuses import ABSENT, NOT_NEEDED, PATCHED, Fault, SiteStatus, aligned, overview

#: The color of a state wherever it stands in a table.
STYLES = {
    rf"(\d+ )?\b{PATCHED}\b": "green",
    rf"(\d+ )?\b({NOT_NEEDED}|{ABSENT})\b|\(if selected by .*\)": "dim",
    rf"(\d+ )?\b({'|'.join(get_args(Fault))})\b": "bold red",
}


class Screen:
    """Prints for people and for pipes: in a terminal, lines have colors and end between words.

    No word and no cell of a table is broken, so that a name can be read and copied as a whole. A pipe or a
    file gets each sentence and each row as one plain line.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._width = self._console.width if self._console.is_terminal else None

    def line(self, text: str = "", style: str = "") -> None:
        """Print a sentence."""
        self._print(text.split(" "), " ", style)

    def to_copy(self, line: str) -> None:
        """Print a line for the shell, which is never broken."""
        self._print([f"  {line}"], "", "cyan")

    def table(self, rows: Sequence[Sequence[str]], header: bool = True) -> None:
        """Print aligned columns; what is too long for the line of its row goes on the next one."""
        for number, cells in enumerate(aligned(rows)):
            self._print(cells, "  ", "bold" if header and number == 0 else "", STYLES)

    def _print(self, pieces: Iterable[str], gap: str, style: str, styles: Mapping[str, str] = {}) -> None:
        lines: list[str] = []
        for piece in pieces:
            longer = gap.join([*lines[-1:], piece])
            if lines and (self._width is None or len(longer.rstrip()) <= self._width):
                lines[-1] = longer
            else:
                lines.append("  " * bool(lines) + piece)
        for line in lines:
            text = Text(line.rstrip(), style)
            for pattern, color in styles.items():
                text.highlight_regex(pattern, color)
            self._console.print(text, soft_wrap=True)


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


# --- doctor


def show_diagnosis(diagnosis: Diagnosis, screen: Screen) -> None:
    """Print what `doctor` found out, on one screen."""
    selected = diagnosis.selected
    left_out = (patch for name, patch in registry.patches().items() if name not in selected)
    _show_components(diagnosis, screen)
    screen.line()
    _show_selected(diagnosis, screen)
    screen.line()
    screen.table(overview(diagnosis.sites, {p.name: registry.SELECTS[p.selected_by] for p in left_out}))
    for site in diagnosis.sites:
        if site.is_fault and site.patch not in selected and not site.because_of:
            screen.line(str(site), "bold red")
    if any(site.patch in selected and site.state == NOT_NEEDED for site in diagnosis.sites):
        screen.line("why a patch is not needed: megatron-rl-patches check", "dim")
    for note in diagnosis.notes:
        screen.line(note)
    if selected and not diagnosis.startup.fires and not diagnosis.hook:
        screen.line()
        screen.line("The variable does not reach these; megatron_rl_patches.apply() in the program does:")
        for place in OUT_OF_REACH:
            screen.line(f"- {place}")
    if diagnosis.problems:
        screen.line()
        screen.line("problems, each with the line that fixes it:", "bold red")
    else:
        screen.line("no problems in this Python with these variables", "bold green")
    for remedy in dict.fromkeys(problem.remedy for problem in diagnosis.problems):
        for problem in diagnosis.problems:
            if problem.remedy == remedy:
                screen.line(f"- {problem.message}")
        screen.to_copy(remedy)


def _show_components(diagnosis: Diagnosis, screen: Screen) -> None:
    torch, wrapt, startup = diagnosis.torch or "absent", diagnosis.wrapt or "absent", diagnosis.startup
    versions = f"megatron-rl-patches {diagnosis.version}, Python {diagnosis.python}"
    screen.line(f"{versions}, torch {torch}, wrapt {wrapt}", "bold")
    rows: list[tuple[str, ...]] = [
        ("python", "", diagnosis.executable),
        ("megatron_rl_patches", "", diagnosis.path),
        ("startup file", "fires" if startup.fires else "does not fire", startup.file or "not found"),
        *((f.name, f.version or "unknown", f.path) for f in diagnosis.frameworks if f.path),
    ]
    # The folder of packages and the home folder are long, and known.
    for folder, name in ((sysconfig.get_path("purelib"), "site-packages"), (Path.home(), "~")):
        rows = [(*row[:2], re.sub(f"^{re.escape(str(folder))}/", f"{name}/", row[2])) for row in rows]
    screen.table(rows, header=False)
    if absent := [framework.name for framework in diagnosis.frameworks if not framework.path]:
        screen.line(f"absent: {', '.join(absent)}", "dim")


def _show_selected(diagnosis: Diagnosis, screen: Screen) -> None:
    for name, value in diagnosis.variables.items():
        if name != VARIABLE:
            screen.line(f"{name}={value}")
    variable, names = diagnosis.variables.get(VARIABLE), diagnosis.selected
    value = f"{VARIABLE}={variable}" if variable else f"{VARIABLE} is not set"
    if hook := diagnosis.hook:
        screen.line(f"The command names {hook}, which applies what the variable selects, by default 1.")
    if names:
        screen.line(f"{value} selects {', '.join(sorted(names))}")
    else:
        screen.line(f"{value}: nothing is selected; this line selects the default set:")
        screen.to_copy(f"export {VARIABLE}=1")


# --- check

#: The status of every site in a source, by the name of the source.
Judged = Mapping[str, Sequence[SiteStatus]]

_PAGE = """\
# Compatibility

Generated by `megatron-rl-patches check --markdown FILE NAME=SOURCE…`; do not edit.
The code of these sources was parsed, and not imported. A state in **bold** is a fault: the patch leaves this
framework alone and says so; when you select it by name, that is an error.
"""


def show_judged(judged: Judged, screen: Screen) -> None:
    """Print a table for each framework, and below it why functions do not fit or need no patch."""
    for framework, columns in _by_framework(judged):
        screen.line(framework)
        rows = zip(*columns.values(), strict=True)
        states = [(row[0].patch, *(status.word for status in row), row[0].target) for row in rows]
        screen.table([("patch", *columns, "function"), *states])
        for status, sources in _verdicts(columns).items():
            if status.state != "fits":
                screen.line(str(status) if sources == [*columns] else f"{', '.join(sources)}: {status}")
        screen.line()


def page_of(judged: Judged) -> str:
    """Return a page of Markdown with a table for each framework, which has a row for each verdict."""
    parts = [_PAGE]
    for framework, columns in _by_framework(judged):
        rows = [("patch", "function", "result", "in"), ("---",) * 4]
        for status, sources in _verdicts(columns).items():
            word = f"**{status.word}**" if status.is_fault else status.word
            where = "all" if sources == [*columns] else ", ".join(sources)
            rows.append(
                (status.patch, f"`{status.target}`", f"{word}: {status.reason}".removesuffix(": "), where)
            )
        lines = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
        parts.append(f"## {framework}\n\nAll: {', '.join(columns)}.\n\n{''.join(lines)}")
    return "\n".join(parts)


def _by_framework(judged: Judged) -> Iterator[tuple[str, Judged]]:
    """Yield each framework that is in a source, and its sites in the sources that contain it."""
    present = {source: [s for s in judged[source] if s.state != ABSENT] for source in judged}
    for framework in sorted({status.framework for statuses in present.values() for status in statuses}):
        columns = {source: [s for s in present[source] if s.framework == framework] for source in present}
        yield framework, {source: statuses for source, statuses in columns.items() if statuses}


def _verdicts(columns: Judged) -> dict[SiteStatus, list[str]]:
    """Return each verdict on a site once, with the sources for which it holds."""
    verdicts: dict[SiteStatus, list[str]] = {}
    for row in zip(*columns.values(), strict=True):
        for source, status in zip(columns, row, strict=True):
            reason = "" if status.state == "fits" else status.reason
            verdicts.setdefault(replace(status, reason=reason, fingerprint=""), []).append(source)
    return verdicts
