"""Log-probs of a rollout's tokens, as the inference engine and as Megatron compute them.

torch is imported only where it is needed, since the loops of a test may run without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common.messages import Message, is_rank_0
from ..engine.call import Call
from ..reentry import training_warnings

#: A mean difference above this, in nats per token, is reported. bfloat16 on both sides gives 0.01 to 0.05.
_MAX_DIFFERENCE = 0.1
_DIFFERENT_POLICIES = Message(
    "rollout_log_probs: the log-probs of the inference engine and of Megatron differ by {mean:.2g} nats per "
    "token on average and {largest:.2g} at most, on {tokens} tokens of this rank",
    f"Above {_MAX_DIFFERENCE:g} on average, the policy that samples is not the policy that is trained.",
    "Compare precision, temperature and expert routing of both, and gather weights before you send them. If "
    "the run samples with older weights by design, ignore it.",
)
_TRUNCATED = Message(
    "{name}top_p={top_p}, {name}top_k={top_k}: rollouts sample from a part of the vocabulary, and the "
    "trainer's log-probs are of the whole vocabulary",
    "Where that part has probability S, they are too low by -log S (0.22 for 0.8), so the loss is biased.",
    "Sample rollouts with top_p=1 and top_k=-1, or use a release whose trainer gets a mask.",
)
#: Data of a rollout that say from which ids each token was sampled: of slime from v0.3.1 on, and of miles.
_MASKS = ("rollout_top_p_token_ids", "rollout_sampling_mask_ids")


def check_rollout(data_iterator: Any) -> None:
    """Report, once per process, rollouts that are not sampled from the policy that is trained.

    slime, vime and miles have the engine's and Megatron's log-probs in the data of a rollout only if they
    compute these before training. Without them, slime's metric ``train_rollout_logprob_abs_diff`` tells.
    Iterators without ``rollout_data`` are not looked at.
    """
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    rollout: Any = getattr(first, "rollout_data", None)
    for check in (_compare_log_probs, _check_sampling) if isinstance(rollout, Mapping) else ():
        with training_warnings.harmless():
            check(rollout)


def check_verl_rollout(call: Call) -> None:
    """Report rollouts of verl whose log-probs are not of all ids that its actor trains on."""
    with training_warnings.harmless():
        config = call.instance.config
        if call.options.warn and config.actor.strategy == "megatron":
            _report_sampling("actor_rollout_ref.rollout.", config.rollout.top_p, config.rollout.top_k)


def _check_sampling(rollout: Mapping[str, Any]) -> None:
    from megatron.training.global_vars import get_args

    args = get_args()
    if args.loss_type == "policy_loss" and not any(map(rollout.get, _MASKS)):
        _report_sampling("rollout_", args.rollout_top_p, args.rollout_top_k)


def _report_sampling(name: str, top_p: float | None, top_k: int | None) -> None:
    if (top_p is not None and top_p < 1) or (top_k or 0) > 0:
        training_warnings.report("top_p", _TRUNCATED, is_rank_0, name=name, top_p=top_p, top_k=top_k)


def _compare_log_probs(rollout: Mapping[str, Any]) -> None:
    import torch

    def joined(values: Sequence[Any]) -> Any:
        return torch.cat([torch.as_tensor(value).detach().float().reshape(-1) for value in values])

    trained, sampled = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if not trained or not sampled or "rollout_log_probs" in training_warnings.messages:
        return
    lengths = [len(values) for values in trained]
    masks = rollout.get("loss_masks") or [torch.ones(length) for length in lengths]
    if lengths != [len(mask) for mask in masks]:
        from .microbatch_layout import groups_of, layout_of

        # Those of this context-parallel rank, which has a zigzag share of each response.
        layout = layout_of(None, rollout, groups_of(), None, torch.device("cpu"))
        masks = layout.local_parts([torch.as_tensor(mask).cpu() for mask in rollout["loss_masks"]])
    if not lengths == [len(mask) for mask in masks] == [len(values) for values in sampled]:
        return  # nobody can tell here which values belong together
    differences = (joined(trained) - joined(sampled)).abs()
    differences = differences[joined(masks).to(differences.device).bool() & differences.isfinite()]
    if not len(differences):
        return
    mean, largest = torch.stack([differences.mean(), differences.max()]).tolist()
    if mean > _MAX_DIFFERENCE:
        training_warnings.report(
            "rollout_log_probs", _DIFFERENT_POLICIES, mean=mean, largest=largest, tokens=len(differences)
        )
