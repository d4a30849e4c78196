"""What the self-ratio check says of two sets of log-probs; ``tests/real`` has the causes of real models."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.reentry import RatioReport, SelfRatio

SCORED = [tensor([-1.0, -2.0, -3.0]), tensor([-0.5, -1.5])]


def report_of(trained: Any, scored: Any, *others: Any) -> RatioReport:
    ratio = SelfRatio()
    ratio.add(trained, scored, *others)
    report = ratio.report()
    assert report is not None
    return report


def changed(*changes: tuple[int, int, float]) -> list[Tensor]:
    """Return log-probs of which some are others: sample, token, value."""
    trained = [values.clone() for values in SCORED]
    for sample, token, value in changes:
        trained[sample][token] = value
    return trained


def test_differences_and_where_they_are() -> None:
    report = report_of(changed((0, 1, -2.5), (1, 0, -0.45)), SCORED)
    assert (report.tokens, report.above, report.not_finite, report.is_off) == (5, 1, 0, True)
    assert report.mean == pytest.approx(0.11) and report.largest == pytest.approx(0.5)
    average = (3 + math.exp(-0.5) + math.exp(0.05)) / 5
    assert report.ratio == pytest.approx((math.exp(-0.5), average, math.exp(0.05)))
    assert report.worst == [(pytest.approx(-0.5), 0, 1), (pytest.approx(0.05), 1, 0)]
    assert "-0.5 at token 1 of sample 0" in str(report)


def test_microbatches_and_halves_of_them_are_one_step() -> None:
    """Samples of very different lengths would take much memory, padded to one length."""
    ratio, parts = SelfRatio(), [torch.zeros(2**18 if i == 2 else i) for i in range(5)]
    for trained, scored in (([], []), (parts[:1], parts[:1]), ([part + 0.2 for part in parts], parts)):
        ratio.add(trained, scored, prompts=[1] * len(scored))
    report, tokens = ratio.report(), sum(map(len, parts))
    assert report is not None and (report.tokens, report.above, len(ratio._added)) == (tokens, tokens, 4)
    assert report.ratio == pytest.approx([math.exp(0.2)] * 3)
    assert [place[1:] for place in report.worst] == [(2, 0), (3, 0), (4, 0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value: float) -> None:
    report = report_of(changed((1, 1, value)), SCORED)
    assert (report.tokens, report.above, report.not_finite, report.is_off) == (5, 1, 1, True)
    assert (report.mean, report.largest, report.worst) == (0, 0, [(pytest.approx(value, nan_ok=True), 1, 1)])
    assert ("mask of top-p or top-k" in report.causes) == math.isinf(value)  # which makes no NaN
    assert f"worst: {'NaN' if math.isnan(value) else f'{value:+}'} at token 1" in str(report)
    assert report_of([torch.full_like(part, value) for part in SCORED], SCORED).not_finite == 5
    assert not report_of(changed((1, 1, value)), SCORED, [torch.ones(3), tensor([1, 0])]).is_off
    both = [tensor([-math.inf, -1.0])]
    assert (report := report_of(both, both)).not_finite == 0 and not report.is_off


def test_causes_without_a_model() -> None:
    generator = torch.Generator().manual_seed(0)
    scored = torch.randn(2, 200, generator=generator)
    noisy, one_masked = scored + 0.2 * torch.randn(2, 200, generator=generator), tensor([[1], [0]])
    logits = torch.zeros(200, 10).index_fill(1, tensor([0]), 1) * torch.linspace(3, 6, 200)[:, None]
    greedy = [(logits / t).log_softmax(-1)[:, :1].T for t in (1.0, 0.8)]
    entropies = torch.distributions.Categorical(logits=logits).entropy()[None]
    for arguments, causes in (
        ((noisy, scored), ["dropout"]),
        ((noisy, scored, one_masked.expand(2, 200)), ["dropout"]),  # not changed packing
        ((scored - 0.2, scored), ["padded vocabulary", "mask of top-p or top-k"]),
        ((scored - 1e-5, scored), []),
        ((scored * 1.5 + 0.1, scored), ["temperature"]),
        (
            (*greedy, None, entropies),
            ["temperature, 0.835 times", "padded vocabulary", "mask of top-p or top-k"],
        ),
    ):
        assert [cause[:22] for cause in report_of(*arguments).causes] == [cause[:22] for cause in causes]


def test_nothing_is_read_before_the_report() -> None:
    """A tensor on the device ``meta`` has no value to read."""
    ratio, random = SelfRatio(), torch.get_rng_state()
    values = [torch.empty(3, device="meta", requires_grad=True)]
    ratio.add(values, values, values, entropies=values)
    assert not ratio._added[0].requires_grad and torch.equal(torch.get_rng_state(), random)
    with pytest.raises(NotImplementedError, match="meta"):
        ratio.report()


def test_bad_lengths_and_no_tokens() -> None:
    with pytest.raises(InvalidInputError, match=r"differ: \[\[3, 2\], \[3\], \[3\], \[3, 2\]\]"):
        SelfRatio().add(SCORED, SCORED[:1], SCORED[:1])
    with pytest.raises(InvalidInputError, match="prompts has 1 lengths, expected one per sample: 2"):
        SelfRatio().add(SCORED, SCORED, prompts=[1])
    with pytest.raises(InvalidInputError, match="limit is -1; expected nats above 0"):
        SelfRatio(limit=-1)
    ratio = SelfRatio()
    assert ratio.report() is None
    ratio.add(SCORED, SCORED, [torch.zeros(3), torch.zeros(2)])
    assert ratio.report() is None
