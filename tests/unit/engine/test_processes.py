"""Fork, spawn, and ranks that differ."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import PatchError, apply, verify_ranks
from megatron_rl_patches.testing import spawn_ranks
from tests.worlds.program import run_program

HOLDS_THE_LOCK = """
import os, threading
from megatron_rl_patches.engine import installer
held = threading.Event()

def hold():
    with installer.installer._lock:
        held.set()
        threading.Event().wait(60)

threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    installer.installer.status()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_while_another_thread_holds_the_lock_goes_on(tmp_path: Path) -> None:
    assert run_program(tmp_path, {"program.py": HOLDS_THE_LOCK}).returncode == 0


def _verify(different_rank: int | None) -> str:
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank != different_rank:
        apply("reentrant-train")
    try:
        verify_ranks()
    except PatchError as error:
        return str(error)
    return ""


def test_ranks_that_agree_and_ranks_that_differ() -> None:
    """The latter are named on every rank."""
    assert spawn_ranks(_verify, 2, None, timeout=60) == ["", ""]
    messages: list[Any] = spawn_ranks(_verify, 3, 1, timeout=60)
    assert len(set(messages)) == 1
    place = r"slime\.backends\.megatron_utils\.model\.train"
    by_rank = r"not selected on rank 1; absent \(code \w+\) on rank 0, 2"
    assert re.search(f"{place}: {by_rank}$", messages[0], re.MULTILINE)
