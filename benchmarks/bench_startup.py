"""What the startup file adds to the start of a Python process, with the variable unset and set.

    python -m benchmarks.bench_startup [--pairs N]

Two fresh environments that differ in the package only (the wheel of this tree, no dependencies).  Each
pair starts one interpreter in either, back to back and in alternating order, so that a busy machine slows
down both; the result is the median of the differences, with the interval that holds 95% of such medians.
"""

from __future__ import annotations

import argparse
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

from . import _machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "startup.md"
LIMIT_MS = 1.0
VARIABLE = "MEGATRON_RL_PATCHES"


@dataclass(frozen=True)
class Result:
    case: str
    bare_ms: float
    added_ms: float
    low_ms: float
    high_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="pairs of interpreter starts for each case")
    pairs = parser.parse_args(arguments).pairs

    with tempfile.TemporaryDirectory() as folder:
        bare, with_package = environments(Path(folder))
        results = [
            compare("both without the package (noise)", bare, bare, {}, pairs),
            compare("variable unset", bare, with_package, {}, pairs),
            compare("variable set", bare, with_package, {VARIABLE: "1"}, pairs),
        ]
    page = render(results, pairs)
    print(page)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page)
    return int(any(result.added_ms >= LIMIT_MS for result in results))


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
    environment = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE)}
    environment |= variables
    for python in (bare, with_package):  # write and read the byte code once
        start_ms(python, environment)
    bare_ms, differences = [], []
    for number in range(pairs):
        order = (bare, with_package) if number % 2 else (with_package, bare)
        first, second = (start_ms(python, environment) for python in order)
        before, after = (first, second) if number % 2 else (second, first)
        bare_ms.append(before)
        differences.append(after - before)
    low, high = interval_of_median(differences)
    return Result(case, statistics.median(bare_ms), statistics.median(differences), low, high)


def start_ms(python: Path, environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([python, "-c", ""], env=environment, check=True)
    return (time.perf_counter() - begin) * 1000


def interval_of_median(values: Sequence[float], draws: int = 1000) -> tuple[float, float]:
    """Bootstrapped 95% interval."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def render(results: Sequence[Result], pairs: int) -> str:
    rows = [
        f"| {r.case} | {r.bare_ms:.2f} | {r.added_ms:+.3f} | {r.low_ms:+.3f} to {r.high_ms:+.3f} |"
        for r in results
    ]
    return "\n".join(
        [
            "# Added interpreter start",
            "",
            f"`python -m benchmarks.bench_startup`: {pairs} pairs of starts of a virtual environment",
            "without and with the package, back to back; median of the differences.",
            f"{_machine.description()}.",
            f"Claim: below {LIMIT_MS:g} ms each.",
            "",
            "| | start without (ms) | added (ms) | 95% interval of the median |",
            "|---|---|---|---|",
            *rows,
            "",
            "Set, a process that never imports a framework pays for one small module and one finder; wrapt",
            "and the package itself are loaded at the first import of a framework.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
