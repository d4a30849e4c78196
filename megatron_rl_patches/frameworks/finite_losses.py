"""Losses of slime, vime, OpenClaw-RL and miles in which a masked or overflowing token does not poison others.

The tensors are changed in :mod:`..losses.objectives.finite`; here stands in which order they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.scopes import Scope
from ..engine.call import Call
from ..losses.objectives import finite

#: Log-probs of the batch whose ratios the policy loss exponentiates; releases and options leave some out.
_LOG_PROBS = ("log_probs", "rollout_log_probs", "ref_log_probs")


@dataclass(frozen=True)
class _PolicyLoss:
    """What is known while ``policy_loss_function`` runs."""

    args: Any  # of the framework
    log_probs: Mapping[str, Tensor]  # [n] by name, in which masked tokens do not overflow
    counted_n: Tensor  # which tokens of this rank the loss counts


_policy_loss: Scope[_PolicyLoss] = Scope("policy_loss")


def policy_loss_function(call: Call) -> Any:
    """Run the policy loss on a batch in which masked tokens do not overflow."""
    batch, counted_n = _without_overflow(call, "advantages", "opd_reverse_kl")
    joined = {name: _joined(batch, name, len(counted_n)) for name in _LOG_PROBS}
    log_probs = {name: values_n for name, values_n in joined.items() if values_n is not None}
    if log_probs:
        comparable = finite.comparable_where_masked(list(log_probs.values()), counted_n)
        log_probs = dict(zip(log_probs, comparable, strict=True))
        batch.update({name: _split_as(values_n, batch[name]) for name, values_n in log_probs.items()})
    with _policy_loss.enter(_PolicyLoss(call["args"], log_probs, counted_n)):
        return call(batch=batch)


def value_loss_function(call: Call) -> Any:
    """Run the value loss on a batch in which values and returns of masked tokens are finite."""
    return call(batch=_without_overflow(call, "returns", "values")[0])


def get_log_probs_and_entropy(call: Call) -> Any:
    """Return the framework's scores; in the policy loss, masked tokens that would overflow are constants."""
    returned, loss = call(), _policy_loss.get()
    # miles, and slime up to v0.2.2, return nothing but the scores.
    scores = returned[1] if isinstance(returned, tuple) else returned
    if loss is None or (log_probs_n := _joined(scores, "log_probs", len(loss.counted_n))) is None:
        return returned
    log_probs_n = finite.kept_near(log_probs_n, list(loss.log_probs.values()), loss.counted_n)
    old = "rollout_log_probs" if getattr(loss.args, "use_rollout_logprobs", False) else "log_probs"
    # Without a pass of the old policy, miles takes the ratio of the log-probs to themselves.
    is_own = old == "log_probs" and getattr(loss.args, "skip_actor_forward_only", False)
    if getattr(loss.args, "use_unbiased_kl", False) and old in loss.log_probs and not is_own:
        # This term's ratio is computed in the middle of the framework's function.
        log_probs_n = finite.near_old(log_probs_n, loss.log_probs[old])
    scores["log_probs"] = _split_as(log_probs_n, scores["log_probs"])
    if (entropy_n := _joined(scores, "entropy", len(loss.counted_n))) is not None:
        is_metric = loss.args.entropy_coef == 0
        counted_n = torch.zeros_like(loss.counted_n) if is_metric else loss.counted_n
        entropy_n = finite.finite_where_masked(entropy_n.detach() if is_metric else entropy_n, counted_n)
        scores["entropy"] = _split_as(entropy_n, scores["entropy"])
    return returned


def compute_policy_loss(call: Call) -> Any:
    """Compute the clipped loss of ratios that are bounded before they are exponentiated."""
    log_ratio_n = -call["ppo_kl"]
    return call(ppo_kl=-finite.near_old(log_ratio_n, log_ratio_n.new_zeros(())))


def compute_approx_kl(call: Call) -> Any:
    """Estimate the KL divergence of bounded ratios, without a gradient if its coefficient is 0."""
    changes = {}
    if call["kl_loss_type"] in ("k3", "low_var_kl"):
        names = ("log_probs", "log_probs_base", "importance_ratio")
        bounded = finite.bounded_kl_arguments(*map(call.get, names))
        changes = {name: x_n for name, x_n in zip(names, bounded, strict=True) if x_n is not None}
    kl_n = call(**changes)
    if (loss := _policy_loss.get()) is None or getattr(loss.args, "kl_loss_coef", None) != 0:
        return kl_n
    return finite.finite_where_masked(kl_n.detach(), torch.zeros_like(kl_n, dtype=torch.bool))


def roll_tensor(call: Call) -> Any:
    """Roll a mask and count its tokens, by which Megatron's MTP divides; it may divide zero loss by one."""
    rolled, count = call()
    return rolled, torch.where(count == 0, 1, count)


def _without_overflow(call: Call, *names: str) -> tuple[dict[str, Any], Tensor]:
    """Return a copy of the batch, finite at masked tokens of these names, and which tokens the loss counts.

    The batch has the first of the names for each token of this rank.
    """
    batch = dict(call["batch"])
    n, device = sum(map(len, batch[names[0]])), batch[names[0]][0].device
    counted_n = finite.counted_tokens(call["sum_of_sample_mean"], n, device)
    for name in names:
        if (values_n := _joined(batch, name, n)) is not None:
            batch[name] = _split_as(finite.finite_where_masked(values_n, counted_n), batch[name])
    return batch, counted_n


def _split_as(values_n: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.split(values_n, [len(part) for part in parts]))


def _joined(values: Mapping[str, Any], name: str, n: int) -> Tensor | None:
    """Return the values of all samples ``[n]``, or ``None`` if these are missing or of another shape."""
    parts = list(values.get(name) or ())
    is_per_token = bool(parts) and all(isinstance(part, Tensor) and part.dim() == 1 for part in parts)
    return torch.cat(parts) if is_per_token and sum(len(part) for part in parts) == n else None
