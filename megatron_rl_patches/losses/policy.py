"""Policy losses over the responses of a microbatch.

One function, :func:`policy_loss`, for the family that goes back to PPO; its members differ in four places,
each an option of :class:`PolicyOptions`. With ``advantages`` from :func:`group_advantages` for all but PPO::

    PPO       PolicyOptions()
    GRPO      PolicyOptions(normalization="sequence", kl_coef=0.04)
    Dr. GRPO  PolicyOptions(normalization="constant", constant_length=...)  # and divide_by_std=False
    DAPO      PolicyOptions(clip_high=0.28)
    GSPO      PolicyOptions(objective="gspo", clip_low=3e-4, clip_high=4e-4, normalization="sequence")
    CISPO     PolicyOptions(objective="cispo", clip_low=1.0, clip_high=...)  # no lower bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..errors import InvalidInputError
from .metrics import maximum, sums_and_counts
from .normalization import Normalization, check, token_weights

Objective = Literal["ppo", "gspo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]

# Beyond e^20 a ratio is clipped or nonsense; but the infinity it would become turns zero gradients into NaN.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyOptions:
    """Which policy loss. With ``r`` the ratio of new to old probability of a token and ``A`` its advantage:

    Attributes:
        objective: ``"ppo"``: ``-min(r A, clip(r) A)`` (arXiv 1707.06347, eq. 7). ``"gspo"``: the same, with
            the ratio of a response's sequence likelihoods, ``exp`` of the mean log-ratio of its tokens, in
            place of each token's (2507.18071, eq. 14; for one advantage per response that is eq. 5).
            ``"cispo"``: ``-sg(clip(r)) A log p`` (2506.13585, eq. 4): clipped tokens keep their gradient.
        clip_low: ``clip(r)`` is at least ``1 - clip_low``.
        clip_high: ``clip(r)`` is at most ``1 + clip_high``.
        dual_clip: for ``A < 0``, bound the loss by ``-dual_clip A`` (1912.09729); greater than 1.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the divergence from the reference policy.
        kl_estimator: Schulman's estimators (joschu.net/blog/kl-approx.html) of KL(new, reference) from
            ``d = log p - log p_ref``: ``"k1"``: ``d`` (as a loss its mean gradient is zero: for monitoring),
            ``"k2"``: ``d²/2``, ``"k3"``: ``exp(-d) - 1 + d``, as in GRPO.
        normalization: what the loss is an average over; see :func:`token_weights`.
        constant_length: the divisor of ``"constant"``.
        tis_clip: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
            you off-policy RL training"): weight each token by ``min(p_old / p_rollout, tis_clip)``, where the
            rollout engine's probabilities differ from the trainer's. With ``inf`` it is decoupled PPO
            (2110.00641): ``p_old`` the proximal policy, ``p_rollout`` the behaviour policy.

    Raises:
        InvalidInputError: a value is out of its range, or two do not fit together.
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
        conditions = {
            f"objective must be one of {objectives}, not {self.objective!r}": self.objective in objectives,
            f"kl_estimator must be one of {estimators}, not {self.kl_estimator!r}": (
                self.kl_estimator in estimators
            ),
            f"clip_low must be in [0, 1], not {self.clip_low}": 0 <= self.clip_low <= 1,
            f"clip_high must be at least 0, not {self.clip_high}": self.clip_high >= 0,
            f"dual_clip must be greater than 1, not {self.dual_clip}": (
                self.dual_clip is None or self.dual_clip > 1
            ),
            f"dual_clip bounds a clipped surrogate, which {self.objective!r} has not; leave it None": (
                self.dual_clip is None or self.objective != "cispo"
            ),
            f"entropy_coef must be finite, not {self.entropy_coef}": math.isfinite(self.entropy_coef),
            f"kl_coef must be finite and at least 0, not {self.kl_coef}": 0 <= self.kl_coef < math.inf,
            f"tis_clip must be greater than 0, not {self.tis_clip}": (
                self.tis_clip is None or self.tis_clip > 0
            ),
        }
        for requirement, holds in conditions.items():
            if not holds:
                raise InvalidInputError(requirement)
        check(self.normalization, self.constant_length)


@dataclass(frozen=True, eq=False)
class PolicyBatch:
    """What a policy loss needs to know of the responses of a microbatch besides the logits.

    Each a sequence with one float tensor per response, ``[response_length]``; under context parallelism the
    full response, on every rank. None of them receives a gradient.

    Attributes:
        advantages: per token, or a scalar tensor for the whole response (as rows of ``[b]``).
        loss_masks: zero for tokens that do not count, such as those of tools; their other values, ``nan``
            included, are never looked at.
        old_log_probs: of the policy before this step's updates, as the trainer computes them; ``None``: this
            is the first update, the policy is its own old one.
        ref_log_probs: of the reference policy; for ``kl_coef``.
        rollout_log_probs: as the rollout engine reported them; for ``tis_clip``.

    Raises:
        InvalidInputError: the numbers of responses, or their lengths, differ.
    """

    advantages: Sequence[torch.Tensor]
    loss_masks: Sequence[torch.Tensor]
    old_log_probs: Sequence[torch.Tensor] | None = None
    ref_log_probs: Sequence[torch.Tensor] | None = None
    rollout_log_probs: Sequence[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.loss_masks) == 0:
            raise InvalidInputError("a microbatch without responses has no loss; give one wholly masked")
        lengths = self.response_lengths
        check_lengths("loss_masks", self.loss_masks, lengths)
        check_lengths("advantages", self.advantages, lengths, scalars=True)
        for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs"):
            check_lengths(name, getattr(self, name), lengths)

    @property
    def response_lengths(self) -> list[int]:
        return [len(mask) for mask in self.loss_masks]

    def check_for(self, options: PolicyOptions) -> None:
        """Raise :class:`InvalidInputError` unless everything is there that these options need."""
        if options.kl_coef and self.ref_log_probs is None:
            raise InvalidInputError(f"kl_coef is {options.kl_coef}: ref_log_probs are needed, and missing")
        if options.tis_clip is not None and self.rollout_log_probs is None:
            raise InvalidInputError(
                f"tis_clip is {options.tis_clip}: rollout_log_probs are needed, and missing"
            )


def policy_loss(
    log_probs: Sequence[torch.Tensor],
    batch: PolicyBatch,
    options: PolicyOptions,
    entropies: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a microbatch as a sum, the count to divide it by, and metrics.

    The sum over microbatches and ranks divided by the count over microbatches and ranks is the loss of the
    whole batch, for every normalization; Megatron divides so with ``config.calculate_per_token_loss``.

    Args:
        log_probs: of the policy in training, ``[response_length]`` per response, float32 or float64.
        batch: the rest, of the same responses.
        options: which loss.
        entropies: likewise; needed when ``entropy_coef`` is not zero, otherwise for the metrics only.

    Returns:
        ``(loss, num_tokens, metrics)``, as Megatron's schedules take it: a scalar with gradient; an int32
        scalar, of tokens or of responses as the normalization counts; and detached ``[sum, count]`` pairs of
        shape ``[2]``, for :func:`average_metrics`; recent Megatron-LM averages such pairs too.

        Metrics: ``loss``, ``pg_loss`` and ``kl_loss`` in the loss' own normalization; per token ``entropy``,
        ``clip_fraction``, ``dual_clip_fraction``, ``approx_kl`` (k3 of KL(old, new)), ``ratio``,
        ``tis_weight`` (before truncation), ``tis_clip_fraction``; ``ratio_max`` with count 1. Those of terms
        that the options leave out are absent.

    Raises:
        InvalidInputError: lengths differ, or something that the options need is missing.
    """
    batch.check_for(options)
    lengths = batch.response_lengths
    check_lengths("log_probs", log_probs, lengths)
    check_lengths("entropies", entropies, lengths)
    if options.entropy_coef and entropies is None:
        raise InvalidInputError(f"entropy_coef is {options.entropy_coef}: entropies are needed, and missing")

    dtype = log_probs[0].dtype
    if dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(f"log_probs are {dtype}; give float32 or float64, in which they are computed")
    weights_n, count = token_weights(batch.loss_masks, options.normalization, options.constant_length, dtype)
    mask_n = weights_n > 0

    def kept(values: Sequence[torch.Tensor]) -> torch.Tensor:
        # Before anything is computed: nan times zero is nan, also in backward.
        return torch.where(mask_n, torch.cat(list(values)), 0.0)

    def given(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return kept(values).detach()

    log_probs_n = kept(log_probs)
    old_n = given(log_probs if batch.old_log_probs is None else batch.old_log_probs)
    advantages_n = given([a.expand(n) for a, n in zip(batch.advantages, lengths, strict=True)])
    log_ratio_n = log_probs_n - old_n
    per_token = {"approx_kl": estimate_kl(-log_ratio_n, "k3")}
    if options.objective == "gspo":
        log_ratio_n = _sequence_log_ratio(log_ratio_n, mask_n, lengths)
    ratio_n = per_token["ratio"] = log_ratio_n.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()

    if options.objective == "cispo":
        loss_n, clipped = _cispo(ratio_n, log_probs_n, advantages_n, options)
    else:
        loss_n, clipped = _clipped_surrogate(ratio_n, advantages_n, options)
    per_token |= clipped
    if options.tis_clip is not None and batch.rollout_log_probs is not None:
        tis_n = (old_n - given(batch.rollout_log_probs)).clamp(max=_MAX_LOG_RATIO).exp()
        loss_n = loss_n * tis_n.clamp(max=options.tis_clip)
        per_token |= {"tis_weight": tis_n, "tis_clip_fraction": tis_n > options.tis_clip}
    in_loss = {"pg_loss": loss_n}
    if options.kl_coef and batch.ref_log_probs is not None:
        kl_n = estimate_kl(log_probs_n - given(batch.ref_log_probs), options.kl_estimator)
        loss_n = loss_n + options.kl_coef * kl_n
        in_loss["kl_loss"] = kl_n
    if entropies is not None:
        per_token["entropy"] = kept(entropies)
        if options.entropy_coef:
            loss_n = loss_n - options.entropy_coef * per_token["entropy"]

    metrics = sums_and_counts({"loss": loss_n, **in_loss}, weights_n, count)
    metrics |= sums_and_counts(per_token, mask_n.to(dtype), mask_n.sum())
    metrics["ratio_max"] = maximum(ratio_n, mask_n)
    return (weights_n * loss_n).sum(), count, metrics


def _sequence_log_ratio(log_ratio_n: torch.Tensor, mask_n: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The value of the sequence's mean log-ratio with the gradient of the token's, for each token."""
    parts = zip(torch.split(log_ratio_n.detach(), lengths), torch.split(mask_n, lengths), strict=True)
    means = [(part.sum() / mask.sum().clamp(min=1)).expand(len(part)) for part, mask in parts]
    return torch.cat(means) + (log_ratio_n - log_ratio_n.detach())


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, options: PolicyOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    fractions = {"clip_fraction": clipped > plain}
    if options.dual_clip is not None:
        bound = -options.dual_clip * advantages
        fractions["dual_clip_fraction"] = (advantages < 0) & (loss > bound)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, fractions


def _cispo(
    ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, options: PolicyOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weight = ratio.detach().clamp(1 - options.clip_low, 1 + options.clip_high)
    return -weight * advantages * log_probs, {"clip_fraction": weight != ratio}


def estimate_kl(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimate of KL(p, q) from ``log p - log q`` of tokens drawn from p; see ``kl_estimator``."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator != "k3":
        raise InvalidInputError(f"estimator is {estimator!r}; it must be one of {get_args(KlEstimator)}")
    return torch.expm1(-log_ratio.clamp(min=-_MAX_LOG_RATIO)) + log_ratio


def check_lengths(
    name: str, values: Sequence[torch.Tensor] | None, lengths: Sequence[int], *, scalars: bool = False
) -> None:
    """Raise :class:`InvalidInputError` unless ``values`` is missing or holds ``[length]`` per response.

    With ``scalars``, ``[]`` will do for any of them.
    """
    if values is None:
        return
    shapes = [tuple(value.shape) for value in values]
    fits = len(shapes) == len(lengths) and all(
        shape == (length,) or (scalars and shape == ()) for shape, length in zip(shapes, lengths, strict=True)
    )
    if not fits:
        raise InvalidInputError(
            f"{name} have the shapes {shapes}; the loss masks are of responses of the lengths {list(lengths)}"
        )
