"""Log-probabilities and entropies in the losses of slime, OpenClaw-RL and miles.

The functions have the names of those that they take the place of. ``get_log_probs_and_entropy`` gets the
framework's options and the logits of a microbatch and slices these, in some releases sample by sample;
``calculate_log_probs_and_entropy`` gets a slice and computes. :data:`scoring_context` passes on to the second
what the first knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.scopes import Scope, replaced
from ..engine.call import Call
from ..losses import DeferredLogits, checkpointed
from ..losses.logits.deferred import dense, rows_of_existing
from ..losses.logits.log_probs import JointBackward
from .log_probs import log_probs_and_entropy

#: Names by which releases pass whether the entropy has a gradient.
_ENTROPY_GRAD = ("with_entropy_grad", "entropy_requires_grad", "need_entropy_grad")
#: Parameters of ``calculate_log_probs_and_entropy``; a call with others runs the framework's own code.
_KNOWN = {"logits", "tokens", "tp_group", "with_entropy", "log_prob_keep_mask", "chunk_size", *_ENTROPY_GRAD}
#: miles passes these two for ``true_on_policy_mode``, which is not patched.
_KNOWN |= {"true_on_policy", "vocab_size"}


@dataclass
class ScoringContext:
    """What is known while ``get_log_probs_and_entropy`` runs.

    Attributes:
        entropy_grad: whether any loss depends on the entropy.
        joint: computes the gradient of all samples in one pass.
        has_scored: whether a sample has been scored.
    """

    entropy_grad: bool = True
    joint: JointBackward | None = None
    has_scored: bool = False


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
    """Run the framework's function on logits whose slices copy nothing, and have one gradient together."""
    framework_args, logits = call["args"], call["logits"]
    # A custom loss may well use the entropy whatever this coefficient is.
    is_metric = (
        getattr(framework_args, "loss_type", None) == "policy_loss"
        and getattr(framework_args, "entropy_coef", None) == 0
    )
    rows = rows_of_existing(logits)
    context = ScoringContext(not is_metric, JointBackward(rows) if torch.is_grad_enabled() else None)
    try:
        with scoring_context.enter(context):
            return call(logits=rows)
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except RuntimeError:
        # Code that reads the memory itself, past torch's operators, finds none. It does so on every rank.
        if context.has_scored or rows is logits:
            raise
    with scoring_context.enter(ScoringContext(not is_metric)):
        return call()


def calculate_log_probs_and_entropy(call: Call) -> Any:
    """Return log-probabilities ``[n, 1]``, and entropies ``[n]`` or ``None``, of logits ``[n, V / tp]``."""
    context = scoring_context.get() or ScoringContext()
    passed_entropy_grad = [call[name] for name in _ENTROPY_GRAD if name in call.arguments]
    context.entropy_grad = context.entropy_grad and all(passed_entropy_grad)
    logits, tokens = call["logits"], call["tokens"]
    is_empty = len(logits) == 0 and not isinstance(logits, DeferredLogits)
    if call.changed() - _KNOWN or call.get("true_on_policy") or is_empty:
        return call(logits=dense(logits))
    context.has_scored = True
    log_probs, entropy = log_probs_and_entropy(
        logits,
        tokens if len(logits) else tokens[:0],  # frameworks pass tokens[-0:], which are all
        call["tp_group"],
        with_entropy=bool(call["with_entropy"]),
        entropy_grad=context.entropy_grad,
        keep_mask=call.get("log_prob_keep_mask"),
        joint=context.joint,
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
