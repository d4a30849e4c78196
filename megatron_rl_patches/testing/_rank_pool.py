"""Ranks that are forks of this process, and run one test after the other in step."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from ._processes import become_group_leader, free_port, group_variables, kill, stacks_of, stacks_on_request

# Other ranks may go on for so long after the first failure. They may wait for the failed rank for ever.
_GRACE_SECONDS = 5.0

#: Calls its argument with what is to be sent to the parent, and with whether that is a failure.
Send = Callable[[Any, bool], None]


class Sent(NamedTuple):
    """Something that a rank has sent while it ran a test."""

    rank: int
    value: Any
    is_failure: bool


class StepOutcome(NamedTuple):
    """What the ranks did in one test.

    Attributes:
        sent: in the order of arrival.
        died: ranks whose process ended, with what is known of it.
        stacks: ranks that were cut off, with the stacks of their threads.
    """

    sent: list[Sent]
    died: dict[int, str]
    stacks: dict[int, str]

    @property
    def went_well(self) -> bool:
        return not (self.died or self.stacks or any(sent.is_failure for sent in self.sent))


def rank_variables(size: int, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun gives to a rank."""
    return {
        **group_variables(size, port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        # A group connects its ranks when it is used first. Most groups of a test never are.
        "TORCH_GLOO_LAZY_INIT": "1",
    }


class _Rank(NamedTuple):
    number: int
    process: BaseProcess
    pipe: connection.Connection
    stack_file: Path


class RankPool:
    """Ranks that are forks of this process, made for the first test and again after each test that failed.

    Args:
        size: how many ranks there are.
        folder: for the files of the ranks.
        prepare: called in each rank when it has been forked, with its number and a folder that is new and
            the same for all ranks.
        run: called in each rank as ``run(test, send)`` with the test that :meth:`run` gets;
            ``send(value, is_failure)`` passes a value to the :class:`StepOutcome`.
    """

    def __init__(
        self,
        size: int,
        folder: Path,
        prepare: Callable[[int, Path], None],
        run: Callable[[Any, Send], None],
    ) -> None:
        self.size = size
        self._folder = folder
        self._prepare = prepare
        self._run = run
        self._ranks: list[_Rank] = []
        self._forks = 0

    def run(self, test: Any, timeout: float) -> StepOutcome:
        """Run the test, which can be pickled, on all ranks, and cut off those that are not done in time."""
        if not self._ranks:
            self._ranks = list(self._forked())
        outcome = StepOutcome([], {}, {})
        running = {rank.pipe: rank for rank in self._ranks}
        for rank in self._ranks:
            with suppress(BrokenPipeError):
                rank.pipe.send(test)
        deadline = time.monotonic() + timeout
        while running:
            ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                break
            for pipe in ready:
                rank = running[pipe]  # type: ignore[index]
                if self._receive(rank, outcome):
                    del running[rank.pipe]
            if not outcome.went_well:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        outcome.stacks.update(
            {rank.number: stacks_of(rank.process, rank.stack_file) for rank in running.values()}
        )
        if not outcome.went_well:
            self.stop()
        return outcome

    def stop(self) -> None:
        """End the ranks, and the processes that they have started."""
        for rank in self._ranks:
            rank.pipe.close()
            kill(rank.process)
        self._ranks = []

    def _receive(self, rank: _Rank, outcome: StepOutcome) -> bool:
        """Take what the rank has sent, and return whether it is done."""
        try:
            message = rank.pipe.recv()
        except (EOFError, ConnectionResetError):
            rank.process.join(1.0)
            code = rank.process.exitcode
            what = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            outcome.died[rank.number] = f"died with {what}\n{rank.stack_file.read_text()}"
            return True
        if message is not None:
            outcome.sent.append(Sent(rank.number, *message))
        return message is None

    def _forked(self) -> Iterator[_Rank]:
        context = ForkContext()
        port = free_port()
        self._forks += 1
        folder = self._folder / f"fork{self._forks}"
        folder.mkdir()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # or else each rank's first collection would copy most of the memory that they share
        for number in range(self.size):
            ours, theirs = context.Pipe()
            stack_file = folder / f"stacks{number}"
            stack_file.touch()
            process = context.Process(
                target=self._serve,
                args=(theirs, rank_variables(self.size, number, port), stack_file),
                name=f"rank {number}",
            )
            process.start()
            theirs.close()
            yield _Rank(number, process, ours, stack_file)

    def _serve(self, pipe: connection.Connection, variables: Mapping[str, str], stack_file: Path) -> None:
        become_group_leader(self._folder)
        os.environ.update(variables)
        with stacks_on_request(stack_file):
            self._prepare(int(variables["RANK"]), stack_file.parent)
            with suppress(EOFError):
                while True:
                    self._run(pipe.recv(), lambda value, is_failure: pipe.send((value, is_failure)))
                    pipe.send(None)
        # An orderly shutdown would join threads of gloo, which may wait for another rank.
        os._exit(0)
