"""What the startup file adds to the start of a Python process, with the variable unset and set.

Two fresh environments differ in the package only (the wheel of this tree, no dependencies). Each pair starts
one interpreter in either.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .measure import added
from .page import Benchmark, Parts, Table

ROOT = Path(__file__).parents[1]
PAIRS, LIMIT_MS, DRAWS = 300, 1.0, 1000
VARIABLE = "MEGATRON_RL_PATCHES"


@dataclass(frozen=True)
class Result:
    """Medians, and the interval that holds 95% of such medians of the differences."""

    case: str
    bare_ms: float
    added_ms: float
    interval_ms: tuple[float, float]


def measure(quick: bool) -> list[Result]:
    pairs = 5 if quick else PAIRS
    with tempfile.TemporaryDirectory() as folder:
        bare, with_package = environments(Path(folder))
        return [
            compare("both without the package (noise)", bare, bare, {}, pairs),
            compare("variable unset", bare, with_package, {}, pairs),
            compare("variable set", bare, with_package, {VARIABLE: "1"}, pairs),
        ]


def environments(folder: Path) -> tuple[Path, Path]:
    """The interpreters of an empty environment and of one that has the wheel of this tree."""
    build: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    interpreters = []
    for name in ("bare", "with-package"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / name], check=True)
        interpreters.append(folder / name / "bin" / "python")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", interpreters[1]]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
    return interpreters[0], interpreters[1]


def compare(case: str, bare: Path, with_package: Path, variables: dict[str, str], pairs: int) -> Result:
    environment = {name: x for name, x in os.environ.items() if not name.startswith(VARIABLE)} | variables
    for python in (bare, with_package):  # write and read the byte code once
        start_ms(python, environment)
    bare_ms, differences = added(
        lambda: start_ms(bare, environment), lambda: start_ms(with_package, environment), pairs
    )
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(differences, k=pairs)) for _ in range(DRAWS))
    interval = medians[DRAWS // 40], medians[-DRAWS // 40]
    return Result(case, statistics.median(bare_ms), statistics.median(differences), interval)


def start_ms(python: Path, environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([python, "-c", ""], env=environment, check=True)
    return (time.perf_counter() - begin) * 1000


def parts(results: Sequence[Result]) -> Parts:
    rows = [
        {
            "": result.case,
            "start without (ms)": f"{result.bare_ms:.2f}",
            "added (ms)": f"{result.added_ms:+.3f}",
            "95% interval of the median": "{:+.3f} to {:+.3f}".format(*result.interval_ms),
        }
        for result in results
    ]
    return {"startup": Table(1, rows)}


BENCHMARK = Benchmark(measure, parts, is_met=lambda results: all(r.added_ms < LIMIT_MS for r in results))
