"""The plugin and the functions that run it, on a made-up checkout whose tests are like Megatron-LM's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.lab.conformance import runs
from tests.lab.conformance.runs import Result

UTILITIES = """
import os
import torch

class Utils:
    world_size = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["LOCAL_RANK"])
    inited = False

    @staticmethod
    def initialize_distributed():
        if not torch.distributed.is_initialized():
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            torch.cuda.set_device(Utils.rank % torch.cuda.device_count())
            torch.distributed.init_process_group(
                "nccl", init_method=address, rank=Utils.rank, world_size=Utils.world_size
            )

    @staticmethod
    def initialize_model_parallel(size):
        Utils.initialize_distributed()
        if Utils.world_size % size:
            raise RuntimeError(f"world_size ({Utils.world_size}) is not divisible by {size}")
        Utils.inited = True
        return torch.distributed.new_group(list(range(size)))

    @staticmethod
    def destroy_model_parallel():
        if Utils.inited:
            torch.distributed.barrier()
            Utils.inited = False
"""
CONFTEST = """
import pytest
from tests.test_utils.python_scripts.download_unit_tests_dataset import download_and_extract_asset

def pytest_addoption(parser):
    parser.addoption("--experimental", action="store_true")

@pytest.fixture(scope="session", autouse=True)
def ensure_test_data():
    download_and_extract_asset(assets_dir="/opt/data")

@pytest.fixture
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("ignored", numbered=False).parent.parent
"""
TESTS = """
import os, signal, sys, time
import pytest, torch
from tests.unit_tests.test_utilities import Utils

rank = Utils.rank
stdout = sys.stdout

def test_passes(shared, request, capsys):
    print("a module keeps the output that it was imported with", file=stdout)
    print("a rank")
    assert capsys.readouterr().out == "a rank\\n"
    assert not request.config.getoption("--experimental")
    assert torch.ones(2, device="cuda").sum() == 2
    (shared / str(rank)).touch()
    torch.distributed.barrier()
    assert len(list(shared.glob("[0-9]"))) == Utils.world_size

def test_fails():
    assert rank != Utils.world_size - 1, "the last rank"
    torch.distributed.barrier()

def test_needs_two_ranks():
    Utils.initialize_model_parallel(2)
    ranks = torch.tensor([rank], device="cuda")
    torch.distributed.all_reduce(ranks)
    assert ranks.item() == 1
    Utils.destroy_model_parallel()
    assert len(torch.distributed.distributed_c10d._world.pg_map) == 1

def test_hangs():
    if Utils.world_size == 1:
        time.sleep(1000)

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_needs_transformer_engine():
    import transformer_engine

def test_needs_data():
    open("/no/such/data")

@pytest.mark.skipif(True, reason="Requires TE >= 1.9")
def test_skips_without_transformer_engine():
    raise AssertionError

@pytest.mark.skip(reason="of no use today")
def test_skips():
    raise AssertionError

@pytest.mark.experimental
def test_is_experimental(request):
    assert request.config.getoption("--experimental")

@pytest.mark.parametrize("time", [1, 2])
def test_draws_what_a_new_process_draws_on_a_gpu(time):
    assert torch.equal(torch.randn(3, device="cuda"), torch.randn(3, generator=torch.Generator()))

@pytest.mark.parametrize("number", range(torch.cuda.device_count()))
def test_comes_after_all_that(number):
    assert torch.distributed.is_initialized()
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("Megatron-LM")
    files = {
        "megatron/core/__init__.py": "",
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/conftest.py": CONFTEST,
        "tests/unit_tests/test_utilities.py": UTILITIES,
        "tests/unit_tests/test_some.py": TESTS,
        "tests/unit_tests/test_needs_a_package.py": "import no_such_package",
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-x'",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _by_name(results: Iterable[Result]) -> dict[str, Result]:
    return {result.nodeid.partition("::")[2] or result.nodeid: result for result in results}


@pytest.fixture(scope="module")
def results(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("results") / "results.jsonl"
    runs.run_at_smallest(checkout, ranks=(1, 2), results=file, hang_after=4)
    return file


@pytest.mark.slow
def test_verdicts_at_one_rank(results: Path) -> None:
    at_one = _by_name(result for result in runs.read_results(results) if result.ranks == 1)
    assert {name: (result.outcome, result.reason) for name, result in at_one.items()} == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", ""),
        "test_needs_two_ranks": ("not_runnable", "more ranks"),
        "test_hangs": ("hangs", ""),
        "test_dies": ("failed", ""),
        "test_needs_transformer_engine": ("not_runnable", "TransformerEngine"),
        "test_needs_data": ("not_runnable", "data"),
        "test_skips_without_transformer_engine": ("not_runnable", "TransformerEngine"),
        "test_skips": ("skipped", ""),
        "test_is_experimental": ("passed", ""),
        "test_draws_what_a_new_process_draws_on_a_gpu[1]": ("passed", ""),
        "test_draws_what_a_new_process_draws_on_a_gpu[2]": ("passed", ""),
        "test_comes_after_all_that[0]": ("passed", ""),
        "tests/unit_tests/test_needs_a_package.py": ("not_runnable", "other package"),
    }
    assert "the last rank" in at_one["test_fails"].message
    assert "\nat tests/unit_tests/test_some.py:" in at_one["test_fails"].message
    assert "time.sleep" in at_one["test_hangs"].message or "in test_hangs" in at_one["test_hangs"].message
    assert "SIGKILL" in at_one["test_dies"].message


@pytest.mark.slow
def test_what_may_need_more_ranks_is_tried_again(results: Path) -> None:
    at_two = _by_name(result for result in runs.read_results(results) if result.ranks == 2)
    assert {name: result.outcome for name, result in at_two.items()} == {
        "test_fails": "failed",
        "test_needs_two_ranks": "passed",
        "test_dies": "failed",
    }
    assert at_two["test_fails"].message.startswith("rank 1 of 2: AssertionError: the last rank")
    final = _by_name(runs.final_of(results))
    assert {final[name].ranks for name in at_two} == {2}
    assert (final["test_passes"].ranks, final["test_needs_two_ranks"].ranks) == (1, 2)


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(checkout: Path, results: Path, tmp_path: Path) -> None:
    lines = [line for line in results.read_text().splitlines() if json.loads(line)["ranks"] == 1]
    file = tmp_path / "results.jsonl"
    other_lines = [line for line in lines if "test_passes" not in line]
    (last_line,) = set(lines) - set(other_lines)
    file.write_text("\n".join([*other_lines, last_line[:40]]))
    runs.run(checkout, results=file)
    *_, again = results_again = runs.read_results(file)
    assert again.nodeid.endswith("test_passes") and again.outcome == "passed"
    assert len(results_again) == len(lines)


@pytest.mark.slow
def test_verdicts_with_patches(checkout: Path, results: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    names = "test_passes", "test_needs_two_ranks", "test_skips", "test_needs_data"
    lines = [line for line in results.read_text().splitlines() if json.loads(line)["nodeid"].endswith(names)]
    file.write_text("\n".join(lines) + "\n")
    runs.run_with_patches(checkout, "all", results=file)
    patched = _by_name(result for result in runs.read_results(file) if result.patches)
    assert {name: (one.outcome, one.ranks) for name, one in patched.items()} == {
        "test_passes": ("passed", 1),
        "test_needs_two_ranks": ("passed", 2),
        "test_skips": ("skipped", 1),
    }
    assert runs.changes(file, "all") == []
    whole = file.read_text()
    one = next(line for line in whole.splitlines() if "test_passes" in line and '"all"' in line)
    file.write_text(whole.replace(one, "").replace("\n\n", "\n"))
    assert [change.patched.message for change in runs.changes(file, "all")] == ["it was not collected"]
    file.write_text(whole.replace('"all", "outcome": "passed"', '"all", "outcome": "failed"'))
    changed = runs.changes(file, "all")
    assert [change.without.ranks for change in changed] == [1, 2]
    assert runs.repeated_changes(checkout, changed, "all", hang_after=4) == []


def test_a_terminated_command_takes_its_tests_along(checkout: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.lab.conformance", str(checkout), "--ranks=1"]
    with subprocess.Popen([*command, f"--results={tmp_path / 'results'}"], stderr=subprocess.DEVNULL) as run:
        while not (children := psutil.Process(run.pid).children()):
            time.sleep(0.1)
        run.terminate()
    assert run.returncode != 0
    assert psutil.wait_procs(children, timeout=20)[1] == []


def test_a_folder_that_is_no_checkout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(runs.TestsNotRun, match="pytest ended with exit code 4"):
        runs.run(tmp_path, results=tmp_path / "results.jsonl")
    assert "is no checkout of Megatron-LM" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("message", "skipped", "reason", "ranks"),
    [
        ("RuntimeError: world_size (1) is not divisible by 8", False, runs.MORE_RANKS, 8),
        ("not divisible by expert_tensor_model_pipeline_parallel size (4)", False, runs.MORE_RANKS, 4),
        ("assert 8 <= 4\n +  where 4 = Utils.world_size", False, runs.MORE_RANKS, 1),
        ("ValueError: Rank 7 is out of range. Valid ranks are 0 to 3", False, runs.MORE_RANKS, 1),
        ("Multi-rank test requires WORLD_SIZE > 1", True, runs.MORE_RANKS, 1),
        ("Test requires at least 4 GPUs", True, runs.MORE_RANKS, 4),
        ("Test requires world_size=8, but got 1", True, runs.MORE_RANKS, 8),
        ("This test specifically requires 8 GPUs", True, runs.MORE_RANKS, 8),
        ("NameError: name 'FP8GlobalStateManager' is not defined", False, runs.TRANSFORMER_ENGINE, 1),
        ("ModuleNotFoundError: No module named 'apex'", False, runs.CUDA_KERNEL, 1),
        ("RuntimeError: 0 active drivers ([]). There should only be one.", False, runs.CUDA_KERNEL, 1),
        ("at hybrid_optimizer.py:101: gpu_param = copies[param]", False, runs.GPU_TENSOR, 1),
        ("AcceleratorError: CUDA driver version is insufficient for CUDA", False, runs.CUDA_KERNEL, 1),
        ("ModuleNotFoundError: No module named 'six'", False, runs.OTHER_PACKAGE, 1),
        ("Multiple instances requires distributed optimizer to be enabled", True, "", 1),
        ("ImportError: emerging-optimizers package is required", False, runs.OTHER_PACKAGE, 1),
        ("ModuleNotFoundError: No module named 'megatron.core.nothing'", False, "", 1),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/opt/data'", False, runs.DATA, 1),
        ("AssertionError: assert 1 == 2", False, "", 1),
    ],
)
def test_reasons_and_ranks(message: str, skipped: bool, reason: str, ranks: int) -> None:
    assert runs.reason_of(message, skipped=skipped) == reason
    assert runs.ranks_needed(message) == ranks


def test_no_more_ranks_than_the_ci_of_megatron_has() -> None:
    message = "TP*PP > 8 is larger than world size"
    assert runs.reason_of(message, skipped=True, ranks=4) == runs.MORE_RANKS
    assert runs.reason_of(message, skipped=True, ranks=8) == ""
