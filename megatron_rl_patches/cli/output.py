"""What people see, and what pipes and programs get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..doctor import OUT_OF_REACH, WRAPT_RANGE, Diagnosis
from ..engine.report import SiteStatus
from ..settings import VARIABLE
from .compatibility import Judged, host_tables

_STYLES = {
    "fits": "green",
    "not needed": "dim",
    "absent": "dim",
    "missing": "bold red",
    "drifted": "bold red",
    "conflict": "bold red",
    "failed": "bold red",
}


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Framed and coloured on a terminal; aligned columns and whole lines otherwise."""
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
    for table in host_tables(judged):
        typer.echo(table.host)
        show_table(table.header, table.rows)
        for found, sources in table.verdicts:
            if found.state != "fits":
                told = f"{found.patch}: {found.target} is {found.state} in {', '.join(sources)}"
                typer.echo(f"{told}: {found.reason}")
        typer.echo()


def show_diagnosis(found: Diagnosis) -> None:
    show_table(
        ("component", "version", "where"),
        [
            ("python", found.python, found.executable),
            ("megatron-rl-patches", found.version, str(Path(__file__).parents[1])),
            ("torch", found.torch or "not installed", ""),
            ("wrapt", found.wrapt or "not installed", f"needed: {WRAPT_RANGE}"),
            *((host.name, *_version_and_path(host.version, host.path)) for host in found.hosts),
        ],
    )
    typer.echo()
    show_table(("variable", "value"), list(found.variables.items()) or [(VARIABLE, "not set")])
    typer.echo(selected(found.selected))
    fires = "fires" if found.startup.fires else "does not fire"
    typer.echo(f"startup file: {found.startup.file or 'not found'}: {fires}: {found.startup.reason}\n")
    show_findings(found.sites)
    typer.echo("\nThe variable does not reach these; megatron_rl_patches.apply() in the program does:")
    for place in OUT_OF_REACH:
        typer.echo(f"  - {place}")
    typer.echo("\nproblems:" if found.problems else "\nno problems")
    for problem in found.problems:
        typer.echo(f"  - {problem}")


def show_findings(findings: Sequence[SiteStatus]) -> None:
    show_table(
        ("patch", "site", "state", "reason"),
        [(f.patch, f.target, f.state, "" if f.state == "fits" else f.reason) for f in findings],
    )


def selected(names: Sequence[str]) -> str:
    return f"selected: {', '.join(names)}" if names else "nothing is selected"


def _version_and_path(version: str | None, path: str | None) -> tuple[str, str]:
    return ("not installed", "") if path is None else (version or "unknown", path)


def _plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
