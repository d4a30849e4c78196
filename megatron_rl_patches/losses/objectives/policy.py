"""Policy losses over the responses of a microbatch: PPO, GRPO, Dr. GRPO, DAPO, GSPO and CISPO.

They differ in the ratio, the clipping, the KL penalty and the average, each of which is an option of
:class:`PolicyOptions`; ``docs/losses.md`` has a table. All but PPO use :func:`group_advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..vocab.arguments import check_floats, check_instance, check_one_device, is_number
from . import reduction
from .reduction import LossAndCount, Normalization

Objective = Literal["ppo", "gspo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]

# Log-ratios are clamped here: an infinite ratio would turn gradients of zero into NaN, and no useful ratio
# exceeds e^20.
_MAX_LOG_RATIO = 20.0


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
        kl_coef: weight of the KL divergence from the reference policy, as ``kl_estimator`` estimates it; see
            :func:`estimate_kl`.
        normalization: what the loss is an average over; ``"constant"`` divides by ``constant_length``; see
            :func:`token_weights`.
        tis_clip: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
            you off-policy RL training"): weight each token by ``min(p_old / p_rollout, tis_clip)``. ``inf``
            makes it decoupled PPO (2110.00641) with ``p_old`` as the proximal policy.
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

    def __post_init__(self) -> None:
        objectives, estimators = get_args(Objective), get_args(KlEstimator)
        numbers = ["clip_low", "clip_high", "entropy_coef", "kl_coef"]
        numbers += [name for name in ("dual_clip", "tis_clip") if getattr(self, name) is not None]
        for name in numbers:
            if not is_number(value := getattr(self, name)):
                raise InvalidInputError(f"{name} must be a number, not {value!r}")
            object.__setattr__(self, name, float(value))
        objective, estimator, dual, tis = self.objective, self.kl_estimator, self.dual_clip, self.tis_clip
        conditions = {
            f"objective must be one of {objectives}, not {objective!r}": objective in objectives,
            f"kl_estimator must be one of {estimators}, not {estimator!r}": estimator in estimators,
            f"clip_low must be in [0, 1], not {self.clip_low}": 0 <= self.clip_low <= 1,
            f"clip_high must be at least 0, not {self.clip_high}": self.clip_high >= 0,
            f"dual_clip must be greater than 1, not {dual}": dual is None or dual > 1,
            f"dual_clip bounds a clipped surrogate, which {objective!r} has not; leave it None": (
                dual is None or objective != "cispo"
            ),
            f"entropy_coef must be finite, not {self.entropy_coef}": math.isfinite(self.entropy_coef),
            f"kl_coef must be finite and at least 0, not {self.kl_coef}": 0 <= self.kl_coef < math.inf,
            f"tis_clip must be greater than 0, not {tis}": tis is None or tis > 0,
        }
        for requirement, holds in conditions.items():
            if not holds:
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
    """

    advantages: Sequence[Tensor]
    loss_masks: Sequence[Tensor]
    old_log_probs: Sequence[Tensor] | None = None
    ref_log_probs: Sequence[Tensor] | None = None
    rollout_log_probs: Sequence[Tensor] | None = None

    def __post_init__(self) -> None:
        lengths = list(map(len, reduction.check_masks(self.loss_masks)))
        reduction.check_responses("advantages", self.advantages, lengths, scalars=True)
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            if (values := getattr(self, name)) is not None:
                reduction.check_responses(name, values, lengths)

    @property
    def response_lengths(self) -> list[int]:
        """Number of tokens of each response, masked ones included."""
        return list(map(len, self.loss_masks))


def check_fit(batch: PolicyBatch, options: PolicyOptions) -> None:
    """Refuse what is no batch or no options, and options that need log-probs that the batch lacks."""
    check_instance("batch", batch, PolicyBatch)
    check_instance("options", options, PolicyOptions)
    if options.kl_coef and batch.ref_log_probs is None:
        raise InvalidInputError(f"kl_coef is {options.kl_coef}: ref_log_probs are needed, and missing")
    if options.tis_clip is not None and batch.rollout_log_probs is None:
        raise InvalidInputError(f"tis_clip is {options.tis_clip}: rollout_log_probs are needed, and missing")


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
        entropies: in nats, ``[response_length]`` each. ``entropy_coef`` needs them; without it they are only
            reported.

    Returns:
        ``(loss, num_tokens, metrics)``, as Megatron's schedules take it. ``loss`` is a scalar with gradient,
        ``num_tokens`` an int32 scalar that counts tokens or responses, depending on the normalization.
        ``metrics`` are detached ``[sum, count]`` pairs for :func:`average_metrics` and recent Megatron-LM:
        ``loss``, ``pg_loss`` and ``kl_loss`` in the normalization of the loss; averages over tokens of
        ``entropy``, ``clip_fraction``, ``dual_clip_fraction``, ``approx_kl`` (k3 of KL(old, new)), ``ratio``,
        ``tis_weight`` (before truncation) and ``tis_clip_fraction``; and the maximum ``ratio_max``. Those of
        terms that the options leave out are absent.

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
    others = {"loss_masks": batch.loss_masks, "advantages": batch.advantages, "entropies": entropies}
    firsts = {name: one[0] for name, one in others.items() if one is not None}
    check_one_device(log_probs=log_probs[0], **firsts)
    entropies_n = None if entropies is None else torch.cat(entropies)
    return loss_of_tokens(torch.cat(log_probs), batch, options, entropies_n)


def loss_of_tokens(
    log_probs_n: Tensor, batch: PolicyBatch, options: PolicyOptions, entropies_n: Tensor | None
) -> LossAndCount:
    """Return what :func:`policy_loss` does, without checks, from the tokens of all responses in a row."""
    weights_n, count = reduction.weights_and_count(
        batch.loss_masks, options.normalization, options.constant_length, log_probs_n.dtype
    )
    mask_n, lengths = weights_n > 0, batch.response_lengths

    def masked(values_n: Tensor) -> Tensor:
        # Masked before anything is computed, since nan times zero is nan, in backward too.
        return torch.where(mask_n, values_n, 0.0)

    def constant(values: Sequence[Tensor]) -> Tensor:
        return masked(torch.cat(list(values))).detach()

    log_probs_n = masked(log_probs_n)
    old_n = log_probs_n.detach() if batch.old_log_probs is None else constant(batch.old_log_probs)
    advantages_n = constant([a.expand(n) for a, n in zip(batch.advantages, lengths, strict=True)])
    log_ratio_n = log_probs_n - old_n
    per_token = {"approx_kl": estimate_kl(-log_ratio_n.detach(), "k3")}
    if options.objective == "gspo":
        # The mean of the response as value, and the token's own gradient.
        parts = zip(torch.split(log_ratio_n.detach(), lengths), torch.split(mask_n, lengths), strict=True)
        means = [(part.sum() / mask.sum().clamp(min=1)).expand(len(part)) for part, mask in parts]
        log_ratio_n = torch.cat(means) + (log_ratio_n - log_ratio_n.detach())
    ratio_n = per_token["ratio"] = _bounded(log_ratio_n, -_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()

    loss_n, clipped = _clipped_loss(ratio_n, log_probs_n, advantages_n, options)
    per_token |= clipped
    if options.tis_clip is not None and batch.rollout_log_probs is not None:
        tis_n = (old_n - constant(batch.rollout_log_probs)).clamp(max=_MAX_LOG_RATIO).exp()
        loss_n = loss_n * tis_n.clamp(max=options.tis_clip)
        per_token |= {"tis_weight": tis_n, "tis_clip_fraction": tis_n > options.tis_clip}
    in_loss = {"pg_loss": loss_n}
    if options.kl_coef and batch.ref_log_probs is not None:
        kl_n = estimate_kl(log_probs_n - constant(batch.ref_log_probs), options.kl_estimator)
        loss_n = loss_n + options.kl_coef * kl_n
        in_loss["kl_loss"] = kl_n
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
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    fractions = {"clip_fraction": is_clipped}
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        is_bounded = fractions["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = torch.where(is_bounded, bound, loss)
    return loss, fractions


def estimate_kl(log_ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(p, q) per token, in nats.

    The estimators are Schulman's (joschu.net/blog/kl-approx.html), with ``d = log p - log q``:

    ==========  ====================  ====================================================================
    ``"k1"``    ``d``                 unbiased; for monitoring, as its gradient is zero on average
    ``"k2"``    ``d**2 / 2``          biased; on average its gradient is that of the divergence
    ``"k3"``    ``exp(-d) - 1 + d``   unbiased and never negative; the penalty of GRPO, arXiv 2402.03300
    ==========  ====================  ====================================================================

    Below ``d = -20`` k3 goes on as its tangent, with the gradient ``1 - e**20``. So neither value nor
    gradient overflows (but in float16), and descent always moves p towards q, however far apart they are.

    ``log_ratio`` is ``d`` of tokens drawn from p; the estimates have its shape and floating dtype. Another
    estimator raises :class:`InvalidInputError`.
    """
    check_floats(log_ratio=log_ratio)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator != "k3":
        raise InvalidInputError(f"estimator is {estimator!r}; it must be one of {get_args(KlEstimator)}")
    bounded = _bounded(log_ratio, -_MAX_LOG_RATIO, math.inf)
    # relu() and not clamp(): at the bound itself the gradient must come from one of the two terms only.
    beyond = torch.relu(-_MAX_LOG_RATIO - log_ratio)
    return torch.expm1(-bounded) + bounded + math.expm1(_MAX_LOG_RATIO) * beyond


def _bounded(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp with a gradient of one at the bounds; that of ``clamp()`` is one or zero, by torch's release."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


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
    check_instance("rewards", rewards)
    check_instance("groups", groups)
    if rewards.dtype.is_complex or groups.dtype.is_complex:
        raise InvalidInputError(
            f"rewards are {rewards.dtype} and groups {groups.dtype}, expected real numbers and integers"
        )
    if not (is_number(eps) and 0 <= eps < math.inf):
        raise InvalidInputError(f"eps is {eps!r}, expected a number, not negative")
    check_one_device(rewards=rewards, groups=groups)
    if rewards.is_meta:
        raise InvalidInputError("rewards and groups are on the device meta, where they have no values")
    if groups.isnan().any():
        raise InvalidInputError("groups have NaN, expected an integer for each response")
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise InvalidInputError(
            f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [b], b responses"
        )
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    # In float64, so that equal rewards give zero, not a rounding error divided by eps.
    rewards = rewards.detach().double()
    advantages = torch.empty_like(rewards)
    for group in set(groups.tolist()):
        members = groups == group
        in_group = rewards[members]
        divisor = float(in_group.std()) + float(eps) if divide_by_std and len(in_group) > 1 else 1.0
        advantages[members] = (in_group - in_group.mean()) / (divisor or 1.0)
    return advantages.to(dtype)
