"""``estimate_memory(tokens=...)`` against counted bytes of real losses, and of recorded runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import estimate_memory
from megatron_rl_patches.inference.memory import estimate
from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs_and_entropy
from megatron_rl_patches.losses.vocab import output_layer
from tests.references.heads import DEFERRED, NOT_IN_PLACE, QUARTER, STOCK
from tests.references.live_bytes import live_bytes

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
WAYS = {STOCK: "stock", NOT_IN_PLACE: "lean-loss", DEFERRED: "lean-head"}
MEASURED, COUNTED = (json.loads((RECORDS / name).read_text()) for name in ("head.json", "head_counted.json"))
RUNS = [row for row in COUNTED["heads"] + COUNTED["stock"] if row["head"].removesuffix(QUARTER) in WAYS]
RUNS += [row for row in MEASURED["heads"] if row["head"] == STOCK]
WITHIN = 0.02


def estimated(tokens: int, hidden: int, vocabulary: int, dtype: str, share: float = 1.0) -> dict[str, int]:
    return estimate.loss_memory(tokens, share, {"hidden_size": hidden, "vocab_size": vocabulary}, dtype)


@pytest.mark.parametrize(
    ("way", "dtype"), [("lean-loss", "bf16"), ("lean-loss", "fp32"), ("lean-head", "fp32")]
)
@pytest.mark.parametrize("share", [1, 0.25])
def test_real_losses_take_what_is_estimated(
    way: str, dtype: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are small, as a GPU needs no buffers; the products of a CPU take more than its in 16 bits."""
    monkeypatch.setattr(output_layer, "bytes_of_tile", lambda size, device: 4 << 20)
    tokens, hidden, vocabulary = sizes = 256, 64, 16384
    rows = torch.arange(0, tokens, int(1 / share)) if share < 1 else slice(None)
    ids = torch.randint(vocabulary, (tokens,))[rows]
    options: Any = {"rows": rows, "entropy_grad": True, "block_bytes": 1 << 16, "fused": False}
    torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    inputs = [torch.randn(n, hidden, dtype=torch_dtype, requires_grad=True) for n in (tokens, vocabulary)]

    def step() -> None:
        logits = deferred_logits(*inputs) if way == "lean-head" else (inputs[0] @ inputs[1].T).float()
        values = vocab_parallel_log_probs_and_entropy(logits, ids, **options)
        del logits  # nobody holds them in backward, as in Megatron's schedules
        sum(x.sum() for x in values).backward()

    assert live_bytes(step).peak == pytest.approx(estimated(*sizes, dtype, share)[way], rel=WITHIN)


@pytest.mark.parametrize("row", RUNS, ids=lambda row: f"{row['head']}, {row['set-up']}")
def test_recorded_runs_took_what_is_estimated(row: dict[str, str]) -> None:
    """slime's own loss on a CPU; and that and both patches on fake CUDA tensors, with the tiles of a GPU."""
    head, dtype = row["head"].removesuffix(QUARTER), "bf16" if "bfloat16" in row["set-up"] else "fp32"
    tokens, hidden, vocabulary = sizes = [*map(int, re.findall(r"\d+(?=[],])", row["set-up"]))]
    peak = estimated(*sizes, dtype, 1.0 if head == row["head"] else 0.25)[WAYS[head]]
    gradients = estimate.ITEM_SIZES[dtype] * hidden * (tokens + vocabulary)
    times = float(row.get("memory") or row["beyond gradients"].split()[-1])
    assert peak == pytest.approx(times * 4 * tokens * vocabulary + gradients, rel=WITHIN)


@pytest.mark.usefixtures("one_process")
def test_groups_and_padding_count() -> None:
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 4}
    loss: Any = estimate_memory(model, tokens=999, **sizes).loss
    assert loss == estimated(250, 64, 512, "bf16")
    gathered: Any = estimate_memory(model, tokens=999, **sizes, sequence_parallel=True).loss
    assert gathered == {**loss, "lean-head": loss["lean-head"] + 2 * 250 * 64}
    with pytest.raises(InvalidInputError, match="tokens need a model that is described"):
        estimate_memory(torch.nn.Linear(8, 8), tokens=8)
