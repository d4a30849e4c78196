"""Policy losses over the responses of a microbatch: PPO, GRPO, Dr. GRPO, DAPO, GSPO and CISPO.

They differ in the ratio, the clipping, the KL penalty and the average, each of which is an option of
:class:`PolicyOptions`; ``docs/losses.md`` has a table. All but PPO use :func:`group_advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..vocab.arguments import check_instance, check_one_device, is_number
from . import reduction
from .finite import BOUND, KlEstimator, clamped, estimate_kl
from .reduction import LossAndCount, Normalization

Objective = Literal["ppo", "gspo", "cispo"]
TisLevel = Literal["token", "sequence", "geometric", "group"]


@dataclass(frozen=True)
class PolicyOptions:
    """Options of :func:`policy_loss`.

    ``r`` is the ratio of a token's new probability to its old one, ``A`` is the token's advantage.

    Attributes:
        objective: ``"ppo"``: ``-min(r A, clip(r) A)`` (arXiv 1707.06347, eq. 7). ``"gspo"``: the same, with
            ``exp`` of a response's mean log-ratio in place of each token's ratio (2507.18071, eq. 14; for one
            advantage per response eq. 5). ``"cispo"``: ``-sg(clip(r)) A log p`` (2506.13585, eq. 4), so that
            clipped tokens keep their gradient.
        clip_low: ``clip(r)`` is at least ``1 - clip_low``.
        clip_high: ``clip(r)`` is at most ``1 + clip_high``.
        dual_clip: for ``A < 0``, bound the loss by ``-dual_clip A`` (1912.09729); greater than 1.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the KL divergence from the reference policy.
        kl_estimator: how it is estimated, see :func:`estimate_kl`.
        normalization: what the loss is an average over; ``"constant"`` divides by ``constant_length``; see
            :func:`token_weights`.
        tis_clip: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
            you off-policy RL training"): weight each token by ``min(p_old / p_rollout, tis_clip)``; ``inf``
            makes it decoupled PPO (2110.00641) with ``p_old`` as the proximal policy.
        tis_clip_low: the lower bound of ratios, as slime's ``--tis-clip-low``.
        tis_level: ``"token"``: each token has its own ratio. ``"sequence"``: all tokens of a response have
            the product of their ratios (verl, TRL). ``"geometric"``: their geometric mean (NeMo-RL#2269).
            ``"group"``: that mean of ``p_old``, divided by ``exp(group_log_probs)`` (GEPO, 2508.17850).
        tis_mask_level: tokens whose ratio of this level is below ``tis_clip_low`` or above ``tis_clip`` have
            the weight 0, and others that of ``tis_level``: ``"token"`` is IcePop (Ring-1T, 2510.18855),
            ``"geometric"`` seq-mask-tis (NeMo-RL#1899). As there, such tokens stay in the count, with KL
            penalty and entropy bonus. ``None``: weights are truncated.
    """

    objective: Objective = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    normalization: Normalization = "token"
    constant_length: int | None = None
    tis_clip: float | None = None
    tis_clip_low: float = 0.0
    tis_level: TisLevel = "token"
    tis_mask_level: TisLevel | None = None

    def __post_init__(self) -> None:
        levels = get_args(TisLevel)
        choices = {"objective": get_args(Objective), "kl_estimator": get_args(KlEstimator)}
        for name, known in {**choices, "tis_level": levels, "tis_mask_level": (None, *levels)}.items():
            if (choice := getattr(self, name)) not in known:
                raise InvalidInputError(f"{name} must be one of {known}, not {choice!r}")
        numbers = ["clip_low", "clip_high", "entropy_coef", "kl_coef", "tis_clip_low"]
        numbers += [name for name in ("dual_clip", "tis_clip") if getattr(self, name) is not None]
        for name in numbers:
            if not is_number(value := getattr(self, name)):
                raise InvalidInputError(f"{name} must be a number, not {value!r}")
            object.__setattr__(self, name, float(value))
        objective, dual, tis, low = self.objective, self.dual_clip, self.tis_clip, self.tis_clip_low
        fits = tis is not None or (low, self.tis_level, self.tis_mask_level) == (0.0, "token", None)
        conditions = {
            f"clip_low must be in [0, 1], not {self.clip_low}": 0 <= self.clip_low <= 1,
            f"clip_high must be at least 0, not {self.clip_high}": self.clip_high >= 0,
            f"dual_clip must be greater than 1, not {dual}": dual is None or dual > 1,
            "dual_clip bounds no loss of 'cispo': leave it None": dual is None or objective != "cispo",
            f"entropy_coef must be finite, not {self.entropy_coef}": math.isfinite(self.entropy_coef),
            f"kl_coef must be finite and at least 0, not {self.kl_coef}": 0 <= self.kl_coef < math.inf,
            f"tis_clip must be greater than 0, not {tis}": tis is None or tis > 0,
            "tis_clip_low, tis_level and tis_mask_level need tis_clip, which is None": fits,
            f"tis_clip_low must be from 0 to tis_clip, not {low}": 0 <= low <= (tis or 0) and low < math.inf,
        }
        for requirement in (text for text, holds in conditions.items() if not holds):
            raise InvalidInputError(requirement)
        reduction.check_normalization(self.normalization, self.constant_length)


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """The data of a policy loss, besides the logits, for the responses of one microbatch.

    Each attribute has one float tensor ``[response_length]`` per response; other shapes raise
    :class:`InvalidInputError`. Under context parallelism every rank has the full responses. No gradient flows
    into these tensors.

    Attributes:
        advantages: advantage of each token, or a scalar tensor for the whole response.
        loss_masks: zero for tokens without loss, such as the output of tools. The other tensors are ignored
            at these tokens and may hold ``nan`` there.
        old_log_probs: those of the trainer's policy before this step's updates; ``None`` in the first one.
        ref_log_probs: those of the reference policy; ``kl_coef`` needs them.
        rollout_log_probs: those that the rollout engine reported; ``tis_clip`` needs them.
        group_log_probs: scalar tensors, from :func:`group_log_probs`; the level ``"group"`` needs them.
    """

    advantages: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    old_log_probs: Sequence[Tensor] | None = None
    ref_log_probs: Sequence[Tensor] | None = None
    rollout_log_probs: Sequence[Tensor] | None = None
    group_log_probs: Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        lengths = list(map(len, reduction.check_masks(self.loss_masks)))
        reduction.check_responses("advantages", self.advantages, lengths, scalars=True)
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "group_log_probs"):
            if (values := getattr(self, name)) is not None:
                reduction.check_responses(name, values, lengths, scalars=name == "group_log_probs")
                if name == "group_log_probs" and any(map(Tensor.dim, values)):
                    raise InvalidInputError(f"{name} have a number per token, expected one per response, []")

    @property
    def response_lengths(self) -> list[int]:
        """Number of tokens of each response, masked ones included."""
        return list(map(len, self.loss_masks))


def check_fit(batch: PolicyBatch, options: PolicyOptions) -> None:
    """Refuse what is no batch or no options, and options that need log-probs that the batch lacks."""
    check_instance("batch", batch, PolicyBatch)
    check_instance("options", options, PolicyOptions)
    levels = {} if options.tis_clip is None else {options.tis_level, options.tis_mask_level} - {None}
    needed = {
        "ref_log_probs": f"kl_coef is {options.kl_coef}" if options.kl_coef else "",
        "rollout_log_probs": f"tis_clip is {options.tis_clip}" if levels and levels != {"group"} else "",
        "group_log_probs": "an importance ratio is that of the group" if "group" in levels else "",
    }
    for name, reason in needed.items():
        if reason and getattr(batch, name) is None:
            raise InvalidInputError(f"{reason}: {name} are needed, and missing")


def policy_loss(
    log_probs: Sequence[Tensor],
    batch: PolicyBatch,
    options: PolicyOptions,
    entropies: Sequence[Tensor] | None = None,
) -> LossAndCount:
    """Return the loss of a microbatch as a sum, the count to divide it by, and metrics.

    The sum over all microbatches and ranks divided by the count over them is the loss of the whole batch, for
    every normalization; Megatron divides so if ``config.calculate_per_token_loss`` is on. No collective runs.

    Args:
        log_probs: log-probs under the policy in training, float32 or float64 ``[response_length]`` each.
        batch: advantages, masks and other log-probs of the same responses.
        options: which loss to compute.
        entropies: in nats, ``[response_length]`` each; without ``entropy_coef`` they are only reported.

    Returns:
        ``(loss, num_tokens, metrics)``, as Megatron's schedules take it. ``loss`` is a scalar with gradient,
        ``num_tokens`` an int32 scalar that counts tokens or responses, depending on the normalization.
        ``metrics`` are detached ``[sum, count]`` pairs for :func:`average_metrics` and recent Megatron-LM:
        ``loss``, ``pg_loss`` and ``kl_loss`` in the normalization of the loss; averages over tokens of
        ``entropy``, ``clip_fraction``, ``dual_clip_fraction``, ``approx_kl`` (k3 of KL(old, new)), ``ratio``,
        ``tis_weight`` (before the bounds), ``tis_weight_used``, ``tis_clip_fraction`` (share truncated or
        masked); and the maximum ``ratio_max``. Those of terms that the options leave out are absent.

    Raises:
        InvalidInputError: shapes or dtype do not fit, or the options need something that is missing.
    """
    check_fit(batch, options)
    lengths = batch.response_lengths
    log_probs = reduction.check_responses("log_probs", log_probs, lengths)
    if entropies is not None:
        entropies = reduction.check_responses("entropies", entropies, lengths)
    elif options.entropy_coef:
        raise InvalidInputError(f"entropy_coef is {options.entropy_coef}: entropies are needed, and missing")
    if (dtype := log_probs[0].dtype) not in (torch.float32, torch.float64):
        raise InvalidInputError(f"log_probs are {dtype}; pass float32 or float64, in which they are computed")
    others = {"loss_masks": batch.loss_masks[0], "advantages": batch.advantages[0]}
    check_one_device(entropies=(entropies or log_probs)[0], log_probs=log_probs[0], **others)
    entropies_n = None if entropies is None else torch.cat(entropies)
    return loss_of_tokens(torch.cat(log_probs), batch, options, entropies_n)


def loss_of_tokens(
    log_probs_n: Tensor, batch: PolicyBatch, options: PolicyOptions, entropies_n: Tensor | None
) -> LossAndCount:
    """Return what :func:`policy_loss` does, without checks, from the tokens of all responses in a row."""
    average = options.normalization, options.constant_length
    weights_n, count = reduction.weights_and_count(batch.loss_masks, *average, log_probs_n.dtype)
    mask_n, lengths = weights_n > 0, batch.response_lengths

    def masked(values_n: Tensor) -> Tensor:
        # Masked before anything is computed, since nan times zero is nan, in backward too.
        return torch.where(mask_n, values_n, 0.0)

    def constant(values: Sequence[Tensor]) -> Tensor:
        return masked(torch.cat([x.expand(n) for x, n in zip(values, lengths, strict=True)])).detach()

    log_probs_n = masked(log_probs_n)
    old_n = log_probs_n.detach() if batch.old_log_probs is None else constant(batch.old_log_probs)
    log_ratio_n = log_probs_n - old_n
    per_token = {"approx_kl": estimate_kl(-log_ratio_n.detach(), "k3")}
    if options.objective == "gspo":
        # The mean of the response as value, and the token's own gradient.
        mean_n = reduction.by_response(log_ratio_n.detach(), mask_n, lengths)
        log_ratio_n = mean_n + (log_ratio_n - log_ratio_n.detach())
    # An infinite ratio would turn gradients of zero into NaN.
    ratio_n = per_token["ratio"] = clamped(log_ratio_n, -BOUND, BOUND).exp()

    def importance_ratio(level: str) -> Tensor:
        sampled = "group_log_probs" if level == "group" else "rollout_log_probs"
        log_ratio_n = old_n - constant(getattr(batch, sampled))
        if level != "token":
            log_ratio_n = reduction.by_response(log_ratio_n, mask_n, lengths, mean=level != "sequence")
        return log_ratio_n.clamp(max=BOUND).exp()

    loss_n, clipped = _clipped_loss(ratio_n, log_probs_n, constant(batch.advantages), options)
    per_token |= clipped
    if options.tis_clip is not None:
        per_token |= _importance_weights(importance_ratio, options)
        loss_n = loss_n * per_token["tis_weight_used"]
    in_loss = {"pg_loss": loss_n}
    if options.kl_coef and batch.ref_log_probs is not None:
        kl_n = estimate_kl(log_probs_n - constant(batch.ref_log_probs), options.kl_estimator)
        in_loss["kl_loss"], loss_n = kl_n, loss_n + options.kl_coef * kl_n
    if entropies_n is not None:
        per_token["entropy"] = masked(entropies_n)
        if options.entropy_coef:
            loss_n = loss_n - options.entropy_coef * per_token["entropy"]

    metrics = reduction.metrics_of({"loss": loss_n, **in_loss}, per_token, weights_n, count)
    greatest = torch.nn.functional.pad(ratio_n.detach() * mask_n, (0, 1)).max()
    metrics["ratio_max"] = torch.stack([greatest, torch.ones_like(greatest)])
    return (weights_n * loss_n).sum(), count, metrics


def _clipped_loss(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, options: PolicyOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and what was clipped."""
    clipped_ratio = ratio.detach().clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.objective == "cispo":
        return -clipped_ratio * advantages * log_probs, {"clip_fraction": clipped_ratio != ratio}
    unclipped, clipped = -ratio * advantages, -clipped_ratio * advantages
    # where() and not maximum(): at the bound, where the two are equal, the gradient is that of the ratio.
    fractions = {"clip_fraction": clipped > unclipped}
    loss = torch.where(fractions["clip_fraction"], clipped, unclipped)
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        is_bounded = fractions["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
    return loss, fractions


def _importance_weights(ratio: Callable[[str], Tensor], options: PolicyOptions) -> dict[str, Tensor]:
    """Return weights ``[n]`` before and after the bounds, and where these bind; ``ratio`` is of a level."""
    low, high, mask_level = options.tis_clip_low, options.tis_clip or math.inf, options.tis_mask_level
    ratio_n = ratio(options.tis_level)
    bounded_n = ratio_n if mask_level in (None, options.tis_level) else ratio(mask_level)
    outside_n = (bounded_n < low) | (bounded_n > high)
    used_n = ratio_n.clamp(low, high) if mask_level is None else ratio_n.masked_fill(outside_n, 0.0)
    return {"tis_weight": ratio_n, "tis_weight_used": used_n, "tis_clip_fraction": outside_n}


def group_advantages(
    rewards: torch.Tensor, groups: torch.Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """Return the advantage of each response over the other responses to the same prompt, without gradient.

    It is ``(reward - mean) / (std + eps)`` over the group of responses, as in GRPO (arXiv 2402.03300, section
    4.1.2), with the standard deviation of a sample (n - 1), as in verl and TRL. It is zero in a group of one
    response, or of equal rewards. No collective runs: this rank must have all responses of a group.

    Args:
        rewards: reward of each response, ``[b]``; another shape raises :class:`InvalidInputError`. The result
            has their dtype, or float32 for integers.
        groups: an integer for each response, ``[b]``, the same for responses to the same prompt.
        divide_by_std: ``False`` gives the advantages of Dr. GRPO (arXiv 2503.20783), which does not divide,
            since that favors prompts that are almost always or almost never solved.
    """
    if not (is_number(eps) and 0 <= eps < math.inf):
        raise InvalidInputError(f"eps is {eps!r}, expected a number, not negative")
    check_instance("rewards", rewards)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    advantages = torch.empty_like(rewards, dtype=torch.float64)
    # In float64, so that equal rewards give zero, not a rounding error divided by eps.
    for members, in_group in _each_group("rewards", rewards, groups):
        divisor = float(in_group.std()) + float(eps) if divide_by_std and len(in_group) > 1 else 1.0
        advantages[members] = (in_group - in_group.mean()) / (divisor or 1.0)
    return advantages.to(dtype)


def group_log_probs(
    rollout_log_probs: Sequence[Tensor], loss_masks: Sequence[Tensor], groups: Tensor
) -> Tensor:
    """Return the log-probability that the rollout engine expects of a response to the same prompt, ``[b]``.

    With ``q`` the geometric mean of the probabilities of a response's tokens, it is ``log(sum q^2 / sum q)``
    over the responses of the group (GEPO, arXiv 2508.17850, section 3.1; NaN if all of them are masked). Like
    advantages, compute it before the responses of a prompt are spread over microbatches and ranks.

    Args:
        rollout_log_probs: those that the engine reported, ``[response_length]`` for each response.
        loss_masks: one mask ``[response_length]`` per response, zero for tokens that do not count.
        groups: as for :func:`group_advantages`, with the same errors.
    """
    lengths = list(map(len, masks := reduction.check_masks(loss_masks)))
    values = reduction.check_responses("rollout_log_probs", rollout_log_probs, lengths)
    check_one_device(rollout_log_probs=values[0], loss_masks=masks[0])
    tokens_b = torch.stack([(mask != 0).sum() for mask in masks])
    pairs = zip(values, masks, strict=True)
    totals = [torch.where(mask != 0, value.detach().double(), 0.0).sum() for value, mask in pairs]
    expected = (torch.stack(totals) / tokens_b).masked_fill(tokens_b == 0, -math.inf)
    for members, log_q in _each_group("rollout_log_probs", expected.clone(), groups):
        expected[members] = (2 * log_q).logsumexp(0) - log_q.logsumexp(0)
    return expected.to(torch.promote_types(values[0].dtype, torch.float32))


def _each_group(name: str, values: Tensor, groups: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a mask ``[b]`` and the values in float64 for each group; refuse what is no value or no group."""
    check_instance("groups", groups)
    check_one_device(**{name: values, "groups": groups})
    fits = values.ndim == 1 and values.shape == groups.shape and not values.is_meta
    if not fits or values.dtype.is_complex or groups.dtype.is_complex:
        kinds = [f"{x.dtype} {list(x.shape)}" for x in (values, groups)]
        expected = "expected real numbers and integers, both [b] for b responses, not on the device meta"
        raise InvalidInputError(f"{name} are {kinds[0]} and groups {kinds[1]}: {expected}")
    if groups.is_floating_point() and not (groups % 1 == 0).all():
        raise InvalidInputError(f"groups are {groups.tolist()}; expected an integer for each response")
    for group in set(groups.tolist()):
        members = groups == group
        yield members, values.detach()[members].double()
