"""Runs on a made-up checkout whose tests are like Megatron-LM's; the command; and the records."""

import json
from pathlib import Path

import pytest

from tests.lab.conformance import report, runs
from tests.lab.conformance.__main__ import main
from tests.worlds.files import write

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
            torch.cuda.set_device(Utils.rank % torch.cuda.device_count())
            torch.distributed.init_process_group("nccl", rank=Utils.rank, world_size=Utils.world_size)

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
import pytest, torch
from tests.unit_tests.test_utilities import Utils

rank = Utils.rank

def test_passes(shared, request, capsys):
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

def test_needs_transformer_engine():
    import transformer_engine

@pytest.mark.skip(reason="of no use today")
def test_skips():
    raise AssertionError

@pytest.mark.experimental
def test_is_experimental(request):
    assert request.config.getoption("--experimental")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    return write(tmp_path_factory.mktemp("Megatron-LM"), files)


@pytest.mark.slow
def test_the_command_compares_runs_without_and_with_patches(checkout: Path, tmp_path: Path) -> None:
    file, facts = tmp_path / "results.jsonl", tmp_path / "facts.json"
    command = [str(checkout), "--ranks=1,2", f"--results={file}", f"--json={facts}"]
    assert main(command) == 0
    results: dict[tuple[int, str], dict[str, runs.Result]] = {}
    for one in runs.read_results(file):
        name = one.nodeid.partition("::")[2] or one.nodeid
        results.setdefault((one.ranks, one.patches), {})[name] = one
    at_one, at_two = results[1, ""], results[2, ""]
    assert {name: (result.outcome, result.reason) for name, result in at_one.items()} == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", ""),
        "test_needs_two_ranks": ("not_runnable", "more ranks"),
        "test_needs_transformer_engine": ("not_runnable", "TransformerEngine"),
        "test_skips": ("skipped", ""),
        "test_is_experimental": ("passed", ""),
        "tests/unit_tests/test_needs_a_package.py": ("not_runnable", "other package"),
    }
    assert "\nat tests/unit_tests/test_some.py:" in at_one["test_fails"].message
    # What may need more ranks is tried again, and what runs at all runs with patches.
    outcomes = {"test_fails": "failed", "test_needs_two_ranks": "passed"}
    assert {name: result.outcome for name, result in at_two.items()} == outcomes
    assert at_two["test_fails"].message.startswith("rank 1 of 2: AssertionError: the last rank")
    assert results[2, "all"].keys() == at_two.keys()
    assert results[1, "all"].keys() == {"test_passes", "test_skips", "test_is_experimental"}
    counts = json.loads(facts.read_text())
    assert (counts["tests"], counts["passed"], counts["skipped"], counts["commit"]) == (7, 3, 1, None)
    assert counts["not_runnable"] == {"TransformerEngine": 1, "other package": 1}
    # A test that only one of the runs has counts as changed.
    lines = file.read_text().splitlines()
    file.write_text("\n".join(line for line in lines if not ("test_passes" in line and '"all"' in line)))
    [change] = runs.Runs(checkout, file).changes("all")
    assert change.patched.message == "it was not collected"


@pytest.mark.parametrize(
    ("message", "skipped", "reason", "ranks"),
    [
        ("RuntimeError: world_size (1) is not divisible by 8", False, runs.MORE_RANKS, 8),
        ("Test requires world_size=8, but got 1", True, runs.MORE_RANKS, 8),
        ("NameError: name 'FP8GlobalStateManager' is not defined", False, runs.TRANSFORMER_ENGINE, 1),
        ("ModuleNotFoundError: No module named 'apex'", False, runs.CUDA_KERNEL, 1),
        ("ModuleNotFoundError: No module named 'megatron.core.nothing'", False, "", 1),
        ("AssertionError: assert 1 == 2", False, "", 1),
    ],
)
def test_reasons_and_ranks(message: str, skipped: bool, reason: str, ranks: int) -> None:
    assert runs.reason_of(message, skipped=skipped) == reason
    assert runs.ranks_needed(message) == ranks
    # Megatron's own CI has no more than eight ranks.
    at_eight = "" if skipped and reason == runs.MORE_RANKS else reason
    assert runs.reason_of(message, skipped=skipped, ranks=8) == at_eight


def test_the_pages_show_the_records() -> None:
    for page, text in report.pages().items():
        assert page.read_text("utf-8") == text, "run: python -m tests.lab.conformance.report"
