"""``packed_log_probs_and_entropy`` against dense log-softmax of whole samples, all ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import packed_log_probs_and_entropy

from .cp_reference import Case, Tensors, cases
from .test_layout import corners

VOCAB = 6


def _microbatch(case: Case) -> tuple[Tensors, Tensors]:
    """Logits and tokens of whole samples."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) for n in case.totals]
    tokens = [torch.randint(VOCAB, (n,), generator=generator) for n in case.totals]
    return [sample.requires_grad_() for sample in logits], tokens


def _dense(case: Case, logits: Tensors, tokens: Tensors, temperature: float = 1.0) -> tuple[Tensors, Tensors]:
    """Log-probs and entropies of full responses."""
    log_probs_v = [(sample / temperature).log_softmax(-1) for sample in case.of_predictors(logits)]
    log_probs = [
        sample.gather(1, response[:, None]).squeeze(1)
        for sample, response in zip(log_probs_v, case.of_responses(tokens), strict=True)
    ]
    return log_probs, [-(sample.exp() * sample).sum(-1) for sample in log_probs_v]


def _weighted(parts: Tensors, factor: float) -> torch.Tensor:
    """A loss whose gradient differs from token to token."""
    return factor * sum((part**2).sum() for part in parts)


@corners
@given(cases())
def test_equals_dense(case: Case) -> None:
    temperature = 0.7
    logits, tokens = _microbatch(case)
    log_probs, entropies = _dense(case, logits, tokens, temperature)
    loss: Any = 0
    for rank, layout in enumerate(case.layouts()):
        got, got_entropies = packed_log_probs_and_entropy(
            case.shard(logits, rank), tokens, layout, temperature=temperature
        )
        torch.testing.assert_close(got, layout.local_parts(log_probs))
        torch.testing.assert_close(got_entropies, layout.local_parts(entropies))
        assert all(part.requires_grad for part in got + got_entropies)
        loss += _weighted(got, 1.0) + _weighted(got_entropies, 0.3)
    # Rows of prompts included: their gradient is zero in the dense reference, too.
    got_grads = torch.autograd.grad(loss, logits)
    dense_grads = torch.autograd.grad(_weighted(log_probs, 1.0) + _weighted(entropies, 0.3), logits)
    torch.testing.assert_close(got_grads, dense_grads)


PADDED = Case((2, 3), (4, 1), scheme="padded", sample_padding=2)
PACKED = Case((2, 3), (4, 1), tail=3)


def test_packed_logits_come_with_and_without_batch_dimension() -> None:
    logits, tokens = _microbatch(PACKED)
    shard, layout = PACKED.shard(logits, 0), PACKED.layout(0)
    with_batch = packed_log_probs_and_entropy(shard, tokens, layout)
    without = packed_log_probs_and_entropy(shard[0], tokens, layout)
    torch.testing.assert_close(with_batch, without, rtol=0, atol=0)


def test_entropy_is_optional_and_so_is_its_gradient() -> None:
    logits, tokens = _microbatch(PACKED)
    shard, layout = PACKED.shard(logits, 0), PACKED.layout(0)
    both, entropies = packed_log_probs_and_entropy(shard, tokens, layout, entropy_grad=False)
    alone, nothing = packed_log_probs_and_entropy(shard, tokens, layout, with_entropy=False)
    assert nothing is None
    torch.testing.assert_close(alone, both)
    assert all(part.requires_grad for part in both + alone)
    assert not any(part.requires_grad for part in entropies)
    with torch.no_grad():
        quiet, quiet_entropies = packed_log_probs_and_entropy(shard, tokens, layout)
    assert not any(part.requires_grad for part in quiet + quiet_entropies)


@pytest.mark.parametrize("case", [PACKED, PADDED], ids=["packed", "padded"])
def test_the_gradient_may_take_the_place_of_the_logits_of_the_model(case: Case) -> None:
    tokens, layout = _microbatch(case)[1], case.layout(0)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(*layout.logits_shape[::-1], 3, dtype=torch.float64, generator=generator)

    def weight_grad(inplace: bool) -> tuple[torch.Tensor, bool]:
        weight = torch.ones(VOCAB, 3, dtype=torch.float64).cumsum(0).requires_grad_()
        # As Megatron's GPTModel: [seq, batch, vocab] from the output layer, then [batch, seq, vocab].
        logits = torch.nn.functional.linear(hidden, weight).transpose(0, 1).contiguous()
        before = logits.detach().clone()
        log_probs, _ = packed_log_probs_and_entropy(logits, tokens, layout, inplace_backward=inplace)
        _weighted(log_probs, 1.0).backward()
        return weight.grad, torch.equal(logits, before)

    (fresh, untouched), (inplace, kept) = weight_grad(False), weight_grad(True)
    torch.testing.assert_close(inplace, fresh)
    assert untouched
    assert not kept


@pytest.mark.parametrize("case", [PACKED, PADDED], ids=["packed", "padded"])
def test_logits_of_another_layout_are_refused(case: Case) -> None:
    logits, tokens = _microbatch(case)
    shard, layout = case.shard(logits, 0), case.layout(0)
    too_few = shard[:, :-1]
    sequence_first = shard.transpose(0, 1)
    one_dimensional = shard.flatten()
    for wrong in (too_few, sequence_first, one_dimensional, shard[..., None]):
        with pytest.raises(InvalidInputError, match="but their layout is"):
            packed_log_probs_and_entropy(wrong, tokens, layout)


def test_tokens_of_another_microbatch_are_refused() -> None:
    logits, tokens = _microbatch(PACKED)
    with pytest.raises(InvalidInputError, match="tokens have the lengths"):
        packed_log_probs_and_entropy(PACKED.shard(logits, 0), tokens[::-1], PACKED.layout(0))


def test_a_layout_on_another_device_is_refused() -> None:
    logits, tokens = _microbatch(PACKED)
    with pytest.raises(InvalidInputError, match=r"logits are on meta.*pass device=logits\.device"):
        packed_log_probs_and_entropy(PACKED.shard(logits, 0).to("meta"), tokens, PACKED.layout(0))
