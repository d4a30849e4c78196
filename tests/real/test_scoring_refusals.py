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
from tests.ranks import by_speed, on_ranks
from tests.references import tiny_gpt
from tests.worlds.passes import fill_at_random
from tests.worlds.scoring import is_last_stage, state_of

pytestmark = pytest.mark.runs("inference-only", ranks=[2])

LAYOUTS: dict[str, dict[str, Any]] = {"PP 2": {"pp": 2}, "TP 2": {"tp": 2}, "CP 2": {"cp": 2}}
IDS = torch.arange(6).expand(2, 6)
#: Changes of the microbatch, and what the error says.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": None}, "there is no 'tokens' in it"),
    ({"tokens": torch.zeros(2, 6)}, r"tokens are torch.float32 \[2, 6\]. Expected: an int64 tensor"),
    ({"tokens": [[1, 2]]}, r"tokens are list \[\]. Expected: an int64 tensor"),
    ({"lengths": [9, 4]}, r"lengths \[9, 4\] do not fit tokens of shape \[2, "),
    ({"lengths": [6, 0]}, r"lengths \[6, 0\] do not fit"),
    ({"lengths": [6]}, r"lengths \[6\] do not fit"),
    ({"response_lengths": [6, 3]}, "sample 0 has 6 tokens and a response of 6"),
    ({"response_lengths": [1]}, "total_lengths are of 2 samples and response_lengths of 1"),
    ({"indices": [0, 2]}, r"indices \[0, 2\] are no permutation of 0 to 1"),
    ({"indices": [0]}, "there are 1 indices for 2 samples"),
    ({"tokens": torch.full((2, 8), 32)}, "token ids are 32 to 32. Expected: 0 to 31"),
    ({"tokens": torch.full((2, 8), -100)}, "token ids are -100 to -100"),
    ({"lengths": [3.9, 4]}, r"lengths are \[3\.9, 4\]\. Expected: a list of integers"),
    ({"lengths": [math.nan, 4]}, r"lengths are \[nan, 4\]"),
    ({"lengths": 4}, "lengths are 4"),
    ({"lengths": torch.tensor([6.0, 4.0])}, "lengths are tensor"),
    ({"response_lengths": ["1", 1]}, r"response_lengths are \['1', 1\]"),
    ({"indices": [None, 0]}, r"indices are \[None, 0\]"),
    # From here on the width is one that context parallelism does not divide.
    ({"position_ids": IDS.float()}, r"position_ids are torch\.float32"),
    ({"position_ids": IDS[:, :5]}, r"position_ids are \[2, 5\] with 0 as the lowest\. Expected: \[2, 6\]"),
    ({"position_ids": IDS - 1}, "with -1 as the lowest"),
    ({"position_ids": IDS + 11}, "position_ids go up to 16. Expected: 0 to 15"),
    ({"position_ids": [0]}, "position_ids are list"),
    ({"attention_mask": torch.ones(2, 6)}, r"attention_mask is torch\.float32 \[2, 6\]"),
    ({"attention_mask": True}, r"attention_mask is bool \[\]"),
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


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("PP 2",)))
@on_ranks(2)
def test_what_one_rank_passes_wrong(layout: str) -> None:
    options = TinyModel(**LAYOUTS[layout])
    options.initialize()
    model = tiny_gpt.inference_model(options)
    rank = torch.distributed.get_rank()
    # With context parallelism, the width is a multiple of four.
    fields, width = (FIELDS, 6) if options.cp == 1 else (FIELDS[:18], 8)

    def good(**changes: Any) -> dict[str, Any]:
        return microbatch(**{"tokens": torch.arange(2 * width).reshape(2, width), **changes})

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
    arguments_of: list[tuple[Any, list[tuple[dict[str, Any], str]], dict[str, Any]]] = [
        (forward_log_probs, OPTIONS + VOCABULARY + models, {}),
        (forward_hidden_states, OPTIONS + models, {}),
        (forward_values, OPTIONS + models, {}),
        (forward_topk, models + VOCABULARY, {"k": 1}),
    ]
    before = state_of(model)
    for bad_rank in (0, 1):
        is_bad = rank == bad_rank
        for changes, message in fields:
            refused(message, bad_rank, forward_log_probs, [good(**changes if is_bad else {})])
        refused("microbatches are a dict", bad_rank, forward_log_probs, good() if is_bad else [good()])
        refused("it is a str", bad_rank, forward_log_probs, ["tokens" if is_bad else good()])
        for score, cases, usual in arguments_of:
            for arguments, message in cases:
                refused(message, bad_rank, score, [good()], **usual, **arguments if is_bad else {})
    for arguments, message in TOPK:  # the last stage alone reads them
        refused(message, 1, forward_topk, [good()], **arguments if rank == 1 else {"k": 1})
    # What is no wrong argument is raised as it is where it happened.
    with pytest.raises(OSError if rank else InvalidInputError, match="no such file"):
        forward_log_probs(model, Unreadable([good()]) if rank else [good()], progress=False)
    assert state_of(model) == before
    # A mask has one row or all, for one head or all.
    fill_at_random(model)
    mask = torch.zeros(2, 1, 1, width, dtype=torch.bool)
    mask[:, :, :, 0] = True
    heads = model[0].config.num_attention_heads // options.tp
    shapes = [(2, 1, 1, width), (2, 1, width, width), (2, heads, width, width)]
    masks = [mask.expand(shape) for shape in shapes]
    scores = [forward_log_probs(model, [good(attention_mask=mask)], progress=False) for mask in masks]
    assert (scores[0] is not None) == is_last_stage()
    for one in scores:
        assert one is None or all(map(torch.equal, one.log_probs, scores[0].log_probs))


@on_ranks(2)
def test_replicas_that_gather_parameters_agree() -> None:
    model, _ = TinyModel().build()
    lengths = [6, 4] if torch.distributed.get_rank() else [7, 4]
    with pytest.raises(InvalidInputError, match=r"lengths \[7, 4\] do not fit"):
        forward_log_probs(model, [microbatch(lengths=lengths)], progress=False)
    assert forward_log_probs(model, [microbatch()], progress=False)
