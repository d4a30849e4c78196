"""What one rank alone passes wrong is refused by name on every rank, before any of them waits for another."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import (
    forward_hidden_states,
    forward_log_probs,
    forward_topk,
    forward_values,
)
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt

pytestmark = pytest.mark.runs("inference-only", ranks=[2])

IDS = torch.arange(6).expand(2, 6)
#: Changes of the microbatch, and what the error says.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [3.9, 4]}, r"lengths are \[3\.9, 4\]\. Expected: a list of integers"),
    ({"lengths": [math.nan, 4]}, r"lengths are \[nan, 4\]"),
    ({"lengths": 4}, "lengths are 4"),
    ({"lengths": torch.tensor([6.0, 4.0])}, "lengths are tensor"),
    ({"response_lengths": ["1", 1]}, r"response_lengths are \['1', 1\]"),
    ({"indices": [None, 0]}, r"indices are \[None, 0\]"),
    ({"position_ids": IDS.float()}, r"position_ids are torch\.float32"),
    ({"position_ids": IDS[:, :5]}, r"position_ids are \[2, 5\] with 0 as the lowest\. Expected: \[2, 6\]"),
    ({"position_ids": IDS - 1}, "with -1 as the lowest"),
    ({"position_ids": IDS + 11}, "position_ids go up to 16. Expected: 0 to 15"),
    ({"position_ids": [0]}, "position_ids are list"),
    ({"attention_mask": torch.ones(2, 6)}, r"attention_mask is torch\.float32 \[2, 6\]"),
    ({"attention_mask": True}, r"attention_mask is bool \[\]"),
    ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask is torch\.float32 \[2, 1, 6, 6\]"),
    ({"attention_mask": torch.ones(2, 3, 6, 6).bool()}, r"attention_mask is torch\.bool \[2, 3, 6, 6\]"),
    ({"tokens": torch.zeros(2, 18, dtype=torch.int64)}, "position_ids go up to 17"),
]
#: Options, and what the error says.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"output_device": "gpu"}, "output_device is 'gpu'"),
    ({"forward": 1}, "forward is 1"),
]
VOCABULARY: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 20.5}, r"vocab_size is 20\.5"),
    ({"vocab_size": "20"}, "vocab_size is '20'"),
    *(
        ({"temperature": bad}, "temperature is .*, expected a positive number")
        for bad in (0.0, -1.0, math.inf, math.nan, "1", torch.ones(2))
    ),
]
TOPK: list[tuple[dict[str, Any], str]] = [
    ({"k": 2.5}, r"k is 2\.5"),
    ({"k": True}, "k is True"),
    ({"k": 1, "at": []}, "k is 1"),
    ({"k": None, "at": 3}, "`at` is a int"),
    ({"k": None}, "pass k or `at`"),
]


class Unreadable(list[Any]):
    """Microbatches that cannot be read."""

    def __iter__(self) -> Any:
        raise OSError("no such file")


def microbatch(**changes: Any) -> dict[str, Any]:
    return {"tokens": torch.arange(12).reshape(2, 6), "lengths": [6, 4], **changes}


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_what_one_rank_passes_wrong(sizes: dict[str, int]) -> None:
    options = TinyModel(**sizes)
    options.initialize()
    model = tiny_gpt.inference_model(options)
    rank = torch.distributed.get_rank()
    # With context parallelism, the width is a multiple of four.
    fields = FIELDS if "cp" not in sizes else FIELDS[:6]
    width = 8 if "cp" in sizes else 6

    def good(**changes: Any) -> dict[str, Any]:
        tokens = torch.arange(2 * width).reshape(2, width)
        return {**microbatch(), "tokens": tokens, **changes}

    def refused(message: str, bad_rank: int, score: Any, batch: Any, **arguments: Any) -> None:
        own = rank == bad_rank
        with pytest.raises(InvalidInputError, match=message if own else f"rank {bad_rank}: .*{message}"):
            score(arguments.pop("model", model), batch, progress=False, **arguments)
        torch.distributed.barrier()

    models: list[tuple[dict[str, Any], str]] = [
        ({"model": [*model, *model]}, "the model has 2 chunks, parallel_state a virtual pipeline size of 1"),
        ({"model": None}, "the model has 0 chunks"),
        ({"model": torch.nn.Linear(1, 1)}, "the model is a Linear. Expected: a model of Megatron's"),
    ]

    for bad_rank in (0, 1):
        is_bad = rank == bad_rank
        for changes, message in fields:
            refused(message, bad_rank, forward_log_probs, [good(**changes if is_bad else {})])
        refused("microbatches are a dict", bad_rank, forward_log_probs, good() if is_bad else [good()])
        refused("it is a str", bad_rank, forward_log_probs, ["tokens" if is_bad else good()])
        for arguments, message in OPTIONS + VOCABULARY + models:
            refused(message, bad_rank, forward_log_probs, [good()], **arguments if is_bad else {})
        for score in (forward_hidden_states, forward_values):
            for arguments, message in OPTIONS + models:
                refused(message, bad_rank, score, [good()], **arguments if is_bad else {})
        for arguments, message in models + VOCABULARY + [({"allgather_cp": True}, "all-gather context")]:
            refused(message, bad_rank, forward_topk, [good()], k=1, **arguments if is_bad else {})
    for arguments, message in TOPK:  # the last stage alone reads them
        is_bad = rank == 1
        refused(message, 1, forward_topk, [good()], **arguments if is_bad else {"k": 1})
    # What is no wrong argument is raised as it is where it happened.
    with pytest.raises(OSError if rank else InvalidInputError, match="no such file"):
        forward_log_probs(model, Unreadable([good()]) if rank else [good()], progress=False)
    # A mask has one row or all, for one head or all.
    for parameter in model[0].parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    mask = torch.zeros(2, 1, 1, width, dtype=torch.bool)
    mask[:, :, :, 0] = True
    heads = model[0].config.num_attention_heads // sizes.get("tp", 1)
    shapes = [(2, 1, 1, width), (2, 1, width, width), (2, heads, width, width)]
    masks = [mask.expand(shape) for shape in shapes]
    scores = [forward_log_probs(model, [good(attention_mask=mask)], progress=False) for mask in masks]
    assert everywhere(scores[0] is None).count(True) == sizes.get("pp", 1) - 1
    for one in scores:
        assert one is None or all(map(torch.equal, one.log_probs, scores[0].log_probs))


@on_ranks(2)
def test_replicas_that_gather_parameters_agree() -> None:
    model, _ = TinyModel().build()
    lengths = [6, 4] if torch.distributed.get_rank() else [7, 4]
    with pytest.raises(InvalidInputError, match=r"lengths \[7, 4\] do not fit"):
        forward_log_probs(model, [microbatch(lengths=lengths)], progress=False)
    assert forward_log_probs(model, [microbatch()], progress=False)
