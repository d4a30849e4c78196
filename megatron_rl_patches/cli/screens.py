"""What commands show: tables for people and pipes, JSON for programs, the screen of `doctor`; their files."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..common.tables import plain_table
from ..doctor import OUT_OF_REACH, Diagnosis, Problem
from ..engine.judge import IN_COMPANY, Fault, SiteStatus, counted, grouped
from ..engine.settings import VARIABLE
from ..errors import InvalidInputError

STYLES = {
    "fits": "green",
    "not needed": "dim",
    "absent": "dim",
    **dict.fromkeys(get_args(Fault), "bold red"),
}


def check_writable(option: str, file: Path) -> None:
    """Raise :class:`InvalidInputError` if the file cannot be written. What it contains stays."""
    if file.is_fifo():
        return  # to open it would be to wait for its reader
    is_new = not file.exists()
    try:
        with open(file, "a"):
            pass
    except OSError as error:
        raise InvalidInputError(f"{option} is {file}, which cannot be written: {error.strerror}") from None
    if is_new:
        file.unlink()


def check_plot(option: str, file: Path) -> None:
    """Raise :class:`InvalidInputError` if matplotlib cannot draw the file."""
    if find_spec("matplotlib") is None:
        raise InvalidInputError(f"{option} needs matplotlib: pip install 'megatron-rl-patches[demo]'")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise InvalidInputError(f"{option} is {file}; expected a name that ends in .png, .pdf or .svg")
    check_writable(option, file)


def output_file(
    option: str, help: str, check: Callable[[str, Path], None] = check_writable, panel: str | None = None
) -> Any:
    """Return an option for a file that a command writes. It is checked before the work, which may be long."""

    def checked(file: Path | None) -> Path | None:
        if file is not None:
            check(option, file)
        return file

    return typer.Option(
        option, metavar="FILE", show_default=False, help=help, callback=checked, rich_help_panel=panel
    )


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: framed and colored on a terminal, otherwise in aligned columns that are not wrapped."""
    console = Console()
    if not console.is_terminal:
        typer.echo(plain_table((header, *rows)))
        return
    table = Table(*header, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(table)


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


# --- doctor


class Screen:
    """Lines and tables without frames: wrapped and colored on a terminal, plain in a pipe, one row a line.

    Args:
        console: where they go; stdout if it is not given.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)

    def to_copy(self, line: str) -> None:
        """Print a line for the shell, which no width breaks."""
        self._console.print(Text(f"  {line}", "cyan"), soft_wrap=True)

    def table(self, rows: Sequence[tuple[str, ...]], styles: Sequence[str]) -> None:
        """Print rows; a row's style is that of its last cell, or of all cells if it is bold."""
        if not self._console.is_terminal:
            self.line(plain_table(rows))
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        for row, style in zip(rows, styles, strict=True):
            others = style if style == "bold" else ""
            table.add_row(*(Text(cell, others) for cell in row[:-1]), Text(row[-1], style, overflow="fold"))
        self._console.print(table)


def show_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print what `doctor` found out, on one screen."""
    screen = Screen(console)
    _show_components(screen, diagnosis)
    screen.line()
    for name, value in diagnosis.variables.items():
        if name != VARIABLE:
            screen.line(f"{name}={value}")
    _show_selected(screen, diagnosis)
    screen.line()
    _show_sites(screen, diagnosis.sites, diagnosis.selected)
    reported = {problem.message for problem in diagnosis.problems}
    for site in diagnosis.sites:
        if site.is_fault and str(site) not in reported and not site.reason.startswith(IN_COMPANY):
            function = ".".join(site.target.rsplit(".", 2)[1:])
            message = f"{site.patch}: {function} is {site.state}: {site.reason}"
            screen.line(message, STYLES[site.state])
    if any(site.patch in diagnosis.selected and site.state == "not needed" for site in diagnosis.sites):
        screen.line("why a site is not needed: megatron-rl-patches check", "dim")
    for note in diagnosis.notes:
        screen.line(note)
    if diagnosis.selected and not diagnosis.startup.fires and not diagnosis.hook:
        screen.line("\nThe variable does not reach these; megatron_rl_patches.apply() in the program does:")
        for place in OUT_OF_REACH:
            screen.line(f"- {place}")
    screen.line()
    if diagnosis.problems:
        show_problems(diagnosis.problems, console)
    else:
        screen.line("no problems in this Python with these variables", "bold green")


def show_problems(problems: Sequence[Problem], console: Console | None = None) -> None:
    """Print each problem, and once below those that it mends, the line to copy."""
    screen = Screen(console)
    screen.line("problems, each with the line that mends it:", "bold red")
    remedies = dict.fromkeys(problem.remedy for problem in problems)
    for remedy in remedies:
        for problem in problems:
            if problem.remedy == remedy:
                screen.line(f"- {problem.message}")
        screen.to_copy(remedy)


def _show_components(screen: Screen, diagnosis: Diagnosis) -> None:
    versions = {
        "megatron-rl-patches": diagnosis.version,
        "Python": diagnosis.python,
        "torch": diagnosis.torch,
        "wrapt": diagnosis.wrapt,
    }
    screen.line(", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()), "bold")
    startup = diagnosis.startup
    present = [framework for framework in diagnosis.frameworks if framework.path]
    rows = [
        ("python", "", _shortened(diagnosis.executable)),
        ("megatron_rl_patches", "", _shortened(diagnosis.path)),
        (
            "startup file",
            "fires" if startup.fires else "does not fire",
            _shortened(startup.file or "not found"),
        ),
        *((f.name, f.version or "unknown", _shortened(f.path or "")) for f in present),
    ]
    screen.table(rows, [""] * len(rows))
    if absent := [framework.name for framework in diagnosis.frameworks if not framework.path]:
        screen.line(f"absent: {', '.join(absent)}", "dim")


def _shortened(path: str) -> str:
    """Return the path without what is long and known: the folder of packages, or the home folder."""
    for folder, name in ((sysconfig.get_path("purelib"), "site-packages"), (str(Path.home()), "~")):
        if path.startswith(f"{folder}/"):
            return name + path.removeprefix(folder)
    return path


def _show_selected(screen: Screen, diagnosis: Diagnosis) -> None:
    variable, names = diagnosis.variables.get(VARIABLE), diagnosis.selected
    value = f"{VARIABLE}={variable}" if variable else f"{VARIABLE} is not set"
    if diagnosis.hook:
        value = f"{diagnosis.hook} applies the patches of {value}"
    if names:
        screen.line(f"{value}: selected: {', '.join(names)}")
    elif variable:
        screen.line(f"{value}: nothing is selected")
    else:
        screen.line(f"{value}: nothing is selected; this line selects all:")
        screen.to_copy(f"export {VARIABLE}=1")


def _show_sites(screen: Screen, statuses: Sequence[SiteStatus], selected: Sequence[str]) -> None:
    """Print a row for every patch and installed framework, and a line with the other patches."""
    rows, styles = [("patch", "framework", "sites")], ["bold"]
    by_patch = grouped(status for status in statuses if status.state != "absent")
    for patch, by_framework in by_patch.items():
        is_left_out = bool(selected) and patch not in selected
        for framework, sites in by_framework.items():
            states = counted(sorted(sites, key=lambda site: site.state != "fits"))
            rows.append((patch, framework, states + is_left_out * " (not selected)"))
            fault = next((site.state for site in sites if site.is_fault), None)
            styles.append(STYLES[fault] if fault else "dim" if is_left_out else "green")
    if by_patch:
        screen.table(rows, styles)
    if idle := [patch for patch in grouped(statuses) if patch not in by_patch]:
        screen.line(f"no framework for these is here: {', '.join(idle)}", "dim")
