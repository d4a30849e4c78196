"""Output of the commands: tables for people and pipes, JSON for programs, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..engine.judge import Fault
from ..errors import InvalidInputError
from .compatibility import Judged, framework_tables

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


def output_file(option: str, help: str, check: Callable[[str, Path], None] = check_writable) -> Any:
    """Return an option for a file that a command writes. It is checked before the work, which may be long."""

    def checked(file: Path | None) -> Path | None:
        if file is not None:
            check(option, file)
        return file

    return typer.Option(option, metavar="FILE", show_default=False, help=help, callback=checked)


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


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in aligned columns, a line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
