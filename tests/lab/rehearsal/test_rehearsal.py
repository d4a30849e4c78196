"""The rehearsal on fake CUDA tensors: it needs a torch that is built with CUDA, no GPU and no driver."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches.losses.vocab import output_layer
from tests.lab.rehearsal import stand_ins
from tests.lab.rehearsal.cases import CASES, DTYPES, LOSSES, MODELS, PLAIN

_ONE_PASS = {"_local_scalar_dense in full_divergence.py:forward": 1}
_COPY = {**_ONE_PASS, "copy_ in devices.py:copied_to": 1}
_TIES = {"nonzero in topk.py:finish_tile": 1}
_RE_ENTRY = {"_local_scalar_dense in recovery.py:_any_rank_was": 3}
#: Where the CPU waits for the GPU, and how often in the case; README.md has the reasons.
WAITS: dict[str, dict[str, int]] = {
    **dict.fromkeys(("top-k", "top-k, deferred"), _TIES),
    "top-k, ties": {
        **_TIES,
        "nonzero in topk.py:_take_lowest_columns": 4,
        "bincount in topk.py:_take_lowest_columns": 4,
        "index in topk.py:_take_lowest_columns": 12,
    },
    "mixture of top-k": {"equal in distributions.py:check_same_indices": 1},
    **dict.fromkeys(("reverse_kl", "forward_kl", "importance_weighted_reverse_kl"), _ONE_PASS),
    "reverse_kl, ids ruled out": _ONE_PASS,
    "host memory": {**_COPY, "_to_copy in devices.py:on_device": 1},
    "distillation, whole vocabulary": {**_COPY, "_to_copy in distillation.py:_full_comparison": 1},
    "tensor parallel": {**_ONE_PASS, **_TIES},
    **dict.fromkeys(("re-entry", "re-entry, another rank broke off"), _RE_ENTRY),
    "TeacherPool": {
        "_to_copy in model.py:build_inference_model": 19,
        "_local_scalar_dense in teachers.py:_holds_weights": 5,
        "_to_copy in weights.py:checksum": 10,
        "Stream.synchronize in teachers.py:__init__": 7,
        "Stream.synchronize in plan.py:run": 2,
        **_COPY,
    },
}


rehearsed = cache(stand_ins.rehearsed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LOSSES)
def test_a_gpu_would_run_the_losses(case: str, dtype: str) -> None:
    check(rehearsed("losses"), case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MODELS)
def test_a_gpu_would_run_the_models(case: str, dtype: str) -> None:
    check(rehearsed("models"), case, dtype)


def check(records: dict[str, Any], case: str, dtype: str) -> None:
    record, products = records[f"{case}, {dtype}"], CASES[case][1]
    assert not record["error"], record["error"]
    assert record["waits"] == WAITS.get(case, {})
    assert products in (None, record["products"])
    assert (record["plain passes"] > 0) == (case in PLAIN), "what a GPU compiles is not rehearsed"


@pytest.mark.skipif(output_layer.TORCH < (2, 10), reason="the page has the newest torch, with fewer tensors")
def test_the_page_of_the_head_has_what_is_counted() -> None:
    expected = stand_ins.texts(rehearsed("counted"), stand_ins.PAGE.read_text("utf-8"))
    assert {file: file.read_text("utf-8") for file in expected} == expected, (
        "run: python -m tests.lab.rehearsal.stand_ins"
    )


def test_ids_are_few_operations() -> None:
    """With 64 ids per row; plain operators on blocks of 64 MiB were 9,472 and 1,479, with 80 and 34 GB."""
    counts = rehearsed("with 64 ids")
    at_ids, selection = counts["log_probs_at"], counts["selection"]
    page = stand_ins.PAGE.with_name("topk.md").read_text("utf-8").replace("\n", " ")
    for counted in (at_ids, selection):
        calls = sum(number for function, number in counted.items() if function.startswith("block_"))
        moved = f"which move {counted['bytes'] / 1e9:.1f} GB"
        shown = f"{counted['small operations']} operations and {calls} compiled calls, {moved}"
        assert shown in page or output_layer.TORCH < (2, 10), shown
    assert at_ids.pop("bytes") <= 25e9 and selection.pop("bytes") <= 10e9
    assert at_ids.pop("small operations") <= 440  # and a compiled call is four kernels at most
    assert selection.pop("small operations") <= 440
    assert at_ids == {"block_statistics": 9, "block_gradient": 3} and selection == {"block_statistics": 9}


def test_every_wait_has_a_reason() -> None:
    places = {wait.partition(" in ")[2] for waits in WAITS.values() for wait in waits}
    page = Path(__file__).with_name("README.md").read_text("utf-8")
    explained = set(re.findall(r"`(\w+\.py:\w+)`", page))
    assert explained == places
