"""``pytest --megatron-core VERSION``: run the tests on another release than the installed one.

The release is unpacked from its wheel into pytest's cache, and its folder comes first on ``PYTHONPATH``, for
this process and for those that it starts. Megatron does without its compiled extension where the wheel was
built for another Python. A folder in place of the version is a checkout of Megatron-LM's main.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.packages import Packages

# Releases that need a package which the installed environment lacks or has in another version: numpy 1 to
# save checkpoints from several ranks, and triton, which is imported although no kernel runs.
NEEDS = dict.fromkeys(("0.14.0", "0.15.3"), "numpy<2")
NEEDS |= dict.fromkeys(("0.18.2", "0.19.2"), "triton")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-core",
        metavar="VERSION",
        help="run with this release, or this checkout, instead of the installed one",
    )


def configure(config: pytest.Config) -> None:
    release = config.getoption("--megatron-core")
    if release is None:
        return
    # Other releases warn of other things.
    config.addinivalue_line("filterwarnings", "ignore")
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist inherit the variable
        paths = [*_paths(release, config.cache.mkdir("megatron-core")), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)


def _paths(release: str, folder: Path) -> Iterator[str]:
    if Path(release).is_dir():
        yield str(Path(release).resolve())
        return
    yield str(Packages(folder).unpacked(f"megatron-core {release}"))
    if requirement := NEEDS.get(release):
        yield str(_installed(requirement, folder))


def _installed(requirement: str, folder: Path) -> Path:
    target = folder / requirement
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", str(target), requirement], check=True, timeout=300)
    return target
