"""A part of Megatron-LM's own unit tests on CPU ranks, without and with patches: ``MEGATRON_LM_DIR``."""

from __future__ import annotations

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


def test_patches_change_no_outcome(checkouts: Checkouts, tmp_path: Path) -> None:
    checkout, results = Path(*checkouts("megatron.training")), tmp_path / "results.jsonl"
    select = tuple(name for name in SUBSET if (checkout / name).exists())
    runs.run_at_smallest(checkout, select, ranks=(1, 2), results=results)
    runs.run_with_patches(checkout, "all", results=results)
    assert runs.repeated_changes(checkout, runs.changes(results, "all"), "all") == []
    outcomes = Counter(result.outcome for result in runs.final_of(results))
    assert outcomes[runs.PASSED] > 90
    assert outcomes[runs.HANGS] == 0
    assert len(runs.final_of(results, "all")) >= outcomes[runs.PASSED]
