"""Estimators of the KL divergence: unbiased, and with a gradient that always points to the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import estimate_kl

of_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
# From next to zero to what a token that one policy rules out may reach, around the bound of k3 densely.
MAGNITUDES = torch.cat(
    [torch.logspace(-3, 5, 200, dtype=torch.float64), torch.linspace(19, 21, 201, dtype=torch.float64)]
)
LOG_RATIOS = torch.cat([-MAGNITUDES, MAGNITUDES]).sort().values


def gradient(log_ratio: torch.Tensor, estimator: Any) -> torch.Tensor:
    log_ratio = log_ratio.detach().requires_grad_()
    return torch.autograd.grad(estimate_kl(log_ratio, estimator).sum(), log_ratio)[0]


@of_each_dtype
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_gradient_never_changes_sign(estimator: Any, dtype: torch.dtype) -> None:
    """A descent step lowers log p where it is above log q, and raises it where it is below."""
    log_ratio = LOG_RATIOS.to(dtype)
    value, slope = estimate_kl(log_ratio, estimator), gradient(log_ratio, estimator)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert (slope * log_ratio.sign() >= 0).all()
    beyond = log_ratio.abs() > 0.01  # bfloat16 has no digits for 1 - exp(-0.001)
    assert (slope[beyond] * log_ratio[beyond].sign() > 0).all()
    assert (slope.diff() >= 0).all(), "both are convex"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_is_the_derivative_of_the_value(estimator: Any) -> None:
    for start, end in ((-25.0, -15.0), (-20.5, -19.5), (-1e3, -19.0), (-3.0, 3.0), (15.0, 1e3)):
        points = torch.linspace(start, end, 200_001, dtype=torch.float64)
        first, last = estimate_kl(points[[0, -1]], estimator)
        integral = torch.trapezoid(gradient(points, estimator), points)
        torch.testing.assert_close(integral, last - first, rtol=1e-5, atol=1e-9)


@of_each_dtype
def test_k3_is_its_formula_up_to_20_nats_and_a_straight_line_beyond(dtype: torch.dtype) -> None:
    for log_ratio in (-19.5, -20.0, -2.0, 0.0, 2.0, 50.0):
        x = torch.tensor(log_ratio, dtype=dtype)
        expected = torch.tensor(log_ratio, dtype=torch.float64).neg().expm1() + log_ratio
        torch.testing.assert_close(estimate_kl(x, "k3"), expected.to(dtype))
        torch.testing.assert_close(gradient(x, "k3"), -torch.tensor(-log_ratio).double().expm1().to(dtype))
    steepest = gradient(torch.tensor(-20.0, dtype=dtype), "k3")
    assert gradient(torch.tensor([-25.0, -1e4], dtype=dtype), "k3").tolist() == [steepest] * 2


def test_infinite_ratios_are_not_nan() -> None:
    infinite = torch.tensor([-torch.inf, torch.inf])
    assert estimate_kl(infinite, "k3").tolist() == [torch.inf, torch.inf]
    assert gradient(infinite, "k3")[0] < 0 < gradient(infinite, "k3")[1]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="estimator is 'k9'"):
        estimate_kl(torch.zeros(2), "k9")
