"""Log-probabilities and entropies in the losses of slime, OpenClaw-RL and miles.

The functions have the names of those that they take the place of. ``get_log_probs_and_entropy`` gets the
framework's options and the logits of a microbatch, see :mod:`.response_scores`. The framework's own code
slices these, in some releases sample by sample; ``calculate_log_probs_and_entropy`` computes from a slice.
:data:`scoring_context` passes on to the second what the first knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.scopes import Scope, replaced
from ..engine.call import Call
from ..losses import DeferredLogits, checkpointed
from ..losses.vocab.deferred import dense
from . import own_options
from .log_probs import log_probs_and_entropy
from .response_scores import response_scores

#: Names by which releases pass whether the entropy has a gradient.
_ENTROPY_GRAD = ("with_entropy_grad", "entropy_requires_grad", "need_entropy_grad")
#: Parameters of ``calculate_log_probs_and_entropy``; a call with others runs the framework's own code. miles
#: passes the last two for ``true_on_policy_mode``, which is not patched.
_KNOWN = {"logits", "tokens", "tp_group", "with_entropy", "chunk_size", "temperature", *_ENTROPY_GRAD}
_KNOWN |= {"log_prob_keep_mask", "sampling_mask", "true_on_policy", "vocab_size"}


@dataclass
class ScoringContext:
    """What is known while ``get_log_probs_and_entropy`` runs: whether any loss depends on the entropy."""

    entropy_grad: bool = True


scoring_context: Scope[ScoringContext] = Scope("scoring")


def loss_function(call: Call) -> Any:
    """Checkpoint the whole function instead of the loss in it; the rest of it computes a few numbers."""
    framework_args = call["args"]
    if not framework_args.recompute_loss_function:
        return call()

    def without_recomputation(*args: Any, **kwargs: Any) -> Any:
        # The option changes in place, not in a copy: custom losses may keep something on ``args``.
        with replaced(framework_args, recompute_loss_function=False):
            return call.function(*args, **kwargs)

    return checkpointed(without_recomputation, preserve_rng_state=True)(*call.args, **call.kwargs)


def get_log_probs_and_entropy(call: Call) -> Any:
    """Score all responses at once, or let the framework's function do what it does."""
    framework_args = call["args"]
    loss, entropy_coef = (getattr(framework_args, name, None) for name in ("loss_type", "entropy_coef"))
    # A custom loss may well use the entropy whatever this coefficient is.
    with scoring_context.enter(ScoringContext(loss != "policy_loss" or entropy_coef != 0)):
        if (backend := getattr(framework_args, "log_probs_backend", None)) not in (None, "torch"):
            own_options["get_log_probs_and_entropy"] = f"not needed with --log-probs-backend {backend}"
            return call(logits=dense(call["logits"]))
        scores = response_scores(call)
        return call() if scores is None else scores


def calculate_log_probs_and_entropy(call: Call) -> Any:
    """Return log-probabilities ``[n, 1]``, and entropies ``[n]`` or ``None``, of logits ``[n, V / tp]``."""
    context = scoring_context.get() or ScoringContext()
    passed_entropy_grad = [call[name] for name in _ENTROPY_GRAD if name in call.arguments]
    context.entropy_grad = context.entropy_grad and all(passed_entropy_grad)
    logits, tokens = call["logits"], call["tokens"]
    is_empty = len(logits) == 0 and not isinstance(logits, DeferredLogits)
    if call.changed() - _KNOWN or call.get("true_on_policy") or is_empty:
        return call(logits=dense(logits))
    is_part = logits._base is not None and logits.numel() < logits._base.numel()
    if is_part and torch.is_grad_enabled() and not isinstance(logits, DeferredLogits):
        logits = logits.clone()  # so do the frameworks: a fork may write to the part of the next sample
    log_probs, entropy = log_probs_and_entropy(
        logits,
        tokens if len(logits) else tokens[:0],  # frameworks pass tokens[-0:], which are all
        call["tp_group"],
        entropy_grad=context.entropy_grad if call["with_entropy"] else None,
        keep_mask=call.get("log_prob_keep_mask", call.get("sampling_mask")),
        temperature=call.get("temperature", 1.0),
    )
    if entropy is not None and not passed_entropy_grad:
        entropy = entropy.to(logits.dtype)  # releases without such an argument compute it in this dtype
    return log_probs.unsqueeze(-1), entropy


def allgather_cp_redistribute(call: Call) -> None:
    """Leave out the backward of the entropy's all-reduce on every rank where the entropy has no gradient."""
    context, res = scoring_context.get() or ScoringContext(), call["res"]
    entropy = {} if context.entropy_grad or "entropy" not in res else {"entropy": res.pop("entropy")}
    call()
    with torch.no_grad():
        call(res=entropy)
    res.update(entropy)


def compute_log_probs(call: Call) -> Tensor:
    """Return log-probabilities ``[n, 1]``; Megatron's fused cross entropy would overwrite float32 logits."""
    log_probs, _ = log_probs_and_entropy(call["logits"], call["tokens"], call["process_group"])
    return log_probs.unsqueeze(1)
