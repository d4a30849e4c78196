"""``estimate_memory(tokens=...)`` against counted bytes of real losses, and of recorded runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import estimate
from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.vocab import output_layer
from tests.references.live_bytes import live_bytes

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
TOKENS, HIDDEN, VOCABULARY, TILE_BYTES = 256, 64, 16384, 4 << 20
WITHIN = 0.02


def estimated(
    tokens: int,
    hidden: int,
    vocabulary: int,
    dtype: str,
    *,
    share: float = 1.0,
    entropy: bool = False,
    **sizes: Any,
) -> estimate.LossMemory:
    """Return the estimate without building a model."""
    sizes = {"hidden_size": hidden, "vocab_size": vocabulary, **sizes}
    return estimate._loss_memory(tokens, share, entropy, sizes, dtype)


def counted(logits_of: Callable[..., Tensor], dtype: torch.dtype, rows: Any, entropy: bool) -> int:
    """Return the peak of an output layer and its loss; blocks are small, as a GPU needs no buffers."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN).to(dtype), torch.randn(VOCABULARY, HIDDEN).to(dtype)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    ids = torch.randint(VOCABULARY, (TOKENS,))[rows]
    how = {"rows": rows, "entropy_grad": entropy, "block_bytes": 1 << 16, "fused": False}

    def step() -> Any:
        values = vocab_parallel_log_probs_and_entropy(logits_of(*inputs), ids, **how)
        return torch.autograd.grad(sum(x.sum() for x in values if x.requires_grad), inputs)

    return live_bytes(step).peak


def logits_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    """As Megatron's ``Float16Module`` returns them."""
    return (hidden @ weight.T).float()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_real_losses_take_what_is_estimated(
    share: float, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "bytes_of_tile", lambda size, device: TILE_BYTES)
    of_responses = torch.arange(TOKENS).view(-1, 8)[:, : int(8 * share)].flatten()
    rows = slice(None) if share == 1 else of_responses
    sizes = TOKENS, HIDDEN, VOCABULARY
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        expected = estimated(*sizes, name, share=share, entropy=entropy)
        assert counted(logits_in_float32, dtype, rows, entropy) == pytest.approx(
            expected.lean_loss, rel=WITHIN
        )
    # In bfloat16, the products of a CPU take more than those of a GPU, which the next test counts.
    assert counted(deferred_logits, torch.float32, rows, entropy) == pytest.approx(
        expected.lean_head, rel=WITHIN
    )


def test_recorded_runs_took_what_is_estimated() -> None:
    """slime's own loss on a CPU, and both patches on fake CUDA tensors, whose tiles have a GPU's sizes."""
    [stock] = [
        way for way in json.loads((RECORDS / "head.json").read_text())["ways"] if "slime" in way["head"]
    ]
    tokens, hidden, vocabulary = 8192, 256, 65536
    loss = estimated(tokens, hidden, vocabulary, "fp32", entropy=True)
    without_gradients = loss.stock - 4 * hidden * (tokens + vocabulary)
    assert without_gradients / (4 * tokens * vocabulary) == pytest.approx(float(stock["memory"]), rel=WITHIN)
    heads = json.loads((RECORDS / "head_counted.json").read_text())["heads"]
    deferred = [head for head in heads if head["head"] == "deferred"]
    for head in deferred:
        tokens, hidden, vocabulary = map(int, re.findall(r"\d+(?=[],])", head["set-up"]))
        loss = estimated(tokens, hidden, vocabulary, "bf16")
        gib = float(head["with gradients"].partition(" GiB")[0])
        assert loss.lean_head / 2**30 == pytest.approx(gib, rel=WITHIN)
    assert len(deferred) == 3


SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}


@pytest.mark.usefixtures("one_process")
def test_groups_and_padding_count() -> None:
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    loss = estimate_memory(SMALL, tokens=999, **sizes).loss
    assert loss == estimated(250, 64, 512, "bf16")
    assert estimate_memory(SMALL, dtype="fp32", tokens=250).loss == estimated(250, 64, 1024, "fp32")
    gathered = estimated(250, 64, 1000, "bf16", sequence_parallel=True, tensor_model_parallel_size=2)
    assert (gathered.stock, gathered.lean_loss) == (loss.stock, loss.lean_loss)
    assert gathered.lean_head - loss.lean_head == 2 * 250 * 64
    assert estimate_memory(torch.nn.Linear(8, 8)).loss is None


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"tokens": 0}, "tokens is 0 and response_share 1.0; expected a whole number above 0"),
        (
            {"tokens": 8, "response_share": 0},
            "response_share 0; expected a whole number above 0, and 0 < share",
        ),
        ({"tokens": 8}, "tokens need a model that is described"),
    ],
)
def test_mistakes(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        estimate_memory(torch.nn.Linear(8, 8), **mistake)
