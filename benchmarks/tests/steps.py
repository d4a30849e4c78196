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
    """Print the number of a process with a session of its own, which no interrupt ends, and wait."""
    succeed(save)
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    waiting = [sys.executable, "-c", stubborn]
    print(subprocess.Popen(waiting, start_new_session=True).pid, flush=True)
    time.sleep(600)
