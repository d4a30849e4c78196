"""What the processes of ranks have in common: spawned for a function, forked for tests, or of the demo."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil


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


def become_group_leader(folder: Path) -> None:
    """End this rank, and the processes that it starts, with its parent, and remove the parent's folder then.

    A parent that is killed cannot do either.
    """
    os.setpgid(0, 0)
    if (parent := parent_process()) is not None:
        _end_after(lambda: connection.wait([parent.sentinel]), folder)


def end_with(pid: int, folder: Path) -> None:
    """End this rank, and the processes that it starts, when another process ends; remove the folder then."""

    def wait() -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.2)

    _end_after(wait, folder)


def _end_after(wait: Callable[[], object], folder: Path) -> None:
    """Call ``wait`` in a thread; when it returns, remove the folder and kill this process group."""

    def end() -> None:
        wait()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()


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
