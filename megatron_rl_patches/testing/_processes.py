"""What processes that are ranks share, whether they are spawned for a function or forked for many tests."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path


def group_variables(size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives to all ranks of a machine alike."""
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The machine's own name often does not resolve on a laptop without a network.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_group_leader() -> None:
    """Make the processes that this rank starts end with it, and the rank with its parent."""
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, daemon=True).start()


@contextmanager
def stacks_on_request(file: Path) -> Iterator[None]:
    """Write the stacks of all threads to the file when :func:`stacks_of` asks, or at a crash."""
    with open(file, "a") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        yield


def stacks_of(process: BaseProcess, file: Path) -> str:
    """Make a running rank write the stacks of its threads, and return them."""
    before = file.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while file.stat().st_size == before and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.02)
    return file.read_text()[before:]


def kill(process: BaseProcess) -> None:
    # The rank leads a process group, so the processes that it has started are killed, too.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
