"""``forward_topk``, ``forward_hidden_states`` and ``forward_values`` on real megatron-core."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import (
    build_inference_model,
    forward_hidden_states,
    forward_topk,
    forward_values,
    output_head,
)
from megatron_rl_patches.losses import FullDistribution, vocab_parallel_log_probs_at
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, on_ranks
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.worlds import scoring
from tests.worlds.scoring import LAYOUTS, TEMPERATURE, filled, microbatches

K = 5


def _models(options: TinyModel) -> tuple[list[Any], list[Any]]:
    """Return student and teacher: the second has other weights."""
    _, student = filled(options)
    teacher = tiny_gpt.inference_model(options)
    with torch.no_grad():
        for chunk, other in zip(teacher, student, strict=True):
            chunk.load_state_dict(other.state_dict())
            for parameter in chunk.parameters():
                parameter.mul_(0.7)
    return student, teacher


def _reference() -> list[list[tuple[torch.Tensor, ...]]]:
    """Return ids, log-probabilities and tail by sample, of student and teacher."""
    of_student, of_teacher = map(scoring.dense_log_probs, _models(TinyModel()))
    ids = [log_p_nv.topk(K).indices for log_p_nv, _ in of_student]
    return [
        [
            (ids_nk, log_p_nv.gather(1, ids_nk), log_p_nv.scatter(1, ids_nk, float("-inf")).logsumexp(1))
            for ids_nk, (log_p_nv, _) in zip(ids, samples, strict=True)
        ]
        for samples in (of_student, of_teacher)
    ]


def _check_refusals(student: Any, own: Any) -> None:
    """Those of one rank alone are in ``test_scoring_refusals.py``."""
    for k, message in ((0, "k is 0"), (33, "k is 33. Expected: 1 to 32")):
        with pytest.raises(InvalidInputError, match=message):
            forward_topk(student, microbatches(), k)
    ids = None if own is None else [distribution.indices for distribution in own]
    # Only the last stage can see it, and all stages raise.
    for spoil, message in (
        (lambda ids: None, "pass k or"),
        (lambda ids: ids[:3], "ids for 3 samples, and the microbatches have 7"),
        (lambda ids: [*ids[:6], ids[6][:, :2]], r"sample 6 is \[1, 2\]. Expected: \[1, 5\]"),
        (lambda ids: [ids[0][1:], *ids[1:]], r"sample 0 is \[7, 5\]. Expected: \[8, 5\]"),
        (lambda ids: [ids[0].float(), *ids[1:]], "sample 0 is torch.float32"),
        (lambda ids: [ids[0] + 32, *ids[1:]], "Expected: 0 to 31"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            forward_topk(student, microbatches(), at=None if ids is None else spoil(ids))
    layer = getattr(unwrap(student[-1]), "output_layer", None)  # which only the last stage has
    adapter = nullcontext() if layer is None else mock.patch.object(layer, "forward", layer.forward)
    with adapter, pytest.raises(InvalidInputError, match="not the product of hidden states"):
        forward_hidden_states(student, microbatches(), progress=False)


def _check_hidden_states(teacher: Any, topk: Any) -> None:
    """With the output layer they are the same distributions, on every rank."""
    before = reachable_bytes()
    hidden = forward_hidden_states(teacher, microbatches(), progress=False)
    size = teacher[-1].config.hidden_size
    # Nothing of a microbatch is left but the results: h numbers for each response token.
    assert reachable_bytes() - before == sum(4 * len(hidden_lh) * size for hidden_lh in hidden or ())
    assert (hidden is None) == (topk is None)
    if topk is None:
        return
    head, group = output_head(teacher), parallel_state.get_tensor_model_parallel_group()
    for hidden_lh, of_sample in zip(hidden, topk, strict=True):
        assert hidden_lh.shape == (len(of_sample), head.weight.shape[1])
        (logits,) = FullDistribution.from_hidden(hidden_lh, head).logits()
        log_probs = vocab_parallel_log_probs_at(
            logits, of_sample.indices, tp_group=group, temperature=TEMPERATURE
        )
        torch.testing.assert_close(log_probs, of_sample.log_probs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("1 rank", "TP 2, sequence parallel", "PP 2")))
@on_ranks(scoring.ranks_of)
def test_a_students_topk_and_a_teacher_at_the_students_ids(layout: str) -> None:
    expected = _reference()
    student, teacher = _models(TinyModel(**LAYOUTS[layout][1]))
    options = {"temperature": TEMPERATURE, "progress": False}
    own = forward_topk(student, microbatches(), np.int64(K), **options)
    of_teacher = forward_topk(teacher, microbatches(), at=own, **options)
    ids = None if own is None else [distribution.indices for distribution in own]
    by_ids = forward_topk(teacher, microbatches(), at=ids, **options)
    is_last = scoring.is_last_stage()
    assert (own is not None) == (of_teacher is not None) == (by_ids is not None) == is_last
    _check_refusals(student, own)
    _check_hidden_states(teacher, of_teacher)
    for name in ("indices", "log_probs", "tail_log_prob"):
        values = [getattr(one, name) for one in (*own, *of_teacher)] if is_last else None
        scoring.assert_same_everywhere(values)
    if not is_last:
        return
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(of_teacher, by_ids, strict=True))
    for ours, samples in zip((own, of_teacher), expected, strict=True):
        for one, (ids_nk, log_probs, tail) in zip(ours, samples, strict=True):
            assert torch.equal(one.indices, ids_nk)
            assert one.log_probs.dtype == torch.float32
            torch.testing.assert_close(one.log_probs.double(), log_probs, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(one.tail_log_prob.double(), tail, rtol=1e-5, atol=2e-6)


class ValueHead(torch.nn.Linear):
    """What frameworks put in the place of a GPTModel's output layer."""

    def __init__(self, hidden_size: int, sequence_parallel: bool) -> None:
        super().__init__(hidden_size, 1, bias=False)
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor, *unused: Any, **options: Any) -> tuple[torch.Tensor, None]:
        values = super().forward(hidden)
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values)
        return values, None


def critic(tiny: TinyModel) -> list[Any]:
    def provide(pre_process: bool, post_process: bool, config: Any, vp_stage: Any = None) -> torch.nn.Module:
        chunk = tiny.provider(pre_process, post_process, config, vp_stage)
        if post_process:
            chunk.output_layer = ValueHead(32, tiny.sequence_parallel)
        return chunk

    tiny.initialize()
    model = build_inference_model(provide, tiny.transformer_config(), dtype="fp32")
    scoring.fill_by_name(model)
    return model


BATCHES = [
    {"tokens": torch.arange(16).view(2, 8) % 32, "lengths": [8, 5], "indices": [2, 0]},
    {"tokens": torch.arange(16, 24).view(1, 8), "lengths": [7], "response_lengths": [3], "indices": [1]},
]


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("TP 2, sequence parallel", "PP 2", "CP 2")))
@on_ranks(scoring.ranks_of)
def test_values_of_all_tokens(layout: str) -> None:
    [chunk] = critic(TinyModel())
    expected = {}
    for batch in BATCHES:
        tokens, positions = batch["tokens"], torch.arange(8).expand_as(batch["tokens"])
        outputs = chunk(tokens, positions, None)[..., 0]
        for output, length, index in zip(outputs, batch["lengths"], batch["indices"], strict=True):
            expected[index] = output[:length]
    model = critic(TinyModel(**LAYOUTS[layout][1]))
    values = forward_values(model, BATCHES, progress=False)
    assert (values is not None) == scoring.is_last_stage()
    scoring.assert_same_everywhere(values)
    if values is not None:
        torch.testing.assert_close(values, [expected[index] for index in range(3)])


@on_ranks(1)
def test_values_of_a_forward_of_ones_own() -> None:
    model = critic(TinyModel())
    several = [{"tokens": torch.zeros(1, 8, dtype=torch.int64), "lengths": [3, 4]}]

    def values(numbers: int) -> Any:
        output = torch.arange(8.0).view(1, 8, 1).expand(1, 8, numbers)
        return forward_values(model, several, forward=lambda *_: output, progress=False)

    assert [one.tolist() for one in values(1)] == [[0, 1, 2], [3, 4, 5, 6]]
    with pytest.raises(InvalidInputError, match=r"2 numbers per token\. Expected: one"):
        values(2)
