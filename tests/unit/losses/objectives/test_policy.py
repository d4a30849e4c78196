"""Policy losses against transcriptions of their formulas, token by token in float64.

Then estimators of the KL divergence, and tokens that are kept from making gradients NaN. Bad arguments are in
test_bad_arguments.py.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses import (
    PolicyBatch,
    PolicyOptions,
    average_metrics,
    estimate_kl,
    group_advantages,
    group_log_probs,
    mean_count,
    policy_loss,
    token_weights,
)
from megatron_rl_patches.losses.objectives import finite

LENGTHS = [3, 0, 5, 1, 4]
MASKED = 3  # this response is masked wholly
LIMIT = 7
CONSTANT: dict[str, Any] = {"normalization": "constant", "constant_length": LIMIT}
LEVELS: Any = ("token", "sequence", "geometric", "group")
TIS = partial(PolicyOptions, tis_clip=1.2, tis_clip_low=0.9)
RECIPES = {
    "PPO": PolicyOptions(),
    "PPO, dual clip": PolicyOptions(dual_clip=1.2, clip_low=0.1),
    "PPO, entropy bonus": PolicyOptions(entropy_coef=0.1),
    "PPO, k1": PolicyOptions(kl_coef=0.3, kl_estimator="k1"),
    "PPO, k2": PolicyOptions(kl_coef=0.3, kl_estimator="k2"),
    "decoupled PPO": PolicyOptions(tis_clip=math.inf),
    **{f"TIS, {a}, {b}": TIS(tis_level=a, tis_mask_level=b) for a in LEVELS for b in (None, a)},
    "GRPO": PolicyOptions(normalization="sequence", kl_coef=0.04),
    "Dr. GRPO": PolicyOptions(**CONSTANT),
    "DAPO": PolicyOptions(clip_high=0.28),
    "GSPO": PolicyOptions(objective="gspo", clip_low=0.05, clip_high=0.08, normalization="sequence"),
    "CISPO": PolicyOptions(objective="cispo", clip_low=1.0, clip_high=0.3),
    "all at once": TIS("gspo", 0.1, 0.1, 1.1, 0.2, 0.5, tis_mask_level="token", **CONSTANT),  # in their order
}


def make(
    seed: int = 0, lengths: list[int] = LENGTHS, masked: int | None = MASKED
) -> tuple[list[torch.Tensor], list[torch.Tensor], PolicyBatch]:
    """Log-probs and entropies that require grad, and the batch."""
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float, around: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        noise = [scale * torch.randn(n, generator=generator, dtype=torch.float64) for n in lengths]
        return noise if around is None else [a.detach() + b for a, b in zip(around, noise, strict=True)]

    log_probs = [-1 - value.abs() for value in random(1.0)]
    masks = [torch.rand(n, generator=generator) < 0.8 for n in lengths]
    if masked is not None:
        masks[masked][:] = False
    advantages, (old, ref, rollout) = random(1.0), (random(0.3, log_probs) for _ in range(3))
    of_groups = group_log_probs(rollout, masks, torch.arange(len(lengths)) % 2)
    batch = PolicyBatch(advantages, masks, old, ref, rollout, list(of_groups))
    entropies = [value.abs() for value in random(1.0)]
    for value in [*log_probs, *entropies]:
        value.requires_grad_()
    return log_probs, entropies, batch


def importance_ratio(batch: PolicyBatch, level: str, i: int, t: int) -> float:
    """That of token t of response i; the even and the odd responses are the groups."""
    old, rollout, masks = batch.old_log_probs, batch.rollout_log_probs, batch.loss_masks
    if level == "token":
        return math.exp(old[i][t] - rollout[i][t])
    tokens = ([*map(torch.masked_select, one, masks)] for one in (masks, old, rollout))
    counts, p, q = (torch.stack([x.sum() for x in one]) for one in tokens)
    if level == "sequence":
        return (p - q)[i].exp().item()
    p, q = (p / counts).exp(), (q / counts).exp()
    group = q[i % 2 :: 2]
    expected = group.square().nansum() / group.nansum()  # 2508.17850, section 3.1
    return (p / (q if level == "geometric" else expected))[i].item()


def transcribed(
    log_probs: list[torch.Tensor], entropies: list[torch.Tensor], batch: PolicyBatch, options: PolicyOptions
) -> torch.Tensor:
    """The loss of the batch, formula by formula."""
    assert batch.old_log_probs is not None
    responses = []  # per response that has tokens, their losses
    for i, mask in enumerate(batch.loss_masks):
        kept = [t for t in range(len(mask)) if mask[t]]
        if not kept:
            continue
        log_ratio = sum(log_probs[i][t] - batch.old_log_probs[i][t] for t in kept) / len(kept)
        losses = []
        for t in kept:
            new, old, advantage = log_probs[i][t], batch.old_log_probs[i][t], batch.advantages[i][t]
            ratio = torch.exp(new - old)
            if options.objective == "gspo":  # 2507.18071, eq. 14
                ratio = torch.exp(log_ratio).detach() * torch.exp(new) / torch.exp(new).detach()
            clipped = min(max(ratio, 1 - options.clip_low), 1 + options.clip_high)
            if options.objective == "cispo":  # 2506.13585, eq. 4 and 5
                objective = torch.as_tensor(clipped, dtype=torch.float64).detach() * advantage * new
            else:  # 1707.06347, eq. 7
                objective = min(ratio * advantage, clipped * advantage)
            if options.dual_clip is not None and advantage < 0:  # 1912.09729
                objective = max(objective, options.dual_clip * advantage)
            if options.tis_clip is not None:
                low, high, level = options.tis_clip_low, options.tis_clip, options.tis_mask_level
                weight = truncated = importance_ratio(batch, options.tis_level, i, t)
                if level is not None:
                    weight *= low <= importance_ratio(batch, level, i, t) <= high
                objective = objective * (weight if level else min(max(truncated, low), high))
            loss = -objective - options.entropy_coef * entropies[i][t]
            if options.kl_coef:
                assert batch.ref_log_probs is not None
                ref = batch.ref_log_probs[i][t]
                k3 = torch.exp(ref) / torch.exp(new) - 1 - (ref - new)
                estimates = {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": k3}
                loss = loss + options.kl_coef * estimates[options.kl_estimator]
            losses.append(loss)
        responses.append(losses)
    if options.normalization == "token":
        return sum(map(sum, responses)) / sum(map(len, responses))
    if options.normalization == "sequence":
        return sum(sum(losses) / len(losses) for losses in responses) / len(responses)
    return sum(map(sum, responses)) / (len(responses) * LIMIT)


def gradients(loss: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_the_transcription(recipe: str, seed: int) -> None:
    options = RECIPES[recipe]
    log_probs, entropies, batch = make(seed)
    others = [values for name, values in vars(batch).items() if name != "loss_masks"]
    constants = [x.requires_grad_() for values in others for x in values]
    loss, count, _ = policy_loss(log_probs, batch, options, entropies)
    assert {*torch.autograd.grad(loss, constants, allow_unused=True)} == {None}
    for x in constants:
        x.requires_grad_(False)
    expected = transcribed(log_probs, entropies, batch, options)
    assert count.dtype == torch.int32  # Megatron adds it to one, in place
    torch.testing.assert_close(loss / count, expected, rtol=1e-12, atol=1e-14)
    inputs = [*log_probs, *entropies]
    torch.testing.assert_close(
        gradients(loss / count, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-14
    )


def test_first_update_is_the_policy_gradient() -> None:
    """Advantages per response are those of each of its tokens."""
    log_probs, _, batch = make()
    scalars = torch.randn(len(LENGTHS), generator=torch.Generator().manual_seed(1))
    spread = [value.expand(n) for value, n in zip(scalars, LENGTHS, strict=True)]
    expected = torch.cat([-a * m for a, m in zip(spread, batch.loss_masks, strict=True)])
    for advantages in (scalars, spread):
        first = replace(batch, advantages=advantages, old_log_probs=None)
        loss, count, metrics = policy_loss(log_probs, first, PolicyOptions())
        assert torch.equal(gradients(loss, log_probs), expected.double())
        assert metrics["ratio"].tolist() == [count, count]


def test_a_token_at_a_bound_has_its_gradient() -> None:
    """The bound belongs to what it bounds, whatever clamp() makes of it in this release of torch."""
    half = torch.tensor(0.5, dtype=torch.float64)
    at_its_bound = [  # log-ratio, advantage, options
        (0.0, 1.0, PolicyOptions(clip_high=0.0)),  # as in the first update
        (0.0, -1.0, PolicyOptions(clip_low=0.0)),
        (0.5, -1.0, PolicyOptions(dual_clip=half.exp().item())),
        (20.0, -1.0, PolicyOptions()),
        (-20.0, 1.0, PolicyOptions()),
    ]
    for log_ratio, advantage, options in at_its_bound:
        old = torch.tensor([-30.0], dtype=torch.float64)
        new = (old + log_ratio).requires_grad_()
        batch = PolicyBatch([torch.full_like(old, advantage)], [torch.ones(1)], [old])
        loss, _, metrics = policy_loss([new], batch, options)
        assert gradients(loss, [new]).item() == -advantage * math.exp(log_ratio), options
        assert not any(value[0] for name, value in metrics.items() if "fraction" in name), options


def part_of(batch: PolicyBatch, chosen: list[int]) -> PolicyBatch:
    return PolicyBatch(*([values[i] for i in chosen] for values in vars(batch).values()))


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.sampled_from([*RECIPES]), st.integers(0, 99))
@settings(max_examples=60)
def test_microbatches_add_up_to_the_whole_batch(owner: list[int], recipe: str, seed: int) -> None:
    options = RECIPES[recipe]
    log_probs, entropies, batch = make(seed)
    parts = [[i for i in range(5) if owner[i] == microbatch] for microbatch in sorted(set(owner))]
    results = [
        policy_loss([log_probs[i] for i in part], part_of(batch, part), options, [entropies[i] for i in part])
        for part in parts
    ]
    loss, count, metrics = policy_loss(log_probs, batch, options, entropies)
    assert sum(n for _, n, _ in results) == count

    # As Megatron does with calculate_per_token_loss, and as it does without.
    total = sum(part_loss for part_loss, _, _ in results)
    normalizer = mean_count(batch.loss_masks, len(parts), options.normalization)
    mean = sum(part_loss / normalizer for part_loss, _, _ in results) / len(parts)
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(mean, loss / count)
    torch.testing.assert_close(
        gradients(mean, [*log_probs, *entropies]), gradients(loss / count, [*log_probs, *entropies])
    )

    averages = average_metrics([part_metrics for _, _, part_metrics in results])
    assert averages == pytest.approx(average_metrics([metrics]), nan_ok=True)


def test_metrics_are_those_of_the_whole_batch() -> None:
    options = replace(RECIPES["all at once"], objective="ppo", normalization="token")
    log_probs, entropies, batch = make()
    loss, count, metrics = policy_loss(log_probs, batch, options, entropies)
    expected_loss = (loss / count).item()
    loss /= count  # in place, as the schedules do
    averages = average_metrics([metrics, metrics])

    mask = torch.cat(list(batch.loss_masks))
    new, old, rollout = (
        torch.cat(values)[mask].detach()
        for values in (log_probs, batch.old_log_probs, batch.rollout_log_probs)
    )
    advantages, ratio, tis = torch.cat(batch.advantages)[mask], (new - old).exp(), (old - rollout).exp()
    is_within = (tis >= 0.9) & (tis <= 1.2)
    outside = ((ratio > 1.1) & (advantages > 0)) | ((ratio < 0.9) & (advantages < 0))
    expected = {
        "loss": expected_loss,
        "approx_kl": (ratio - 1 - ratio.log()).mean().item(),
        "clip_fraction": outside.double().mean().item(),
        "dual_clip_fraction": ((ratio > 1.1) & (advantages < 0)).double().mean().item(),
        "entropy": torch.cat(entropies)[mask].mean().item(),
        "ratio": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "tis_weight": tis.mean().item(),
        "tis_weight_used": (tis * is_within).mean().item(),
        "tis_clip_fraction": 1 - is_within.double().mean().item(),
    }
    assert {name: averages[name] for name in expected} == pytest.approx(expected)
    assert averages["loss"] == pytest.approx(
        averages["pg_loss"] - 0.2 * averages["entropy"] + 0.5 * averages["kl_loss"]
    )
    assert all(pair.shape == (2,) and not pair.requires_grad for pair in metrics.values())
    # What the options leave out has none.
    _, _, metrics = policy_loss(log_probs, batch, PolicyOptions())
    assert sorted(metrics) == ["approx_kl", "clip_fraction", "loss", "pg_loss", "ratio", "ratio_max"]
    assert average_metrics([]) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_stands_under_the_mask_does_not_matter(recipe: str) -> None:
    log_probs, entropies, batch = make()

    def poisoned(values: Any, poison: float) -> list[torch.Tensor]:
        pairs = zip(values, batch.loss_masks, strict=True)
        return [value.detach().masked_fill(~mask, poison) for value, mask in pairs]

    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    poisons = zip(names, (math.nan, -math.inf, math.inf, math.nan), strict=True)
    bad = replace(batch, **{name: poisoned(getattr(batch, name), poison) for name, poison in poisons})
    bad_log_probs = [x.requires_grad_() for x in poisoned(log_probs, -math.inf)]
    bad_entropies = [x.requires_grad_() for x in poisoned(entropies, math.nan)]
    results = []
    for new, of_batch, bonus in ((log_probs, batch, entropies), (bad_log_probs, bad, bad_entropies)):
        loss, _, metrics = policy_loss(new, of_batch, RECIPES[recipe], bonus)
        results.append((loss, gradients(loss, [*new, *bonus]), *metrics.values()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("lengths", [[4], [0], [0, 0]], ids=str)
def test_nothing_to_learn_is_a_zero_that_is_part_of_the_graph(recipe: str, lengths: list[int]) -> None:
    log_probs, entropies, batch = make(lengths=lengths, masked=0)
    loss, count, metrics = policy_loss(log_probs, batch, RECIPES[recipe], entropies)
    assert (loss.item(), count.item()) == (0, 0)
    loss.backward()
    for value in log_probs:
        assert not value.grad.any()
    assert math.isnan(average_metrics([metrics])["loss"])
    assert average_metrics([metrics])["ratio_max"] == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("log_ratio", [1e4, -1e4, 100.0, -100.0])
def test_extreme_ratios_leave_finite_gradients(recipe: str, log_ratio: float) -> None:
    log_probs = [torch.tensor([-2.0, -1.0], requires_grad=True)]
    far, ones = [log_probs[0].detach() - log_ratio], [torch.ones(2)]
    batch = PolicyBatch([torch.tensor([1.0, -1.0])], ones, far, far, [log_probs[0].detach()], torch.ones(1))
    loss, _, _ = policy_loss(log_probs, batch, replace(RECIPES[recipe], tis_clip=2.0), ones)
    loss.backward()
    assert log_probs[0].grad.isfinite().all()


def test_counts() -> None:
    masks = [torch.tensor([1, 0, 1]), torch.zeros(0), torch.tensor([0.0]), torch.tensor([True, True])]
    for normalization, expected, count in (
        ("token", [1, 0, 1, 0, 1, 1], 4),
        ("sequence", [0.5, 0, 0.5, 0, 0.5, 0.5], 2),
        ("constant", [0.25, 0, 0.25, 0, 0.25, 0.25], 2),
    ):
        weights, counted = token_weights(masks, normalization, constant_length=4)
        assert (weights.tolist(), counted.item()) == (expected, count)
    assert mean_count(masks, 8, "token") == 0.5
    assert mean_count(masks[1:3], 8, "token") == 1


def test_group_advantages() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0, 2.0, 3.0, 7.0])
    groups = torch.tensor([7, -1, 7, -1, 7, 3])
    of_7 = [(reward - 3.0) / (2.0 + 1e-6) for reward in (1.0, 5.0, 3.0)]
    other = [(reward - 1.0) / (math.sqrt(2.0) + 1e-6) for reward in (0.0, 2.0)]
    expected = [of_7[0], other[0], of_7[1], other[1], of_7[2], 0.0]
    torch.testing.assert_close(group_advantages(rewards, groups), torch.tensor(expected))
    plain = group_advantages(rewards, groups, divide_by_std=False)
    assert plain.tolist() == [-2, -1, 2, 1, 0, 0]
    assert torch.equal(group_advantages(rewards.long(), groups, divide_by_std=False), plain)
    # Equal rewards have no advantage without eps, either.
    without = group_advantages(
        torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]), eps=0.0
    )
    assert not without[:3].any() and without[3] == -without[4]
    assert group_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)


# --- estimators of the KL divergence


def slope_of(log_ratio: torch.Tensor, estimator: Any) -> torch.Tensor:
    log_ratio = log_ratio.detach().requires_grad_()
    return torch.autograd.grad(estimate_kl(log_ratio, estimator).sum(), log_ratio)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_is_the_derivative_of_the_value(estimator: Any) -> None:
    for start, end in ((-25.0, -15.0), (-20.5, -19.5), (-1e3, -19.0), (-3.0, 3.0), (15.0, 1e3)):
        points = torch.linspace(start, end, 200_001, dtype=torch.float64)
        first, last = estimate_kl(points[[0, -1]], estimator)
        integral = torch.trapezoid(slope_of(points, estimator), points)
        torch.testing.assert_close(integral, last - first, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_k3_is_its_formula_up_to_20_nats_and_a_straight_line_beyond(dtype: torch.dtype) -> None:
    for log_ratio in (-19.5, -20.0, -2.0, 0.0, 2.0, 50.0):
        x = torch.tensor(log_ratio, dtype=dtype)
        expected = torch.tensor(log_ratio, dtype=torch.float64).neg().expm1() + log_ratio
        torch.testing.assert_close(estimate_kl(x, "k3"), expected.to(dtype))
        torch.testing.assert_close(slope_of(x, "k3"), -torch.tensor(-log_ratio).double().expm1().to(dtype))
    infinite = torch.tensor([-torch.inf, torch.inf])
    assert estimate_kl(infinite, "k3").tolist() == [torch.inf, torch.inf]
    assert slope_of(infinite, "k3")[0] < 0 < slope_of(infinite, "k3")[1]
    steepest = slope_of(torch.tensor(-20.0, dtype=dtype), "k3")
    assert slope_of(torch.tensor([-25.0, -1e4], dtype=dtype), "k3").tolist() == [steepest] * 2


# --- tokens that are kept from making gradients NaN; tests/frameworks/test_finite_loss.py has whole losses

INF, NAN = math.inf, math.nan


def test_kl_terms_that_overflow_are_bounded_with_their_importance_ratio() -> None:
    """A bounded token has no gradient, all others keep their bits."""
    log_probs_n = torch.tensor([-1.0, -60.0, -101.0, -60.0, -INF], requires_grad=True)
    base_n = torch.tensor([-1.2, -1.0, -1.0, -1.0, -1.0])
    ratio_n = torch.exp(log_probs_n - torch.tensor([-1.1, -60.0, -101.0, -130.0, -1.0]))
    bounded = finite.bounded_kl_arguments(log_probs_n, base_n, ratio_n)
    largest = torch.tensor(20.0).exp()
    for found, before, bounds in (
        (bounded[0], log_probs_n, [-20.0] * 3),
        (bounded[1], base_n, [0.0] * 3),
        (bounded[2], ratio_n, [1.0, largest, 0.0]),
    ):
        assert found is not None and torch.equal(found[:2], before[:2])
        assert torch.equal(found[2:], torch.tensor(bounds))
    [gradient_n] = torch.autograd.grad(sum(x.sum() for x in bounded if x is not None), log_probs_n)
    assert gradient_n.tolist()[2:] == [0.0] * 3 and gradient_n[:2].all()


def test_masked_tokens_that_are_not_comparable_are_constants() -> None:
    counted_n = torch.tensor([True, False, False, True])
    log_probs_n = torch.tensor([-3.0, -3.0, NAN, NAN], requires_grad=True)
    kept_n = finite.kept_near(log_probs_n, [torch.tensor([-1.0, -1.0, 0.5, -1.0])], counted_n)
    assert kept_n[:3].tolist() == [-3.0, -3.0, 0.5] and kept_n[3].isnan()
    (kept_n * NAN).sum().backward()  # as whatever follows may have it
    assert log_probs_n.grad.isnan().tolist() == [True, True, False, True]
    assert finite.kept_near(torch.tensor([-INF]), [], torch.tensor([False])).tolist() == [0.0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_counted_tokens_are_those_of_the_reduction_within_checkpoints(use_reentrant: bool) -> None:
    leaf_n, shares_n, found = torch.ones(3, requires_grad=True), torch.tensor([0.5, 0.0, 0.5]), []

    def loss(x_n: Tensor) -> Tensor:
        found.append(finite.counted_tokens(lambda x_n: (x_n * shares_n).sum(), 3, x_n.device))
        return (x_n.exp() * found[-1]).sum()

    checkpoint(loss, leaf_n, use_reentrant=use_reentrant).backward()
    assert [counted_n.tolist() for counted_n in found] == [[True, False, True]] * 2
    assert torch.equal(leaf_n.grad, leaf_n.detach().exp() * found[0])
    assert finite.counted_tokens(lambda x_n: 0, 0, torch.device("cpu")).shape == (0,)
