"""A part of Megatron-LM's own unit tests on CPU ranks, without and with patches: ``MEGATRON_LM_DIR``."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.frameworks.checkouts import Checkouts
from tests.lab.conformance import runs

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(900)]

# Few minutes, of what the patches touch: DDP, its buckets, the optimizer, schedules and the model's head.
SUBSET = tuple(
    f"tests/unit_tests/{name}"
    for name in (
        "distributed/test_distributed_data_parallel.py",
        "distributed/test_param_and_grad_buffer.py",
        "models/test_gpt_model.py",
        "pipeline_parallel/test_schedules.py",
        "tensor_parallel",
        "test_optimizer.py",
    )
)
BUCKETS = SUBSET[1]

# A patch of another package, which reduces gradients as soon as the first of a bucket is there.
FAULT = """
from megatron_rl_patches import Patch

patch = Patch("early-reduce", "a fault", upstream=())


@patch.wrap(
    "megatron.core.distributed.param_and_grad_buffer",
    "_ParamAndGradBucketGroup.register_grad_ready",
    parameters=("param",),
)
def register(call):
    result = call()
    if call.instance.grad_reduce_handle is None:
        call.instance.start_grad_sync()
    return result
"""
FILES = {
    "fault.py": FAULT,
    "fault-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fault\nVersion: 1.0\n",
    "fault-1.0.dist-info/entry_points.txt": "[megatron_rl_patches.patches]\nearly-reduce = fault:patch\n",
}


def run(checkout: str, select: tuple[str, ...], patches: str, results: Path) -> list[runs.Change]:
    """Run both ways, and return the outcomes that the patches change."""
    runs.run_at_smallest(Path(checkout), select, ranks=(1, 2), results=results)
    runs.run_with_patches(Path(checkout), patches, results=results)
    return runs.repeated_changes(Path(checkout), runs.changes(results, patches), patches)


def test_patches_change_no_outcome(checkouts: Checkouts, tmp_path: Path) -> None:
    (checkout,) = checkouts("megatron.training")
    results = tmp_path / "results.jsonl"
    select = tuple(name for name in SUBSET if Path(checkout, name).exists())
    assert run(checkout, select, "all", results) == []
    outcomes = Counter(result.outcome for result in runs.final_of(results))
    assert outcomes[runs.PASSED] > 90
    assert outcomes[runs.HANGS] == 0
    assert len(runs.final_of(results, "all")) >= outcomes[runs.PASSED]


def test_a_fault_of_a_patch_changes_outcomes(
    checkouts: Checkouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout,) = checkouts("megatron.training")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    changed = run(checkout, (BUCKETS,), "early-reduce", tmp_path / "results.jsonl")
    assert changed
    assert {(one.without.outcome, one.patched.outcome) for one in changed} == {("passed", "failed")}
