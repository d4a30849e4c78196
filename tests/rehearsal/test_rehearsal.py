"""Losses as on a GPU, on fake tensors, where torch is built with CUDA and there is neither GPU nor driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rehearsal import stand_ins

#: Where the CPU waits for the GPU, and how often per call of a loss with one tile; the reasons are in
#: CONTRIBUTING.md.
WAITS = {
    "top-k": {"nonzero in topk.py:_largest": 1},
    "top-k, deferred": {"nonzero in topk.py:_largest": 1},
    "reverse KL": {"_local_scalar_dense in full_divergence.py:forward": 1},
    "forward KL": {"_local_scalar_dense in full_divergence.py:forward": 1},
}
#: Matrix products of all rows and columns, besides that of materialized logits and its two in backward.
PRODUCTS = {
    "log-probs and entropy": 3,
    "log-probs and entropy, in place": 3,
    "deferred": 4,
    "deferred, some rows": 4,
    "deferred, frozen": 3,
    "deferred, frozen, no entropy": 2,
    "deferred, scoring": 1,
    "top-k": 1,
    "top-k, deferred": 1,
    "reverse KL": 6,
    "forward KL": 6,
    "Jensen-Shannon": 8,
    "skewed forward KL": 8,
    "skewed reverse KL": 8,
}


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if torch.version.cuda is None:
        pytest.skip("torch is not built with CUDA")
    if torch.cuda.is_available() or not shutil.which("cc"):
        pytest.skip("there is a GPU, or no C compiler")
    libraries = Path(torch.__file__).parent / "lib"
    variables = stand_ins.environment(libraries, tmp_path_factory.mktemp("libraries"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.rehearse"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rehearsal: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return rehearsal


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_a_gpu_would_run_it(rehearsed: dict[str, Any], case: str, dtype: str) -> None:
    record = rehearsed[f"{case}, {dtype}"]
    assert not record["error"], record["error"]
    assert record["waits"] == WAITS.get(case, {})
    assert len(record["products"]) == PRODUCTS[case]
