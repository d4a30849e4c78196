"""Programs that tests start in a Python of their own, with files beside them, and their environment."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.worlds.files import write

ROOT = Path(__file__).parents[2]


def without_ours() -> dict[str, str]:
    """Return the environment without the variables of this package."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_RL_PATCHES")}


def run_program(folder: Path, files: Mapping[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Write the files and run ``program.py``, which finds them and this package, and is no rank of a run."""
    write(folder, files)
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), **variables}
    command = [sys.executable, folder / "program.py"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
