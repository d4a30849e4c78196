"""What the closure for a forward step takes; tests/real/test_loss_func.py has its loss and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pytest_mock import MockerFixture

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import PolicyBatch, PolicyOptions, SequenceLayout, make_loss_func, policy_loss
from megatron_rl_patches.losses import loss_functions as loss_module

VOCABULARY = 11
TOTALS, RESPONSES = [6, 4, 9], [3, 0, 8]
OPTIONS = PolicyOptions(objective="gspo", entropy_coef=0.1, kl_coef=0.2, normalization="sequence")


def batch_and_tokens() -> tuple[PolicyBatch, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random() -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator) - 2 for n in RESPONSES]

    masks = [torch.rand(n, generator=generator) < 0.8 for n in RESPONSES]
    tokens = [torch.randint(VOCABULARY, (n,), generator=generator) for n in TOTALS]
    return PolicyBatch(random(), masks, random(), random(), random()), tokens


def logits_leaf() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, sum(TOTALS), VOCABULARY, generator=generator, requires_grad=True)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_entropy_has_a_gradient_only_when_it_has_a_coefficient(
    coefficient: float, mocker: MockerFixture
) -> None:
    spy = mocker.spy(loss_module, "packed_log_probs_and_entropy")
    batch, tokens = batch_and_tokens()
    options = replace(OPTIONS, entropy_coef=coefficient)
    make_loss_func(tokens, SequenceLayout.build(TOTALS, RESPONSES), batch, options)(logits_leaf())
    assert spy.call_args.kwargs["entropy_grad"] is bool(coefficient)
    assert all(entropy.requires_grad is bool(coefficient) for entropy in spy.spy_return[1])


def test_what_does_not_fit_is_refused_before_the_forward() -> None:
    batch, tokens = batch_and_tokens()
    layout = SequenceLayout.build(TOTALS, RESPONSES)
    with pytest.raises(InvalidInputError, match="pass the full responses"):
        make_loss_func(tokens, SequenceLayout.build(TOTALS, [3, 1, 8]), batch)
    with pytest.raises(InvalidInputError, match="pass cp_group"):
        make_loss_func(tokens, SequenceLayout.build(TOTALS, RESPONSES, cp_size=2), batch)
    with pytest.raises(InvalidInputError, match="must be positive"):
        make_loss_func(tokens, layout, batch, normalizer=0.0)
    with pytest.raises(InvalidInputError, match="ref_log_probs are needed"):
        make_loss_func(tokens, layout, replace(batch, ref_log_probs=None), OPTIONS)


def test_the_entropy_can_be_left_out_and_sampling_has_its_mask() -> None:
    batch, tokens = batch_and_tokens()
    layout = SequenceLayout.build(TOTALS, RESPONSES)
    logits = logits_leaf()
    keep_mask = logits[0, layout.response_rows].detach() > -0.5
    loss_func = make_loss_func(tokens, layout, batch, with_entropy=False, keep_mask=keep_mask)
    loss, _, metrics = loss_func(logits)
    assert "entropy" not in metrics
    rows = torch.where(keep_mask, logits[0, layout.response_rows], float("-inf"))
    targets = layout.response_targets(tokens)[:, None]
    rows = rows.scatter(1, targets, logits[0, layout.response_rows].gather(1, targets))
    log_probs = layout.split_responses(rows.log_softmax(1).gather(1, targets)[:, 0])
    torch.testing.assert_close(loss, policy_loss(log_probs, batch, PolicyOptions())[0])
    with pytest.raises(InvalidInputError, match="needs with_entropy=True"):
        make_loss_func(tokens, layout, batch, OPTIONS, with_entropy=False)
