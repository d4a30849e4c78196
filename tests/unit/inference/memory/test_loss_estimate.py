"""``estimate_memory(tokens=...)`` against counted bytes of real losses, and of recorded runs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import estimate
from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.vocab import output_layer
from tests.references.live_bytes import live_bytes

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
TOKENS, HIDDEN, VOCABULARY, TILE_BYTES, WITHIN = 256, 64, 16384, 4 << 20, 0.02


def estimated(tokens: int, hidden: int, vocabulary: int, dtype: str, share: float = 1.0, **more: Any) -> Any:
    entropy, fields = more.pop("entropy", False), {"hidden_size": hidden, "vocab_size": vocabulary, **more}
    return estimate._loss_memory(tokens, share, entropy, fields, dtype)


def step(way: str, inputs: Any, ids: torch.Tensor, how: Any) -> None:
    logits = deferred_logits(*inputs) if way == "lean_head" else (inputs[0] @ inputs[1].T).float()
    values = [vocab_parallel_log_probs_and_entropy(logits, ids, **how)]
    del logits  # nobody holds them in backward, as in Megatron's schedules
    sum(x.sum() for x in values.pop() if x.requires_grad).backward()


@pytest.mark.parametrize(("share", "entropy"), [(1.0, True), (0.25, False)])
def test_real_losses_take_what_is_estimated(
    share: float, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are small, as a GPU needs no buffers; the products of a CPU take more than its in 16 bits."""
    monkeypatch.setattr(output_layer, "bytes_of_tile", lambda size, device: TILE_BYTES)
    rows = slice(None) if share == 1 else torch.arange(0, TOKENS, int(1 / share))
    ids = torch.randint(VOCABULARY, (TOKENS,))[rows]
    how: Any = {"rows": rows, "entropy_grad": entropy, "block_bytes": 1 << 16, "fused": False}
    for way, dtype in (
        ("lean_loss", torch.bfloat16),
        ("lean_loss", torch.float32),
        ("lean_head", torch.float32),
    ):
        inputs = [torch.randn(n, HIDDEN, dtype=dtype, requires_grad=True) for n in (TOKENS, VOCABULARY)]

        name = "bf16" if dtype == torch.bfloat16 else "fp32"
        expected = estimated(TOKENS, HIDDEN, VOCABULARY, name, share, entropy=entropy)
        assert live_bytes(partial(step, way, inputs, ids, how)).peak == pytest.approx(
            getattr(expected, way), rel=WITHIN
        )


def test_recorded_runs_took_what_is_estimated() -> None:
    """slime's own loss on a CPU, and ``lean-head`` on fake CUDA tensors, whose tiles have a GPU's sizes."""
    ways = json.loads((RECORDS / "head.json").read_text())["ways"]
    [stock] = [float(way["memory"]) for way in ways if "slime" in way["head"]]
    logits, gradients = 4 * 8192 * 65536, 4 * 256 * (8192 + 65536)
    peak = estimated(8192, 256, 65536, "fp32", entropy=True).stock
    assert (peak - gradients) / logits == pytest.approx(stock, rel=WITHIN)
    for head in json.loads((RECORDS / "head_counted.json").read_text())["heads"]:
        if head["head"] == "deferred":
            loss = estimated(*map(int, re.findall(r"\d+(?=[],])", head["set-up"])), "bf16")
            counted = float(head["with gradients"].partition(" GiB")[0])
            assert loss.lean_head / 2**30 == pytest.approx(counted, rel=WITHIN)


@pytest.mark.usefixtures("one_process")
def test_groups_and_padding_count() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    loss = estimate_memory(model, tokens=999, **sizes).loss
    assert loss == estimated(250, 64, 512, "bf16")
    gathered: Any = estimate_memory(model, tokens=999, **sizes, sequence_parallel=True).loss
    assert gathered.lean_head - loss.lean_head == 2 * 250 * 64 and gathered.stock == loss.stock
    for tokens, share, message in (
        (0, 1, "tokens is 0, response_share 1; expected 1 or more, 0 to 1"),
        (8, 0, "response_share 0"),
        (8, 1, "tokens need a model that is described"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            estimate_memory(torch.nn.Linear(8, 8), tokens=tokens, response_share=share)
