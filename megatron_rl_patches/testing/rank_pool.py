"""Ranks, each a process of its own on this machine."""

from __future__ import annotations

import faulthandler
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

# Processes inherit ``os.environ``, and only one thread at a time may change it for them.
_environ_lock = threading.Lock()
# Other ranks may go on for so long after the first failure, so that those that fail alike are reported, too.
_GRACE_SECONDS = 2.0
#: What a rank may send when all ranks are ready to work.
STARTED = "started"
#: Lines of stacks that say nothing about a test.
_MACHINERY = r'^(  File ".*/(_pytest|pluggy|multiprocessing|megatron_rl_patches/testing)/.* in |Exten).*\n'
#: What gloo and torch's store say to a rank whose peer has died or left.
_LOST_CONNECTION = re.compile(r"[Cc]onnection (was likely )?(closed|reset|refused)|Broken pipe")


@dataclass
class Outcome:
    """What the ranks did until they were done, failed, or were cut off.

    Attributes:
        sent: pairs of a rank and a value that it has sent, in the order of arrival.
        died: ranks whose process ended, with what is known of it.
        stacks: ranks that were cut off, with the stacks of their threads.
        failed_at: when ranks first sent a failure, or died.
        started_at: when a rank first sent ``STARTED``.
    """

    sent: list[tuple[int, Any]] = field(default_factory=list)
    died: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    failed_at: dict[int, float] = field(default_factory=dict)
    started_at: float | None = None

    @property
    def went_well(self) -> bool:
        return not (self.failed_at or self.stacks)

    @property
    def failed(self) -> list[int]:
        """Ranks that died or have sent a failure, in the order of time; last, those that lost a connection.

        A death is noticed late, and other ranks fail since they lose their connection to the dead one.
        """
        sent = dict(self.sent)
        lost = {rank for rank in self.failed_at if _LOST_CONNECTION.search(str(sent.get(rank, "")))}
        return sorted(self.failed_at, key=lambda rank: (rank in lost, self.failed_at[rank]))


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


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    pipe: connection.Connection
    stack_file: Path

    def is_done(self, outcome: Outcome) -> bool:
        """Take what the rank has sent, and return whether it is done or has died."""
        has_ended = not self.process.is_alive()  # asked first, as what it has sent is in the pipe by then
        try:
            while self.pipe.poll():
                message = self.pipe.recv()
                if message is None:
                    return True
                if message == STARTED:
                    outcome.started_at = outcome.started_at or time.monotonic()
                    continue
                moment, value, is_failure = message
                outcome.sent.append((self.number, value))
                if is_failure:
                    outcome.failed_at.setdefault(self.number, moment)
        except (EOFError, ConnectionResetError):
            has_ended = True
        if has_ended:
            self.process.join(1.0)
            code = self.process.exitcode
            what = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            outcome.died[self.number] = f"died with {what}, no traceback\n{self.stacks()}"
            outcome.failed_at.setdefault(self.number, time.monotonic())
        return has_ended

    def stacks(self) -> str:
        """Return the stacks that the rank has written, without what starts, watches and runs ranks."""
        threads = self.stack_file.read_text().split("\n\n")
        text = "\n\n".join(thread for thread in threads if f" in {_end_with_parent.__name__}\n" not in thread)
        return re.sub(_MACHINERY, "", text, flags=re.MULTILINE)

    def stacks_now(self) -> str:
        """Make the rank write the stacks of its threads, and return them."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while not self.stack_file.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.02)
        return self.stacks() or "(starting)"


@dataclass
class RankPool:
    """The processes of ``size`` ranks.

    Attributes:
        work: called in each rank as ``work(pipe, folder)``, after which the rank ends; the folder is the
            same for all ranks, and goes with them. It calls :func:`send` for each value, and sends ``None``
            when it is done.
        context: how processes are started: anew, with a pickled ``work``, or as forks.
        env: environment variables of the ranks, besides those inherited and those that torchrun sets.
        parent: the folder in which the ranks' own is made; by default, that for temporary files.
    """

    size: int
    work: Callable[[connection.Connection, Path], None]
    context: SpawnContext | ForkContext
    env: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    ranks: list[_Rank] = field(default_factory=list, init=False)

    def wait(self, timeout: float, start_timeout: float = 0.0) -> Outcome:
        """Wait until all ranks are done, and cut off those that are not done in time.

        The time begins when a rank has sent ``STARTED``, after ``start_timeout`` at last.
        """
        deadline = time.monotonic() + start_timeout + timeout
        running = list(self.ranks)
        outcome = Outcome()
        while running and (now := time.monotonic()) < deadline:
            # The pipe of a rank that has died stays open as long as a process lives that it has started.
            ends = [end for rank in running for end in (rank.pipe, rank.process.sentinel)]
            connection.wait(ends, deadline - now)
            running = [rank for rank in running if not rank.is_done(outcome)]
            if start_timeout and outcome.started_at:
                start_timeout, deadline = 0.0, outcome.started_at + timeout
            if outcome.failed_at:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        outcome.stacks.update({rank.number: rank.stacks_now() for rank in running})
        if not outcome.went_well:
            self.close()
        return outcome

    def close(self) -> None:
        """End the ranks, and the processes that they have started."""
        for rank in self.ranks:
            rank.pipe.close()
            if rank.process.is_alive():
                _kill_children(rank.process.pid or 0)
            # It leads a process group, in which its children stay if it has died.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid or 0, signal.SIGKILL)
            rank.process.kill()
            rank.process.join()
            rank.process.close()
            shutil.rmtree(rank.stack_file.parent, ignore_errors=True)
        self.ranks = []

    def start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=self.parent))
        own = {**group_variables(self.size, _free_port()), **self.env}
        for number in range(self.size):
            own |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            ours, theirs = self.context.Pipe()
            stack_file = folder / f"stacks{number}"
            stack_file.touch()
            arguments = (theirs, stack_file, self.work)
            process = self.context.Process(target=_serve, args=arguments, name=f"rank {number}")
            with _environ_lock:
                before = dict(os.environ)
                try:
                    os.environ.update(own)
                    process.start()
                finally:
                    for name in own.keys() - before.keys():
                        os.environ.pop(name, None)
                    os.environ.update({name: before[name] for name in own.keys() & before.keys()})
            theirs.close()
            self.ranks.append(_Rank(number, process, ours, stack_file))


def _serve(pipe: connection.Connection, stack_file: Path, work: Any) -> None:
    if _environ_lock.locked():  # in a fork, by the thread that has made it
        _environ_lock.release()
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(stack_file.parent,), daemon=True).start()
    with open(stack_file, "a") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        work(pipe, stack_file.parent)
        sys.stdout.flush()
        sys.stderr.flush()
        _kill_children(os.getpid())
        # An orderly end would destroy the process group and join gloo's threads. These may wait for a rank
        # that has died, and before torch 2.8 for the GIL, which the destructor holds: see
        # pytorch/pytorch#154976.
        os._exit(0)


def send(pipe: connection.Connection, value: Any, is_failure: bool) -> None:
    """Send a value from the process of a rank to the :class:`Outcome`."""
    pipe.send((time.monotonic(), value, is_failure))


def _end_with_parent(folder: Path) -> None:
    """Remove the folder and end this process group when the parent has ended, which may have been killed."""
    parent_process().join()  # type: ignore[union-attr]  # a rank has one
    _kill_children(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _kill_children(pid: int) -> None:
    """Kill the processes that a live process has started, also those in other process groups."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()


def _free_port() -> int:
    """Return a free port for a rendezvous; until a rank binds it, systems give others higher ports."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):  # nobody listens there
                return port
