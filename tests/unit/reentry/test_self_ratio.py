"""What the self-ratio check says of two sets of log-probs; ``tests/real`` has the causes of real models."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.reentry import RatioReport, SelfRatio

SCORED = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-0.5, -1.5])]


def report_of(*changes: tuple[int, int, float], masks: list[torch.Tensor] | None = None) -> RatioReport:
    """Compare with log-probs of which some are others: sample, token, value."""
    trained = [values.clone() for values in SCORED]
    for sample, token, value in changes:
        trained[sample][token] = value
    ratio = SelfRatio()
    ratio.add(trained, SCORED, masks)
    report = ratio.report()
    assert report is not None
    return report


def test_differences_and_where_they_are() -> None:
    report = report_of((0, 1, -2.5), (1, 0, -0.45))
    assert (report.tokens, report.above, report.not_finite, report.is_off) == (5, 1, 0, True)
    assert report.mean == pytest.approx(0.11) and report.largest == pytest.approx(0.5)
    average = (3 + math.exp(-0.5) + math.exp(0.05)) / 5
    assert report.ratio == pytest.approx((math.exp(-0.5), average, math.exp(0.05)))
    assert report.worst == [(pytest.approx(-0.5), 0, 1), (pytest.approx(0.05), 1, 0)]
    assert "-0.5 at token 1 of sample 0" in str(report)


def test_microbatches_are_one_step() -> None:
    ratio = SelfRatio()
    for part in SCORED:
        ratio.add([part + 0.2], [part])
    ratio.add([torch.empty(0)], [torch.empty(0)])
    ratio.add([], [])
    report = ratio.report()
    assert report is not None and (report.tokens, report.above) == (5, 5)
    assert {sample for _, sample, _ in report.worst} == {0, 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    report = report_of((1, 1, value))
    assert (report.tokens, report.above, report.not_finite, report.is_off) == (5, 1, 1, True)
    assert (report.mean, report.largest, report.worst) == (0, 0, [(math.inf, 1, 1)])
    assert report_of(*((i, at, value) for i in (0, 1) for at in range(len(SCORED[i])))).not_finite == 5
    masks = [torch.ones(3), torch.tensor([1, 0])]
    assert not report_of((1, 1, value), masks=masks).is_off
    same = SelfRatio()
    same.add([torch.tensor([-math.inf, -1.0])], [torch.tensor([-math.inf, -1.0])])
    assert (report := same.report()) is not None and not report.is_off and report.not_finite == 0


def test_what_is_not_known_rules_nothing_out() -> None:
    generator = torch.Generator().manual_seed(0)
    scored = torch.randn(2, 200, generator=generator)
    for trained, causes in (
        (scored + 0.2 * torch.randn(2, 200, generator=generator), ["dropout"]),
        (scored - 0.2, ["padded vocabulary", "mask of top-p or top-k"]),
        (scored * 1.5 + 0.1, ["temperature"]),
    ):
        ratio = SelfRatio()
        ratio.add(trained, scored)
        assert (report := ratio.report()) is not None and report.causes == causes


def test_nothing_is_read_before_the_report() -> None:
    """A tensor on the device ``meta`` has no value to read."""
    ratio, random = SelfRatio(), torch.get_rng_state()
    values = [torch.empty(3, device="meta", requires_grad=True)]
    ratio.add(values, values, values, entropies=values)
    assert not ratio._added[0].requires_grad and torch.equal(torch.get_rng_state(), random)
    with pytest.raises(NotImplementedError, match="meta"):
        ratio.report()


def test_bad_lengths_and_no_tokens() -> None:
    with pytest.raises(InvalidInputError, match=r"differ: \[\[3, 2\], \[3\], \[3\]\]"):
        SelfRatio().add(SCORED, SCORED[:1], SCORED[:1])
    assert SelfRatio().report() is None
    ratio = SelfRatio()
    ratio.add(SCORED, SCORED, [torch.zeros(3), torch.zeros(2)])
    assert ratio.report() is None
