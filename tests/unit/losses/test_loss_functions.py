"""Layouts, log-probs and entropies of responses, and the closure for a forward step, against dense formulas.

tests/real/test_loss_func.py has loss and gradient of the closure.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from megatron_rl_patches import losses
from tests.references.dense import random

from .objectives.test_policy import make
from .sequences.cp_reference import Case, cases, corners, dense, microbatch, weighted


@settings(max_examples=30)
@corners
@given(cases())
def test_equals_dense(case: Case) -> None:
    temperature = 0.7
    logits, tokens = microbatch(case)
    log_probs, entropies = dense(case, logits, tokens, temperature)
    loss: Any = 0
    for rank, layout in enumerate(case.layouts()):
        assert case.shard(tokens, rank).shape == layout.logits_shape
        got, got_entropies = losses.packed_log_probs_and_entropy(
            case.shard(logits, rank), tokens, layout, temperature=temperature
        )
        torch.testing.assert_close(got, layout.local_parts(log_probs))
        torch.testing.assert_close(got_entropies, layout.local_parts(entropies))
        assert all(part.requires_grad for part in got + got_entropies)
        loss += weighted(got, 1.0) + weighted(got_entropies, 0.3)
    # Rows of prompts included: their gradient is zero in the dense reference, too.
    got_grads = torch.autograd.grad(loss, logits)
    dense_grads = torch.autograd.grad(weighted(log_probs, 1.0) + weighted(entropies, 0.3), logits)
    torch.testing.assert_close(got_grads, dense_grads)


@given(cases(cp_sizes=(1,)))
def test_without_context_parallelism_gathering_is_splitting(case: Case) -> None:
    layout, values = case.layout(0), torch.randn(sum(case.responses), 3, requires_grad=True)
    parts = layout.gather_responses(values)
    assert [len(part) for part in parts] == list(case.responses)
    assert all(map(torch.equal, parts, layout.gather_responses(layout.split_responses(values))))
    assert all(part.requires_grad for part in parts)
    assert not any(part.requires_grad for part in layout.gather_responses(values.detach()))


def test_lengths_may_be_tensors_and_layouts_go_to_the_device_of_the_logits() -> None:
    layout = losses.SequenceLayout.build(torch.tensor([4, 6]), torch.tensor([2, 3]))
    assert layout.response_rows.tolist() == [1, 2, 6, 7, 8]
    layout = losses.SequenceLayout.build([9], [4], cp_size=2, allgather_cp=True, device="meta")
    vectors = (layout.response_rows, layout.response_index)
    parts = layout.local_parts([torch.zeros(4, device="meta")])
    assert {vector.device.type for vector in (*vectors, *parts)} == {"meta"}


PACKED = Case((2, 3), (4, 1), tail=3)


def test_entropy_is_optional_and_so_is_its_gradient() -> None:
    logits, tokens = microbatch(PACKED)
    shard, layout = PACKED.shard(logits, 0), PACKED.layout(0)
    both, entropies = losses.packed_log_probs_and_entropy(shard, tokens, layout, entropy_grad=False)
    # Packed logits may come without the dimension of the batch.
    alone, nothing = losses.packed_log_probs_and_entropy(shard[0], tokens, layout, with_entropy=False)
    assert nothing is None
    torch.testing.assert_close(alone, both)
    assert all(part.requires_grad for part in both + alone)
    assert not any(part.requires_grad for part in entropies)
    with torch.no_grad():
        quiet, quiet_entropies = losses.packed_log_probs_and_entropy(shard, tokens, layout)
    assert not any(part.requires_grad for part in quiet + quiet_entropies)


# --- the closure

VOCABULARY = 11
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
LAYOUT = losses.SequenceLayout.build(TOTALS, RESPONSES)
OPTIONS = losses.PolicyOptions(objective="gspo", entropy_coef=0.1, kl_coef=0.2, normalization="sequence")


def batch_tokens_and_logits() -> tuple[losses.PolicyBatch, list[torch.Tensor], torch.Tensor]:
    _, _, batch = make(lengths=RESPONSES, masked=None)
    tokens = [torch.arange(n) * 5 % VOCABULARY for n in TOTALS]
    return batch, tokens, random(1, sum(TOTALS), VOCABULARY, seed=0).requires_grad_()


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_entropy_has_a_gradient_only_when_it_has_a_coefficient(coefficient: float, mocker: Any) -> None:
    spy = mocker.spy(losses.loss_functions, "log_probs_and_entropy")
    batch, tokens, logits = batch_tokens_and_logits()
    losses.make_loss_func(tokens, LAYOUT, batch, replace(OPTIONS, entropy_coef=coefficient))(logits)
    assert spy.spy_return[1].requires_grad is bool(coefficient)


def test_the_entropy_can_be_left_out_and_sampling_has_its_mask() -> None:
    batch, tokens, logits = batch_tokens_and_logits()
    rows_nv = logits[0, LAYOUT.response_rows]
    keep_mask = rows_nv.detach() > -0.5
    loss_func = losses.make_loss_func(tokens, LAYOUT, batch, with_entropy=False, keep_mask=keep_mask)
    loss, _, metrics = loss_func(logits)
    assert "entropy" not in metrics
    targets = LAYOUT.response_targets(tokens)[:, None]
    kept_nv = rows_nv.where(keep_mask, -torch.inf).scatter(1, targets, rows_nv.gather(1, targets))
    log_probs = LAYOUT.split_responses(kept_nv.log_softmax(1).gather(1, targets)[:, 0])
    torch.testing.assert_close(loss, losses.policy_loss(log_probs, batch, losses.PolicyOptions())[0])


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_of_tokens_that_do_not_count_may_hold_anything(inplace: bool, value: float) -> None:
    """Of a policy; of a student, see ``objectives/test_distillation.py``."""
    batch, tokens, logits = batch_tokens_and_logits()
    loss_func = losses.make_loss_func(tokens, LAYOUT, batch, OPTIONS, inplace_backward=inplace)
    counts = torch.zeros(LAYOUT.num_rows, dtype=torch.bool)
    counts[LAYOUT.response_rows] = torch.cat(list(batch.loss_masks))
    results = []
    for spoiled in (logits.detach(), torch.where(counts[:, None], logits.detach(), value)):
        leaf = spoiled.clone().requires_grad_()
        total, _, metrics = loss_func(leaf * 1)
        results.append((total, *torch.autograd.grad(total, leaf), *metrics.values()))
    assert all(map(torch.equal, *results))
    assert not results[1][1][0, ~counts].any() and results[1][1][0, counts].any()
