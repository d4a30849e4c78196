"""Tokens that are kept from making gradients NaN, on tensors alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses.objectives import finite

INF, NAN = math.inf, math.nan


def gradient_of(function: object, *values: float) -> tuple[Tensor, Tensor]:
    """Return what the function makes of a leaf, and the gradient of the sum of the exponentials of that."""
    leaf_n = torch.tensor(values, requires_grad=True)
    result_n = function(leaf_n)
    result_n.exp().sum().backward()
    return result_n.detach(), leaf_n.grad


def test_log_ratios_that_overflow_are_bounded() -> None:
    in_range = [-200.0, -20.0, 0.0, 20.0, 44.0, 80.0]
    value_n, gradient_n = gradient_of(finite.bounded_log_ratio, *in_range, 81.0, 1e30, INF)
    assert value_n.tolist() == [*in_range, 20.0, 20.0, 20.0]
    assert torch.equal(gradient_n[:6], torch.tensor(in_range).exp())
    assert gradient_n[6:].tolist() == [0.0, 0.0, 0.0]
    assert finite.bounded_log_ratio(torch.tensor([NAN])).isnan().all()  # a token that counts hides nothing

    old_n = torch.full((4,), -90.0)
    value_n, gradient_n = gradient_of(lambda x: finite.near_old(x, old_n), -95.0, -10.0, -9.0, 0.0)
    assert value_n.tolist() == [-95.0, -10.0, -70.0, -70.0]
    assert (gradient_n > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("importance", [False, True])
def test_kl_terms_that_overflow_are_bounded(importance: bool) -> None:
    """Product and factors, with the estimator as slime has it."""
    log_probs_n = torch.tensor([-1.0, -60.0, -101.0, -60.0, -INF], requires_grad=True)
    base_n = torch.tensor([-1.2, -1.0, -1.0, -1.0, -1.0])
    old_n = torch.tensor([-1.1, -60.0, -101.0, -130.0, -1.0])

    def kl_of(log_probs_n: Tensor, base_n: Tensor, ratio_n: Tensor | None) -> Tensor:
        log_ratio_n = base_n - log_probs_n
        kl_n = log_ratio_n.exp() - 1 - log_ratio_n
        return kl_n if ratio_n is None else ratio_n * kl_n

    ratio_n = torch.exp(log_probs_n - old_n) if importance else None
    kl_n = kl_of(*finite.bounded_kl_arguments(log_probs_n, base_n, ratio_n))
    [gradient_n] = torch.autograd.grad(kl_n.sum(), log_probs_n, retain_graph=True)
    plain_n = kl_of(log_probs_n, base_n, ratio_n)
    [plain_gradient_n] = torch.autograd.grad(plain_n[:2].sum(), log_probs_n)
    assert torch.equal(kl_n[:2], plain_n[:2])
    assert torch.equal(gradient_n[:2], plain_gradient_n[:2])
    bounded = [2, 3, 4] if importance else [2, 4]
    assert gradient_n.isfinite().all() and kl_n.isfinite().all()
    assert gradient_n[bounded].tolist() == [0.0] * len(bounded)
    assert kl_n[2] == torch.tensor(20.0).exp() - 21


def test_masked_tokens_that_are_not_comparable() -> None:
    counted_n = torch.tensor([True, False, False, False, False, True])
    old_n = torch.tensor([-1.0, -1.0, -INF, -1.0, -1.0, NAN])
    ref_n = torch.tensor([-2.0, -2.0, -2.0, 99.0, -2.0, -2.0])
    kept_old_n, kept_ref_n = finite.comparable_where_masked([old_n, ref_n], counted_n)
    assert kept_old_n[:5].tolist() == [-1.0, -1.0, 0.0, 0.0, -1.0] and kept_old_n[5].isnan()
    assert kept_ref_n.tolist() == [-2.0, -2.0, 0.0, 0.0, -2.0, -2.0]

    log_probs_n = torch.tensor([-3.0, -3.0, -3.0, NAN, -500.0, -3.0], requires_grad=True)
    kept_n = finite.kept_near(log_probs_n, [kept_old_n, kept_ref_n], counted_n)
    assert kept_n.tolist() == [-3.0, -3.0, -3.0, 0.0, -1.0, -3.0]
    (kept_n * NAN).sum().backward()  # as whatever follows may have it
    assert log_probs_n.grad.isnan().tolist() == [True, True, True, False, False, True]
    assert finite.kept_near(torch.tensor([-INF]), [], torch.tensor([False])).tolist() == [0.0]

    values_n = torch.tensor([INF, -INF, NAN, 3.0, 4.0, 5.0])
    assert finite.finite_where_masked(values_n, counted_n).tolist() == [INF, 0.0, 0.0, 3.0, 4.0, 5.0]


def mean_of_samples(x: Tensor) -> Tensor:
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0, 0]), torch.tensor([0.5])]
    parts = zip(x.split([3, 2, 1]), masks, strict=True)
    return torch.stack([(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts]).sum()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_counted_tokens_are_those_of_the_reduction(use_reentrant: bool | None) -> None:
    leaf_n = torch.ones(6, requires_grad=True)
    found = []

    def loss(x_n: Tensor) -> Tensor:
        found.append(finite.counted_tokens(mean_of_samples, 6, x_n.device))
        return (x_n.exp() * found[-1]).sum()

    result = loss(leaf_n) if use_reentrant is None else checkpoint(loss, leaf_n, use_reentrant=use_reentrant)
    result.backward()
    assert len(found) == (1 if use_reentrant is None else 2)
    assert all(counted_n.tolist() == [True, False, True, False, False, True] for counted_n in found)
    assert torch.equal(leaf_n.grad, leaf_n.detach().exp() * found[0])
    assert finite.counted_tokens(lambda x_n: 0, 0, torch.device("cpu")).shape == (0,)
