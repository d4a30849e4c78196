"""What a benchmark consists of, and the parts of its page."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.references.pages import fill as fill
from tests.references.pages import join as join
from tests.references.pages import table as table


class Table(NamedTuple):
    """Rows that were measured; their first columns, ``keys`` of them, say what a row is of."""

    keys: int
    rows: list[dict[str, str]]

    def shown(self, before: str, title: str = "") -> str:
        """Return a table of a page with its rows and columns, and a dash for what was not measured.

        Args:
            title: if rows have it, only these are shown, and the column that has it may be left out.
        """
        if not before:
            return table(self.rows)
        header, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in before.splitlines())
        names = [name for name in [*self.rows[0]][: self.keys] if name in header]
        rows = [row for row in self.rows if title in row.values()] or self.rows
        by_names = {tuple(row[name] for name in names): row for row in rows}
        shown = [{name: line[header.index(name)] for name in names} for line in lines]
        empty = dict.fromkeys(header, "–")
        measured = ({**empty, **by_names.get(tuple(row.values()), {}), **row} for row in shown)
        return table({name: row[name] for name in header} for row in measured)


class Outcome(NamedTuple):
    """The entry of a step of ``make gpu`` in a JSON file, which a process that dies leaves whole."""

    figures: Path
    step: str

    def of_all_steps(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.figures.read_text())["steps"]) if self.figures.exists() else {}

    def begin(self, **values: Any) -> None:
        """Start with these values alone."""
        self._write(values)

    def update(self, **values: Any) -> None:
        self._write({**self.of_all_steps()[self.step], **values})

    def save(self, result: Any) -> None:
        """Write a result, an instance of a dataclass, in place of the one that was saved before."""
        self.update(result=asdict(result))

    def _write(self, values: dict[str, Any]) -> None:
        written = self.figures.with_suffix(".new")
        written.write_text(json.dumps({"steps": {**self.of_all_steps(), self.step: values}}, indent=1) + "\n")
        written.replace(self.figures)


Parts = Mapping[str, str | Table]


@dataclass(frozen=True)
class Benchmark:
    """How something is measured, and what shows the result.

    Attributes:
        measure: takes whether to be quick, that is, to measure next to nothing; returns the result.
        parts: the result for the JSON file, tables and sentences by name. The page shows some of them, in the
            places with their names (see :func:`filled`), and of the tables the rows and columns that it has.
        is_met: whether the result is what is claimed.
    """

    measure: Callable[[bool], Any]
    parts: Callable[[Any], Parts]
    is_met: Callable[[Any], bool] = lambda result: True


def filled(page: str, parts: Parts) -> str:
    """Return the page with what was measured in its places, of which ``NAME: TITLE`` shows a part of NAME."""
    places = re.findall(r"<!-- measured: (.+?) -->\n\n(?:(.*?)\n\n)?<!-- end -->\n", page, re.DOTALL)
    shown = {}
    for place, before in places:
        name, _, title = place.partition(": ")
        if (part := parts.get(name)) is not None:
            shown[place] = part.shown(before, title) if isinstance(part, Table) else part
    return fill(page, shown)


def as_json(parts: Parts) -> str:
    rows = {name: part.rows if isinstance(part, Table) else part for name, part in parts.items()}
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def machine() -> str:
    """Return one line with device, versions and date."""
    cores = f"{os.cpu_count()} CPU cores"
    device = f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores
    packages = [f"{package} {version(package)}" for package in ("torch", "megatron-core")]
    python = f"CPython {platform.python_version()}, {platform.system()} {platform.machine()}"
    return ", ".join([device, *packages, python, str(datetime.date.today())])


def number(value: float, form: str) -> str:
    """Return the formatted value; a dash for what is not a number."""
    return "–" if math.isnan(value) else format(value, form)
