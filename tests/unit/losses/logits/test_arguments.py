"""What the losses refuse, and that the message says what was wrong and what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)

T, V = 4, 10
LOGITS = torch.zeros(T, V)
TARGETS = torch.zeros(T, dtype=torch.int64)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three dimensions": ({"logits": LOGITS[None]}, r"\[T, vocab / tp\], not \[1, 4, 10\]: flatten"),
    "no columns": ({"logits": LOGITS[:, :0]}, r"not \[4, 0\]"),
    "integer logits": ({"logits": LOGITS.long()}, "torch.int64, expected one of torch.float32"),
    "complex logits": ({"logits": LOGITS.cfloat()}, "complex64"),
    "float targets": ({"targets": TARGETS.float()}, r"torch.float32 \[4\], expected torch.int64 \[4\]"),
    "bool targets": ({"targets": TARGETS.bool()}, "torch.bool"),
    "too few targets": ({"targets": TARGETS[:3]}, r"\[3\], expected torch.int64 \[4\]"),
    "targets of two dimensions": ({"targets": TARGETS[:, None]}, r"\[4, 1\]"),
    "targets of all rows": ({"rows": slice(0, 2)}, r"\[4\], expected torch.int64 \[2\]"),
    "target beyond": ({"targets": TARGETS + V}, r"ids below 10.*found \[10, 10, 10, 10\]"),
    "negative target": ({"targets": TARGETS - 1}, r"or -100 to ignore a row; found \[-1"),
    "another ignore_index": ({"targets": TARGETS - 100, "ignore_index": -1}, r"or -1 .*found \[-100"),
    "targets elsewhere": ({"targets": TARGETS.to("meta")}, "targets on meta, logits on cpu"),
    "mask of rows": ({"rows": TARGETS.bool()}, r"torch.bool \[4\].*mask.nonzero\(\).squeeze\(1\)"),
    "short row numbers": ({"rows": TARGETS.int()}, r"torch.int32 \[4\], expected a slice or row numbers"),
    "rows of two dimensions": ({"rows": TARGETS[None]}, r"\[1, 4\]"),
    "row beyond": ({"rows": torch.tensor([0, 1, 2, 4])}, r"numbers from 0 to 3; found \[4\]"),
    "negative row": ({"rows": torch.tensor([0, 1, 2, -1])}, r"found \[-1\]"),
    "a row twice": ({"rows": torch.tensor([0, 3, 2, 3])}, r"each at most once.*found \[3\]"),
    "rows elsewhere": ({"rows": TARGETS.to("meta")}, "rows on meta"),
    "float mask": ({"keep_mask": LOGITS}, r"torch.float32 \[4, 10\], expected torch.bool \[4, 10\]"),
    "mask of another shape": ({"keep_mask": LOGITS[:, 1:].bool()}, r"torch.bool \[4, 9\]"),
    "mask of all rows": (
        {"rows": slice(0, 2), "targets": TARGETS[:2], "keep_mask": LOGITS.bool()},
        r"\[4, 10\], expected torch.bool \[2, 10\]: a line per selected row",
    ),
    "mask elsewhere": ({"keep_mask": LOGITS.bool().to("meta")}, "keep_mask on meta"),
    "no temperature": ({"temperature": 0.0}, "temperature is 0.0, expected a positive number"),
    "negative temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature is inf"),
    "temperature that is none": ({"temperature": float("nan")}, "temperature is nan"),
    "temperature above float32": ({"temperature": 1e39}, r"temperature is 1e\+39, .* range of float32"),
    "temperature below float32": ({"temperature": 1e-46}, "temperature is 1e-46, .* range of float32"),
    "temperature per row": ({"temperature": torch.ones(T)}, "temperature is tensor"),
    "no block": ({"block_bytes": 0}, "block_bytes is 0"),
    "unknown choice": ({"fused": "always"}, "fused is 'always'"),
}
IDS = TARGETS[:, None]
REFUSED_AT: dict[str, tuple[dict[str, Any], str]] = {
    "ids of one dimension": ({"indices": TARGETS}, r"expected torch.int64 \[4, K\]"),
    "no ids": ({"indices": IDS[:, :0]}, "K at least 1"),
    "ids of too few rows": ({"indices": IDS[1:]}, r"\[3, 1\]"),
    "float ids": ({"indices": IDS.float()}, "torch.float32"),
    "id beyond": ({"indices": IDS + V}, f"ids below {V}, or -100 for no entry"),
    "negative id": ({"indices": IDS - 1}, r"found \[-1"),
    "ids of all rows": ({"rows": slice(0, 2)}, r"\[2, K\]"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"logits": LOGITS, "targets": TARGETS, **changes}
    for function in (vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy):
        with pytest.raises(InvalidInputError, match=message):
            function(**arguments)


@pytest.mark.parametrize(("changes", "message"), REFUSED_AT.values(), ids=REFUSED_AT)
def test_ids_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        vocab_parallel_log_probs_at(**{"logits": LOGITS, "indices": IDS, **changes})


@pytest.mark.parametrize("k", [0, V + 1, -3])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(InvalidInputError, match=f"k is {k}, expected from 1 to {V}"):
        vocab_parallel_topk(LOGITS, k)


def test_accepted() -> None:
    for changes in (
        {"targets": TARGETS.int()},
        {"temperature": 2},
        {"rows": slice(-9, 99)},
        {"fused": False},
    ):
        assert vocab_parallel_log_probs(**{"logits": LOGITS, "targets": TARGETS, **changes}).shape == (T,)


def test_numbers_of_numpy_are_accepted() -> None:
    one, four = np.int64(1), np.int32(4)
    assert vocab_parallel_topk(LOGITS, four).k == 4
    assert full_vocabulary_divergence(LOGITS, LOGITS, num_ids=four).tolist() == [0.0] * T
    logits = deferred_logits(LOGITS, LOGITS, tile_bytes=four, keep_bytes=one)
    log_probs = vocab_parallel_log_probs(logits, TARGETS, temperature=np.float32(0.5), block_bytes=four)
    assert log_probs.shape == (T,)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_are_refused_by_name(transform: Any) -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_log_probs(logits, TARGETS).sum()

    def deferred_loss(hidden: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_log_probs(deferred_logits(hidden, LOGITS), TARGETS).sum()

    for function in (loss, deferred_loss):
        with pytest.raises(InvalidInputError, match=r"torch\.func"):
            transform(function)(LOGITS[None] if transform is torch.func.vmap else LOGITS)
