"""What a benchmark consists of, and the parts of its page and of its plot."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, TypeVar

import torch

R = TypeVar("R")


@dataclass(frozen=True)
class Benchmark(Generic[R]):
    """How something is measured, and what shows the result.

    Attributes:
        measure: takes whether to be quick, that is, to measure next to nothing; returns the result.
        parts: what the page shows of the result, in Markdown, by the name of the place (see :func:`fill`).
        plot: draws the result on a matplotlib figure.
        image: the file of the plot, in ``docs/images``.
        height: of the plot, in inches.
        is_met: whether the result is what is claimed.
    """

    measure: Callable[[bool], R]
    parts: Callable[[R], dict[str, str]]
    plot: Callable[[R, Any], None] | None = None
    image: str = ""
    height: float = 6
    is_met: Callable[[R], bool] = lambda result: True


def machine() -> str:
    """Return one line with device, versions and date."""
    cores = f"{os.cpu_count()} CPU cores"
    device = f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores
    python = f"CPython {platform.python_version()}, {platform.system()} {platform.machine()}"
    return ", ".join([device, *versions("torch", "megatron-core"), python, str(datetime.date.today())])


def versions(*packages: str) -> Iterator[str]:
    """Yield name and version of each package that is installed."""
    for package in packages:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def commit_of(folder: str) -> str:
    """Return the commit of a checkout, or "(checkout)" for a folder that is none of its own."""
    command = ["git", "-C", folder, "rev-parse", "--short=9", "--show-prefix", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    prefix, _, commit = result.stdout.partition("\n")
    # If there is a prefix, the folder is a part of some other repository.
    return "(checkout)" if result.returncode or prefix else commit.strip()


def fill(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each part in its place, between ``<!-- measured: NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: the page has no such place.
    """
    for name, part in parts.items():
        before, begin, after = page.partition(f"<!-- measured: {name} -->\n")
        _, end, after = after.partition("<!-- end -->\n")
        if not end:
            raise ValueError(f"the page has no place for what was measured: {name}")
        page = f"{before}{begin}\n{part}\n\n{end}{after}"
    return page


def join(*blocks: str) -> str:
    """Return the blocks that are not empty, with an empty line between them."""
    return "\n\n".join(block for block in blocks if block)


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Return a table whose columns are the keys of the rows; nothing if there are no rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def number(value: float | None, form: str) -> str:
    """Return the formatted value; a dash for ``None`` and for what is not a number."""
    return "–" if value is None or value != value else format(value, form)


def left_out(reasons: Mapping[str, str]) -> str:
    """Say what was not measured, and why."""
    return f"Left out: {'; '.join(f'{name} ({why})' for name, why in reasons.items())}." if reasons else ""


def bars(axes: Any, label: str, series: Mapping[str, Mapping[str, float]]) -> None:
    """Draw horizontal bars, for each name one of each series that has it, the first name on top."""
    names = list(dict.fromkeys(name for lengths in series.values() for name in lengths))
    height = 0.8 / len(series)
    for place, (title, lengths) in enumerate(series.items()):
        shift = (place + 0.5) * height - 0.4
        places = [names.index(name) + shift for name in lengths]
        axes.barh(places, lengths.values(), height, label=title)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
