"""What commands show: tables for people and pipes, JSON for programs, the screen of `doctor`; their files."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..doctor import OUT_OF_REACH, Diagnosis, Problem
from ..engine import registry
from ..engine.settings import VARIABLE
from ..engine.statuses import Fault, SiteStatus, counted, grouped, plain_table
from ..errors import InvalidInputError

STYLES = {
    "fits": "green",
    "not needed": "dim",
    "absent": "dim",
    **dict.fromkeys(get_args(Fault), "bold red"),
}


def check_writable(option: str, file: Path) -> None:
    """Raise :class:`InvalidInputError` if the file cannot be written."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidInputError(f"{option} is {file}, which cannot be written")


def check_plot(option: str, file: Path) -> None:
    """Raise :class:`InvalidInputError` if matplotlib cannot draw the file."""
    if find_spec("matplotlib") is None:
        raise InvalidInputError(f"{option} needs matplotlib: pip install matplotlib")
    if file.suffix not in (".png", ".pdf", ".svg"):
        raise InvalidInputError(f"{option} is {file}; expected a name that ends in .png, .pdf or .svg")
    check_writable(option, file)


def output_file(
    option: str, help: str, check: Callable[[str, Path], None] = check_writable, panel: str | None = None
) -> Any:
    """Return an option for a file that a command writes, which is checked before the work."""

    def checked(file: Path | None) -> Path | None:
        if file is not None:
            check(option, file)
        return file

    return typer.Option(
        option, metavar="FILE", show_default=False, help=help, callback=checked, rich_help_panel=panel
    )


def show_table(
    rows: Sequence[Sequence[str | Text]], console: Console | None = None, header: bool = True
) -> None:
    """Print a table: colored on a terminal, otherwise in aligned columns, one row a line.

    Args:
        rows: the first one is the header. A cell that is the name of a state has its color.
        console: where it goes, stdout by default.
        header: the first row is one.
    """
    console = console or Console()
    if not console.is_terminal:
        _show(console, plain_table([[*map(str, row)] for row in rows]))
        return
    lines = []
    for number, row in enumerate(rows):
        style = "bold" if header and number == 0 else ""
        lines.append([c if isinstance(c, Text) else Text(c, STYLES.get(c, style)) for c in row])
    words = [max(map(len, " ".join(map(str, column)).split())) for column in zip(*rows, strict=True)]
    if header and sum(words) + 2 * len(words) - 2 > console.width:
        for line in lines:  # columns would split names, so a long row has a line for each
            text = Text("  ").join(line)
            console.print(text if len(text) <= console.width else Text("\n  ").join(line), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(*line)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def _show(console: Console, text: str = "", style: str = "") -> None:
    """Print text that is wrapped on a terminal only."""
    console.print(Text(text, style), soft_wrap=not console.is_terminal)


# --- doctor


def show_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print what `doctor` found out, on one screen."""
    console = console or Console()
    _show_components(console, diagnosis)
    _show(console)
    for name, value in diagnosis.variables.items():
        if name != VARIABLE:
            _show(console, f"{name}={value}")
    _show_selected(console, diagnosis)
    _show(console)
    _show_sites(console, diagnosis.sites, diagnosis.selected)
    reported = {problem.message for problem in diagnosis.problems}
    for site in diagnosis.sites:
        if site.is_fault and str(site) not in reported and not site.because_of:
            function = ".".join(site.target.rsplit(".", 2)[1:])
            _show(console, f"{site.patch}: {function} is {site.state}: {site.reason}", STYLES[site.state])
    if any(site.patch in diagnosis.selected and site.state == "not needed" for site in diagnosis.sites):
        _show(console, "why a function needs no patch: megatron-rl-patches check", "dim")
    for note in diagnosis.notes:
        _show(console, note)
    if diagnosis.selected and not diagnosis.startup.fires and not diagnosis.hook:
        where = "The variable does not reach these; megatron_rl_patches.apply() in the program does:"
        _show(console, "\n- ".join([f"\n{where}", *OUT_OF_REACH]))
    if diagnosis.problems:
        _show(console)
        show_problems(diagnosis.problems, console)
    else:
        _show(console, "no problems in this Python with these variables", "bold green")


def show_problems(problems: Sequence[Problem], console: Console) -> None:
    """Print each problem, and once below those that it fixes, the line to copy."""
    _show(console, "problems, each with the line that fixes it:", "bold red")
    for remedy in dict.fromkeys(problem.remedy for problem in problems):
        for message in (problem.message for problem in problems if problem.remedy == remedy):
            _show(console, f"- {message}")
        _show_to_copy(console, remedy)


def _show_to_copy(console: Console, line: str) -> None:
    """Print a line for the shell, which no width breaks."""
    console.print(Text(f"  {line}", "cyan"), soft_wrap=True)


def _show_components(console: Console, diagnosis: Diagnosis) -> None:
    versions = {
        "megatron-rl-patches": diagnosis.version,
        "Python": diagnosis.python,
        "torch": diagnosis.torch,
        "wrapt": diagnosis.wrapt,
    }
    _show(console, ", ".join(f"{name} {version or 'absent'}" for name, version in versions.items()), "bold")
    startup = diagnosis.startup
    fires = "fires" if startup.fires else "does not fire"
    rows = [
        ("python", "", diagnosis.executable),
        ("megatron_rl_patches", "", diagnosis.path),
        ("startup file", fires, startup.file or "not found"),
        *((f.name, f.version or "unknown", f.path) for f in diagnosis.frameworks if f.path),
    ]
    show_table([(name, state, _shortened(path)) for name, state, path in rows], console, header=False)
    if absent := [framework.name for framework in diagnosis.frameworks if not framework.path]:
        _show(console, f"absent: {', '.join(absent)}", "dim")


def _shortened(path: str) -> str:
    """Return the path without what is long and known: the folder of packages, or the home folder."""
    for folder, name in ((sysconfig.get_path("purelib"), "site-packages"), (str(Path.home()), "~")):
        if path.startswith(f"{folder}/"):
            return name + path.removeprefix(folder)
    return path


def _show_selected(console: Console, diagnosis: Diagnosis) -> None:
    variable, names = diagnosis.variables.get(VARIABLE), diagnosis.selected
    value = f"{VARIABLE}={variable}" if variable else f"{VARIABLE} is not set"
    if hook := diagnosis.hook:
        _show(console, f"The command names {hook}, which applies what the variable selects, by default 1.")
    if names:
        _show(console, f"{value} selects {', '.join(sorted(names))}")
        others = (patch for name, patch in registry.patches().items() if name not in names)
        left_out = [f"{patch.name} ({registry.SELECTS[patch.selected_by]} selects it)" for patch in others]
        if left_out:
            _show(console, f"not selected: {', '.join(left_out)}", "dim")
    elif variable:
        _show(console, f"{value}: nothing is selected")
    else:
        _show(console, f"{value}: nothing is selected; this line selects the default set:")
        _show_to_copy(console, f"export {VARIABLE}=1")


def _show_sites(console: Console, statuses: Sequence[SiteStatus], selected: Sequence[str]) -> None:
    """Print a row for every patch and installed framework, and a line with the other patches."""
    rows: list[tuple[str | Text, ...]] = [("patch", "framework", "patched functions")]
    by_patch = grouped(status for status in statuses if status.state != "absent")
    for patch, by_framework in by_patch.items():
        is_left_out = bool(selected) and patch not in selected
        for framework, sites in by_framework.items():
            states = counted(sorted(sites, key=lambda site: site.state != "fits"))
            style = "bold red" if any(site.is_fault for site in sites) else "dim" if is_left_out else "green"
            rows.append((patch, framework, Text(states + is_left_out * " (not selected)", style)))
    if by_patch:
        show_table(rows, console)
    if idle := [patch for patch in grouped(statuses) if patch not in by_patch]:
        _show(console, f"without a framework: {', '.join(idle)}", "dim")
