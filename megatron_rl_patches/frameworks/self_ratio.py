"""The first training step after scoring, in slime, vime, OpenClaw-RL, miles and verl.

Functions have the names of those that they run around. Log-probs are compared where a policy loss gets both.
Without scores of the trainer (``--use-rollout-logprobs``, verl's ``bypass_mode``) nothing is compared.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ..common.messages import Message
from ..common.scopes import Scope
from ..engine.call import Call
from ..errors import LogProbsDiffer
from ..losses.objectives import finite
from ..reentry import SelfRatio
from ..reentry.training_warnings import harmless
from . import own_options
from .microbatch_layout import groups_of

_OFF = Message(
    "log-probs of the first training step are not those that were scored with the same weights; on rank "
    "{rank}: {report}",
    "Ratios of probabilities are not 1 before any update, so clipping and importance weights are wrong.",
    "Remove the cause, or raise self_ratio_limit.",
)
#: The comparison of the step that runs.
_step: Scope[SelfRatio] = Scope("self_ratio")
#: The call of the policy loss, until its log-probs are known; OpenClaw-RL computes some a second time.
_policy_loss: Scope[list[Call]] = Scope("self_ratio_policy_loss")
#: Workers of verl that have scored since their last step.
_scored: WeakSet[Any] = WeakSet()


def train_one_step(call: Call) -> Any:
    """Train one step of slime or miles; the first one of a rollout has the weights that scored."""
    args = call["args"]
    if call["step_id"] or getattr(args, "keep_old_actor", False):  # which scores with other weights
        return call()
    replays = any(getattr(args, f"use_{each}routing_replay", False) for each in ("", "rollout_"))
    vocab_size, top_p = getattr(args, "vocab_size", None), getattr(args, "rollout_top_p", None)
    return _compared(call, call["model"], vocab_size, top_p, replays or None)


def policy_loss_function(call: Call) -> Any:
    """Compute the policy loss, whose batch :func:`get_log_probs_and_entropy` reads, but not in backward."""
    is_compared = _step.get() is not None and torch._C._current_graph_task_id() == -1
    with _policy_loss.enter([call] if is_compared and call["batch"].get("log_probs") else []):
        return call()


def get_log_probs_and_entropy(call: Call) -> Any:
    """Return the framework's scores, which are compared in the policy loss of a compared step."""
    returned, ratio, losses = call(), _step.get(), _policy_loss.get()
    if ratio is not None and losses:
        with harmless():
            _add(ratio, losses.pop(), returned[1] if isinstance(returned, tuple) else returned)
    return returned


def _add(ratio: SelfRatio, loss: Call, scores: dict[str, Any]) -> None:
    batch, trained, entropies = loss["batch"], scores["log_probs"], scores.get("entropy") or None
    lengths, is_whole = [*map(len, trained)], groups_of(loss.function).cp_size == 1
    counted_n = finite.counted_tokens(loss["sum_of_sample_mean"], sum(lengths), trained[0].device)
    sizes = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    prompts = [total - response for total, response in sizes] if is_whole else None
    ratio.add(trained, batch["log_probs"], torch.split(counted_n, lengths), entropies, prompts)


def infer_batch(call: Call) -> Any:
    """Score with verl's worker; without its adapter, the actor is the reference."""
    if "no_lora_adapter" not in call["data"]:
        _scored.add(call.instance)
    return call()


def train_batch(call: Call) -> Any:
    """Train one step of verl's worker; the first one after scoring has the weights that scored."""
    worker, engine = call.instance, call.instance.engine
    if worker not in _scored or not isinstance(engine.module, list):  # of chunks: Megatron's engine
        return call()
    _scored.discard(worker)
    hf_config = getattr(getattr(engine, "model_config", None), "hf_config", None)
    return _compared(call, engine.module, getattr(hf_config, "vocab_size", None))


def get_policy_loss_fn(call: Call) -> Any:
    """Return a policy loss, which compares the log-probs that it gets in a compared step."""
    loss, ratio = call(), _step.get()
    if ratio is None:
        return loss

    @functools.wraps(loss)
    def compared(*args: Any, **kwargs: Any) -> Any:
        with harmless():
            ratio.add(kwargs["log_prob"], kwargs["old_log_prob"], kwargs["response_mask"])
        return loss(*args, **kwargs)

    return compared


def _compared(call: Call, model: Any, *known: Any) -> Any:
    """Run a step, and report how its log-probs differ from those that were scored, if it has both."""
    if "self-ratio" in own_options and not call.options.self_ratio_every:
        return call()
    ratio, report = SelfRatio(model, call.options.self_ratio_limit, *known), None
    with _step.enter(ratio):
        result = call()
    with harmless():
        report = ratio.report()
    if report is None:
        return result
    own_options["self-ratio"] = f"{'off' if report.is_off else 'fine'}: {report}"
    if report.is_off:
        values = {"rank": dist.get_rank(), "report": report}
        if dist.get_rank(groups_of().tp_group) == 0:  # the others have the same log-probs
            _OFF.log(**values)
        if call.options.self_ratio_raises:
            raise LogProbsDiffer(_OFF.text(**values))
    return result
