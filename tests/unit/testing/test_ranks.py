"""Ranks, anew and as forks: results, failures, hangs, and that nothing is left behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import RanksFailed, spawn_ranks
from megatron_rl_patches.testing.rank_pool import Outcome
from megatron_rl_patches.testing.ranks import results_of, run_on_ranks
from tests.ranks import by_speed

Ranks = Callable[..., list[Any]]


def on_a_rank(offset: int, *, scale: int = 1) -> tuple[int, int, int, dict[str, str]]:
    total = torch.tensor(scale * dist.get_rank() + offset)
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    # A rank may initialize torch.distributed itself.
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    dist.barrier()  # or else a rank may be done, and gone, while another still connects to it
    # A rank does not wait for threads that it leaves. Before torch 2.8 some threads of gloo never end.
    threading.Thread(target=waiting_for_godot).start()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "INHERITED", "GIVEN")
    return int(total), dist.get_world_size(), child(True), {name: os.environ[name] for name in names}


def waiting_for_godot() -> None:
    time.sleep(600)


def one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(torch.zeros(1))


def child(start_new_session: bool) -> int:
    return subprocess.Popen(["sleep", "600"], start_new_session=start_new_session).pid


def stuck_with_children(pid_file: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        Path(pid_file).write_text(f"{os.getppid()} {os.getpid()} {child(False)} {child(True)}")
        waiting_for_godot()
    dist.barrier()


def alive(pids: Iterable[int]) -> list[int]:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process.pid for process in psutil.wait_procs(processes, timeout=20)[1]]


def test_results_come_by_rank(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    results = spawn_ranks(on_a_rank, 2, 10, scale=2, env={"GIVEN": "too"}, timeout=240)
    ours = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "INHERITED": "yes", "GIVEN": "too"}
    assert [(total, size, names) for total, size, _, names in results] == [
        (22, 2, {"RANK": rank, "LOCAL_RANK": rank, **ours}) for rank in "01"
    ]
    assert alive(pid for _, _, pid, _ in results) == []


def test_threads_run_ranks_at_once_and_variables_stay_those_of_the_caller(monkeypatch: MonkeyPatch) -> None:
    start = SpawnProcess.start

    def start_slowly(process: SpawnProcess) -> None:
        tag = os.environ["TAG"]
        time.sleep(0.1)
        assert os.environ["TAG"] == tag  # and not that of the other thread
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", start_slowly)

    def run(size: int) -> list[str]:
        tag = partial(os.getenv, "TAG")  # which gets a function as the default, too
        return results_of(run_on_ranks(tag, size, 240, {"TAG": str(size)}, SpawnContext()), 240)

    before = dict(os.environ)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (2, 3))) == [["2"] * 2, ["3"] * 3]
    assert dict(os.environ) == before
    with pytest.raises(InvalidInputError, match="env has 'TAG': 3; expected a mapping of strings"):
        spawn_ranks(os.getpid, 1, env={"TAG": 3})  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="the number of ranks is 0"):
        spawn_ranks(os.getpid, 0)


def test_a_timeout_tells_where_ranks_hang_and_leaves_no_process(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with pytest.raises(RanksFailed, match="no result after 5 s; still running: rank 0, 1") as error:
        ranks(stuck_with_children, 2, str(file), timeout=5)
    assert "in waiting_for_godot" in str(error.value) and "selectors.py" not in str(error.value)
    assert error.value.ranks == ()
    assert alive(map(int, file.read_text().split()[1:])) == []


def test_a_death_comes_before_the_failures_that_it_causes(ranks: Ranks) -> None:
    """The connections of a process end before it does, so another rank may fail first."""
    lost = "RuntimeError: [transport/tcp/pair.cc] Connection closed by peer"
    times = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    outcome = Outcome(sent=[(0, lost), (1, "ValueError: the cause")], failed_at=times, died={2: "", 3: ""})
    assert outcome.failed == [1, 2, 3, 0]  # one that only left, as watchdogs do, comes after the cause
    with pytest.raises(RanksFailed, match="rank 1 failed first") as error:
        ranks(one_rank_dies, 2, timeout=240)
    first = str(error.value).split("--- rank ")[1]
    assert "Segmentation fault" in first and "in one_rank_dies" in first
    copy = pickle.loads(pickle.dumps(error.value))
    assert (str(copy), copy.ranks[0]) == (str(error.value), 1) and isinstance(copy, MegatronRLPatchesError)


CALLER = f"""
import pytest
from {__name__} import spawn_ranks, stuck_with_children
@pytest.mark.ranks(1, fresh=True)
def test_stuck(): stuck_with_children("pids")
if __name__ == "__main__": spawn_ranks(stuck_with_children, 1, "pids")
"""


@pytest.mark.parametrize("end", by_speed(["killed", "pytest killed", "Ctrl-C"], fast=["killed"]))
def test_nothing_outlives_a_caller_that_is_killed(end: str, tmp_path: Path) -> None:
    pid_file, temporary, file = tmp_path / "pids", tmp_path / "temporary", tmp_path / "test_file.py"
    temporary.mkdir()
    file.write_text(CALLER)
    options = [] if end == "killed" else ["-mpytest", "-pno:cacheprovider"]
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, *options, file], env=environ, cwd=tmp_path) as caller:
        while len(pids := pid_file.read_text().split() if pid_file.exists() else []) < 4:
            assert caller.poll() is None
            time.sleep(0.05)
        assert list(temporary.iterdir())
        caller.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    assert alive(map(int, pids)) == []
    assert list(temporary.iterdir()) == []
