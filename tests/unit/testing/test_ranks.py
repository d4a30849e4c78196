"""spawn_ranks: results, failures, hangs, and that nothing is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from pytest import MonkeyPatch

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.testing import RanksFailed, spawn_ranks


def on_a_rank(offset: int, *, scale: int = 1) -> tuple[int, int, dict[str, str]]:
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
    return int(total), dist.get_world_size(), {name: os.environ[name] for name in names}


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise LookupError("the root cause")
    dist.all_reduce(torch.zeros(1))


def waiting_for_godot() -> None:
    time.sleep(600)


def die_silently() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def unpicklable_result() -> object:
    return lambda: None


def stuck_with_a_child(pid_file: str) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        child = subprocess.Popen(["sleep", "600"])
        Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
        waiting_for_godot()


def test_results_come_by_rank(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    results = spawn_ranks(on_a_rank, 2, 10, scale=2, env={"GIVEN": "too"}, timeout=240)
    ours = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "INHERITED": "yes", "GIVEN": "too"}
    assert results == [(22, 2, {"RANK": rank, "LOCAL_RANK": rank, **ours}) for rank in "01"]
    assert "RANK" not in os.environ


def test_the_root_cause_comes_first() -> None:
    with pytest.raises(RanksFailed, match="rank 1 failed") as error:
        spawn_ranks(one_rank_raises, 2, timeout=240)
    assert isinstance(error.value, MegatronRLPatchesError)
    assert error.value.ranks[0] == 1
    message = str(error.value)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (type(copy), str(copy), copy.ranks) == (RanksFailed, message, error.value.ranks)
    first_traceback = message.split("--- rank ")[1]
    assert "LookupError: the root cause" in first_traceback and "in one_rank_raises" in first_traceback


@pytest.fixture(scope="module")
def patience() -> float:
    """A timeout, in seconds, within which ranks surely start, however busy the machine is."""
    spawn_ranks(os.getpid, 1, timeout=240)  # which imports what later ranks need
    begin = time.monotonic()
    spawn_ranks(os.getpid, 2, timeout=240)
    return round(3 * (time.monotonic() - begin) + 2)


def test_a_timeout_tells_where_the_rank_hangs_and_leaves_no_process(tmp_path: Path, patience: float) -> None:
    file = tmp_path / "pids"
    with pytest.raises(RanksFailed, match=f"no result after {patience} s; still running: rank 1") as error:
        spawn_ranks(stuck_with_a_child, 2, str(file), timeout=patience)
    assert "in waiting_for_godot" in str(error.value)
    assert error.value.ranks == ()
    time.sleep(0.2)
    left = [psutil.Process(int(pid)) for pid in file.read_text().split() if psutil.pid_exists(int(pid))]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("job", [die_silently, unpicklable_result])
def test_crashes_and_results_that_cannot_travel(job: Callable[[], object]) -> None:
    with pytest.raises(RanksFailed) as error:
        spawn_ranks(job, 1, timeout=240)
    messages = ("Segmentation fault", "in die_silently") if job is die_silently else ("pickle",)
    assert all(message in str(error.value) for message in messages)


def test_nothing_outlives_a_caller_that_is_killed(tmp_path: Path) -> None:
    pid_file, temporary = tmp_path / "pids", tmp_path / "temporary"
    temporary.mkdir()
    code = (
        "from megatron_rl_patches.testing import spawn_ranks\n"
        f"from {__name__} import stuck_with_a_child\n"
        f"spawn_ranks(stuck_with_a_child, 1, {str(pid_file)!r})"
    )
    environ = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as caller:
        while len(pids := pid_file.read_text().split() if pid_file.exists() else []) < 2:
            assert caller.poll() is None
            time.sleep(0.05)
        rank_and_child = [psutil.Process(int(pid)) for pid in pids]
        assert list(temporary.iterdir())
        caller.kill()
    assert psutil.wait_procs(rank_and_child, timeout=20)[1] == []
    assert list(temporary.iterdir()) == []
