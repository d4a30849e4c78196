"""Output of the commands: tables for people and pipes, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..doctor import OUT_OF_REACH, WRAPT_RANGE, Diagnosis
from ..engine.judge import Fault, SiteStatus
from ..settings import VARIABLE
from .compatibility import Judged, framework_tables

_STYLES = {
    "fits": "green",
    "not needed": "dim",
    "absent": "dim",
    **dict.fromkeys(get_args(Fault), "bold red"),
}


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: framed and colored on a terminal, otherwise in aligned columns that are not wrapped."""
    console = Console()
    if not console.is_terminal:
        typer.echo(_plain(header, rows))
        return
    table = Table(*header, header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def show_judged(judged: Sequence[Judged]) -> None:
    for table in framework_tables(judged):
        typer.echo(table.framework)
        rows = [(*site, *(status.state for status in statuses)) for site, statuses in table.sites.items()]
        show_table(("patch", "site", *table.sources), rows)
        for status, sources in table.verdicts:
            if status.state != "fits":
                where = f"{status.patch}: {status.target} is {status.state} in {', '.join(sources)}"
                typer.echo(f"{where}: {status.reason}")
        typer.echo()


def show_diagnosis(diagnosis: Diagnosis) -> None:
    frameworks, startup = diagnosis.frameworks, diagnosis.startup
    show_table(
        ("component", "version", "where"),
        [
            ("python", diagnosis.python, diagnosis.executable),
            ("megatron-rl-patches", diagnosis.version, str(Path(__file__).parents[1])),
            ("torch", diagnosis.torch or "not installed", ""),
            ("wrapt", diagnosis.wrapt or "not installed", f"needed: {WRAPT_RANGE}"),
            *(
                (f.name, (f.version or "unknown") if f.path else "not installed", f.path or "")
                for f in frameworks
            ),
        ],
    )
    typer.echo()
    show_table(("variable", "value"), list(diagnosis.variables.items()) or [(VARIABLE, "not set")])
    typer.echo(selected(diagnosis.selected))
    fires = "fires" if startup.fires else "does not fire"
    typer.echo(f"startup file: {startup.file or 'not found'}: {fires}: {startup.reason}\n")
    show_statuses(diagnosis.sites)
    if diagnosis.notes:
        typer.echo("\n" + "\n".join(diagnosis.notes))
    typer.echo("\nThe variable does not reach these; megatron_rl_patches.apply() in the program does:")
    typer.echo("\n".join(f"  - {place}" for place in OUT_OF_REACH))
    heading = "\nproblems:" if diagnosis.problems else "\nno problems"
    typer.echo("\n  - ".join([heading, *diagnosis.problems]))


def show_statuses(statuses: Sequence[SiteStatus]) -> None:
    rows = [(s.patch, s.target, s.state, "" if s.state == "fits" else s.reason) for s in statuses]
    show_table(("patch", "site", "state", "reason"), rows)


def selected(names: Sequence[str]) -> str:
    return f"selected: {', '.join(names)}" if names else "nothing is selected"


def _plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (map(str.ljust, line, widths) for line in (header, *rows))
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
