"""Steps of a run on a GPU that end in different ways."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any


def succeed() -> Any:
    from benchmarks.gpu_steps import StepResult

    return StepResult(figures={"answer": 42})


def fail() -> Any:
    raise ValueError("no such kernel")


def hang() -> Any:
    """Print the number of a process with a session of its own, as the demo's launcher is, and wait."""
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(waiting, start_new_session=True).pid, flush=True)
    time.sleep(600)
