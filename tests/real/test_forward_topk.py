"""``forward_topk`` on real megatron-core: a student's own top-k, and a teacher at the student's ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_hidden_states, forward_topk, output_head
from megatron_rl_patches.losses import FullDistribution, vocab_parallel_log_probs_at
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks
from tests.real.test_scoring import (
    LAYOUTS,
    TEMPERATURE,
    assert_same_everywhere,
    by_speed,
    dense_log_probs,
    filled,
    microbatches,
    ranks_of,
)
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes

K = 5


def _models(**sizes: Any) -> tuple[list[Any], list[Any]]:
    """Student and teacher: the second has other weights."""
    options = TinyModel(**sizes)
    ddp, student = filled(options)
    teacher = tiny_gpt.inference_model(options)
    with torch.no_grad():
        for chunk, trained in zip(teacher, ddp, strict=True):
            chunk.load_state_dict(trained.module.state_dict())
            for parameter in chunk.parameters():
                parameter.mul_(0.7)
    return student, teacher


def _reference() -> tuple[list[Any], list[Any]]:
    """Ids, log-probabilities and tail by sample, of student and teacher."""
    of_models = [sorted(dense_log_probs(model), key=lambda sample: sample[0]) for model in _models()]
    expected: tuple[list[Any], list[Any]] = [], []
    for (_, of_student_nv, _), (_, of_teacher_nv, _) in zip(*of_models, strict=True):
        ids_nk = of_student_nv.topk(K).indices
        for log_p_nv, samples in zip((of_student_nv, of_teacher_nv), expected, strict=True):
            outside = log_p_nv.scatter(1, ids_nk, float("-inf")).logsumexp(1)
            samples.append((ids_nk, log_p_nv.gather(1, ids_nk), outside))
    return expected


def _check_refusals(student: Any, own: Any) -> None:
    for refused, message in (
        ({"k": 0}, "k is 0"),
        ({"k": 33}, "k is 33. Expected: 1 to 32"),
        ({"k": 2, "at": []}, "k is 2"),
        ({"k": 2, "allgather_cp": True}, "all-gather context parallelism is not supported"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            forward_topk(student, microbatches(), **refused)
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
    with _adapter(student), pytest.raises(InvalidInputError, match="not the product of hidden states"):
        forward_hidden_states(student, microbatches(), progress=False)


@contextmanager
def _adapter(model: Any) -> Iterator[None]:
    """Give the output layer, which only the last stage has, a forward of its own."""
    layer = getattr(unwrap(model[-1]), "output_layer", None)
    with nullcontext() if layer is None else mock.patch.object(layer, "forward", layer.forward):
        yield


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


@pytest.mark.parametrize(
    "layout", by_speed([name for name in LAYOUTS if "parallel" not in name], fast=("1 rank", "TP 2", "PP 2"))
)
@on_ranks(ranks_of)
def test_layouts(layout: str) -> None:
    sizes = LAYOUTS[layout][1]
    expected = _reference()
    student, teacher = _models(**sizes)
    options = {"temperature": TEMPERATURE, "progress": False}
    own = forward_topk(student, microbatches(), np.int64(K), **options)
    of_teacher = forward_topk(teacher, microbatches(), at=own, **options)
    ids = None if own is None else [distribution.indices for distribution in own]
    by_ids = forward_topk(teacher, microbatches(), at=ids, **options)
    is_last = parallel_state.get_pipeline_model_parallel_rank() == sizes.get("pp", 1) - 1
    assert (own is not None) == (of_teacher is not None) == (by_ids is not None) == is_last
    _check_refusals(student, own)
    _check_hidden_states(teacher, of_teacher)
    for name in ("indices", "log_probs", "tail_log_prob"):
        assert_same_everywhere([getattr(one, name) for one in (*own, *of_teacher)] if is_last else None)
    if not is_last:
        return
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(of_teacher, by_ids, strict=True))
    for ours, samples in zip((own, of_teacher), expected, strict=True):
        for one, (ids_nk, log_probs, tail) in zip(ours, samples, strict=True):
            assert torch.equal(one.indices, ids_nk)
            assert one.log_probs.dtype == torch.float32
            torch.testing.assert_close(one.log_probs.double(), log_probs, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(one.tail_log_prob.double(), tail, rtol=1e-5, atol=2e-6)
