"""spawn_ranks: results, failures, hangs, and that nothing is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl_patches import MegatronRLPatchesError
from megatron_rl_patches.testing import RanksFailed, spawn_ranks


def sum_of_ranks(offset: int, *, scale: int = 1) -> tuple[int, dict[str, str]]:
    import torch
    import torch.distributed

    total = torch.tensor(scale * torch.distributed.get_rank() + offset)
    torch.distributed.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "INHERITED", "GIVEN")
    assert torch.get_num_threads() == 1
    return int(total), {name: os.environ[name] for name in names}


def rendezvous_again() -> int:
    import torch.distributed

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()  # or else a rank may be done, and gone, while another still connects to it
    return torch.distributed.get_world_size()


def one_rank_raises() -> None:
    import torch
    import torch.distributed

    if torch.distributed.get_rank() == 1:
        raise LookupError("the root cause")
    torch.distributed.all_reduce(torch.zeros(1))


def one_rank_is_stuck() -> None:
    import torch.distributed

    if torch.distributed.get_rank() == 1:
        waiting_for_godot()


def waiting_for_godot() -> None:
    time.sleep(600)


def die_silently() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def unpicklable_result() -> object:
    return lambda: None


def stuck_with_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(f"{os.getpid()} {child.pid}")
    waiting_for_godot()


def leave_a_thread() -> str:
    threading.Thread(target=waiting_for_godot).start()
    return "done"


def test_results_come_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    results = spawn_ranks(sum_of_ranks, 2, 10, scale=2, env={"GIVEN": "too"}, timeout=240)
    assert [total for total, _ in results] == [22, 22]
    assert [variables["RANK"] for _, variables in results] == ["0", "1"]
    assert results[1][1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "INHERITED": "yes",
        "GIVEN": "too",
    }
    assert "RANK" not in os.environ


def test_a_rank_may_initialize_torch_distributed_itself() -> None:
    assert spawn_ranks(rendezvous_again, 2, timeout=240) == [2, 2]


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
    begin = time.monotonic()
    spawn_ranks(os.getpid, 2, timeout=240)
    return round(3 * (time.monotonic() - begin) + 2)


def test_a_timeout_tells_where_the_rank_hangs(patience: float) -> None:
    with pytest.raises(RanksFailed, match=rf"no result after {patience} s; still running: rank 1") as error:
        spawn_ranks(one_rank_is_stuck, 2, timeout=patience)
    assert "in waiting_for_godot" in str(error.value)
    assert error.value.ranks == ()


def test_a_rank_does_not_wait_for_threads_that_it_leaves(patience: float) -> None:
    """Threads of gloo are among these: before torch 2.8 some never end."""
    assert spawn_ranks(leave_a_thread, 1, timeout=patience) == ["done"]


def test_a_crash_is_reported_with_its_stack() -> None:
    with pytest.raises(RanksFailed, match="Segmentation fault") as error:
        spawn_ranks(die_silently, 1, timeout=240)
    assert "in die_silently" in str(error.value)


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        spawn_ranks(unpicklable_result, 1, timeout=240)


def test_no_process_outlives_the_call(tmp_path: Path, patience: float) -> None:
    pid_file = tmp_path / "pids"
    with pytest.raises(RanksFailed):
        spawn_ranks(stuck_with_a_child, 1, str(pid_file), timeout=patience)
    time.sleep(0.2)
    left = [psutil.Process(int(pid)) for pid in pid_file.read_text().split() if psutil.pid_exists(int(pid))]
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []


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
