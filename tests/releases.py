"""``pytest --megatron-core VERSION``: another release in place of the installed one.

It is unpacked from its wheel to where it comes first on the path, of this process and of those that it
starts. An extension in it that is of another Python is not loaded; Megatron does without.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.packages import Packages

# What a release needs beside what the installed one does: numpy 1 for checkpoints of several ranks, and
# triton, which is imported although no kernel runs.
NEEDS = dict.fromkeys(("0.12.3", "0.13.1", "0.14.0", "0.15.3"), "numpy<2")
NEEDS |= dict.fromkeys(("0.18.2", "0.19.2"), "triton")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-core", metavar="VERSION", help="run with this release in place of the installed one"
    )


def configure(config: pytest.Config) -> None:
    release = config.getoption("--megatron-core")
    if release is None:
        return
    # They warn of what they like.
    config.addinivalue_line("filterwarnings", "ignore")
    if not hasattr(config, "workerinput"):  # of pytest-xdist, which inherits the variable
        paths = [*_paths(release, config.cache.mkdir("megatron-core")), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)


def _paths(release: str, folder: Path) -> Iterator[str]:
    yield str(Packages(folder).unpacked(f"megatron-core {release}"))
    if requirement := NEEDS.get(release):
        yield str(_installed(requirement, folder))


def _installed(requirement: str, folder: Path) -> Path:
    target = folder / requirement
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", str(target), requirement], check=True, timeout=300)
    return target
