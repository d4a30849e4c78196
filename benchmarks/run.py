"""Measure what this package claims, and write it into the pages in docs and the JSON files beside them.

    python -m benchmarks.run [NAME ...] [--quick]

Functions of other frameworks stand beside ours where their packages are installed, or where SLIME_DIR,
VERL_DIR, NEMO_RL_DIR, OPENCLAW_DIR, SKYRL_DIR and TRL_DIR name checkouts or unpacked wheels. The page says
what is left out, and why. Everything is measured on the CPU, and ``make gpu`` measures a GPU. The exit code
is 1 if some result is not what is claimed. ``make screenshots`` draws the plots from the JSON files.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .page import Benchmark, Parts, as_json, filled, machine

DOCS = Path(__file__).parents[1] / "docs"
NAMES = (
    "startup",
    "overhead",
    "inference_memory",
    "loss",
    "head",
    "tiles",
    "topk",
    "distillation",
    "objectives",
    "students",  # takes about half an hour on two cores
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="run at small sizes, and write nothing")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    missed = [name for name in options.names or NAMES if not run(name, options.quick)]
    if missed:
        print(f"not as claimed: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def run(name: str, quick: bool) -> bool:
    """Run one benchmark; return whether the result is what is claimed, which a quick run cannot tell."""
    benchmark: Benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    result = benchmark.measure(quick)
    parts: Parts = {"machine": f"{machine()}.", **benchmark.parts(result)}
    print(as_json(parts))  # before anything else can go wrong
    file = DOCS / "benchmarks" / f"{name}.md"
    page = filled(file.read_text(), parts)
    if quick:
        return True
    file.write_text(page)
    file.with_suffix(".json").write_text(as_json(parts))
    return benchmark.is_met(result)


if __name__ == "__main__":
    sys.exit(main())
