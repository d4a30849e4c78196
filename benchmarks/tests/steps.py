"""Steps of a run on a GPU that end in different ways."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def succeed(save: Any) -> None:
    from benchmarks.gpu_steps import StepResult

    save(StepResult(figures={"answer": 42}))


def fail(save: Any) -> None:
    succeed(save)
    raise ValueError("no such kernel")


def die(save: Any) -> None:
    succeed(save)
    os._exit(9)


def hang(save: Any) -> None:
    """Print the number of a process with a session of its own, as the demo's launcher is, and wait."""
    succeed(save)
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(subprocess.Popen(waiting, start_new_session=True).pid, flush=True)
    time.sleep(600)
