"""Steps of a run on a GPU that end in different ways."""

from __future__ import annotations

import time

from benchmarks._gpu_steps import Result


def succeed(dry: bool) -> Result:
    return Result(figures={"answer": 42})


def fail(dry: bool) -> Result:
    raise ValueError("no such kernel")


def hang(dry: bool) -> Result:
    time.sleep(600)
    return Result()
