"""Log-probabilities and entropies by the conventions of frameworks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.frameworks import log_probs as frameworks
from tests.references.dense import dense_log_probs_and_entropy


def model_logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output of some operation, as a model's are."""
    leaf = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return leaf.to(dtype).requires_grad_() * 1


def test_scores_have_the_shape_of_the_tokens() -> None:
    logits, tokens = model_logits(2, 3, 11), torch.arange(6).view(2, 3)
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    assert entropies is not None
    expected = dense_log_probs_and_entropy(logits.view(6, 11), tokens.view(6))
    torch.testing.assert_close((log_probs, entropies), tuple(x.view(2, 3).float() for x in expected))
    assert frameworks.log_probs_and_entropy(logits, tokens, None)[1] is None


def test_tokens_outside_of_the_vocabulary_have_no_share_in_anything() -> None:
    logits = model_logits(4, 11)
    tokens = torch.tensor([3, -100, 11, -1])
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    assert entropies is not None
    assert log_probs[1:].tolist() == entropies[1:].tolist() == [0.0] * 3
    [gradient] = torch.autograd.grad((log_probs + entropies).sum(), logits)
    assert gradient[0].any() and not gradient[1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_goes_into_float32_logits_only(dtype: torch.dtype) -> None:
    logits = model_logits(4, 11, dtype=dtype)
    before = logits.detach().clone()
    log_probs, _ = frameworks.log_probs_and_entropy(logits, torch.arange(4), None, inplace_backward=True)
    assert torch.equal(logits.detach(), before)
    log_probs.sum().backward()
    assert torch.equal(logits.detach(), before) == (dtype != torch.float32)


@pytest.mark.parametrize("case", ["a leaf", "a part", "has an entropy"])
def test_logits_that_somebody_needs_are_not_overwritten(case: str) -> None:
    logits = model_logits(4, 11)
    if case == "a leaf":
        logits = logits.detach().requires_grad_()
    elif case == "a part":
        logits = model_logits(6, 11)[1:5]
    entropies = frameworks.entropy(logits, None) if case == "has an entropy" else torch.zeros(4)
    before = logits.detach().clone()
    log_probs, _ = frameworks.log_probs_and_entropy(logits, torch.arange(4), None, inplace_backward=True)
    (log_probs + entropies).sum().backward()
    assert torch.equal(logits.detach(), before)
