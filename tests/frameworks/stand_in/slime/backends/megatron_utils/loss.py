"""In the shape of slime up to v0.3.0: all rows at once, slices of the results.

Checkpointed as torch's default has it, as in OpenClaw-RL.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed.nn
from megatron.core import parallel_state as mpu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...utils.ppo_utils import calculate_log_probs_and_entropy, compute_approx_kl, compute_policy_loss
from .cp_utils import slice_log_prob_with_cp

Reduction = Callable[[Tensor], Tensor]


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    logits = logits.squeeze(0)
    if args.rollout_temperature != 1.0:
        logits = logits / args.rollout_temperature
    first = mpu.get_context_parallel_rank() * len(logits) if args.allgather_cp else 0
    tokens = torch.cat([tokens.roll(-1) for tokens in unconcat_tokens])[first : first + len(logits)]
    log_probs, entropies = calculate_log_probs_and_entropy(
        logits,
        tokens,
        mpu.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        chunk_size=args.log_probs_chunk_size,
        need_entropy_grad=with_entropy and args.entropy_coef != 0,
    )
    spans = _spans(total_lengths, response_lengths, first)
    res = {"log_probs": [log_probs.squeeze(-1)[span] for span in spans]}
    if entropies is not None:
        res["entropy"] = [entropies[span] for span in spans]
    if args.allgather_cp:
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
        _allgather_cp_redistribute(res, logits_local_len=len(logits), **lengths)
    return torch.empty(0), res


def _spans(total_lengths: list[int], response_lengths: list[int], first: int = 0) -> list[slice]:
    """Return the rows that predict the responses, counted from the first that this rank has."""
    ends = (torch.tensor(total_lengths).cumsum(0) - first).tolist()
    lengths = zip(ends, response_lengths, strict=True)
    return [slice(max(end - length - 1, 0), max(end - 1, 0)) for end, length in lengths]


def _allgather_cp_redistribute(
    res: dict[str, list[Tensor]],
    *,
    logits_local_len: int,
    total_lengths: list[int],
    response_lengths: list[int],
) -> None:
    """Give zigzag chunks of responses to ranks that have rows of the whole batch.

    Where a rank has no token of a sample, its placeholder requires grad, also if other ranks' values do not.
    """
    first = mpu.get_context_parallel_rank() * logits_local_len
    for key, values in res.items():
        whole, start = [], 0
        for value, total, response in zip(values, total_lengths, response_lengths, strict=True):
            before = min(max(first - (start + total - response - 1), 0), response)
            if len(value) == 0:
                whole.append(torch.zeros(response, dtype=value.dtype, requires_grad=True))
            else:
                whole.append(torch.nn.functional.pad(value, (before, response - before - len(value))))
            start += total
        group = mpu.get_context_parallel_group()
        gathered = torch.distributed.nn.all_reduce(torch.cat(whole), group=group).split(response_lengths)
        samples = zip(gathered, total_lengths, response_lengths, strict=True)
        res[key] = [slice_log_prob_with_cp(*sample) for sample in samples]


def policy_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    scored = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, scores = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **scored)
    old_log_probs = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch["log_probs"]
    log_probs, old = torch.cat(scores["log_probs"]), torch.cat(old_log_probs)
    advantages = torch.cat(batch["advantages"])
    pg_loss, _ = compute_policy_loss(old - log_probs, advantages, args.eps_clip, args.eps_clip_high)
    if args.use_tis:
        tis = (torch.cat(batch["log_probs"]) - torch.cat(batch["rollout_log_probs"])).exp()
        pg_loss = pg_loss * tis.clamp(args.tis_clip_low, args.tis_clip)
    entropy = sum_of_sample_mean(torch.cat(scores["entropy"]))
    loss = sum_of_sample_mean(pg_loss) - args.entropy_coef * entropy
    log = {"entropy_loss": entropy.detach(), "ppo_kl": sum_of_sample_mean(old - log_probs).detach()}
    if args.use_kl_loss:
        ratio = torch.exp(log_probs - old) if args.use_unbiased_kl else None
        kl = compute_approx_kl(log_probs, torch.cat(batch["ref_log_probs"]), args.kl_loss_type, ratio)
        log["kl_loss"] = sum_of_sample_mean(kl)
        loss = loss + args.kl_loss_coef * log["kl_loss"]
        log["kl_loss"] = log["kl_loss"].detach()
    return loss, {"loss": loss.detach(), **log}


def value_loss_function(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reduction
) -> tuple[Tensor, dict[str, Tensor]]:
    values = [logits[0, span, 0] for span in _spans(batch["total_lengths"], batch["response_lengths"])]
    loss = sum_of_sample_mean((torch.cat(values) - torch.cat(batch["returns"])) ** 2)
    return loss, {"value_loss": loss.detach()}


def loss_function(
    args: Any, batch: dict[str, Any], num_microbatches: int, logits: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    def sum_of_sample_mean(x: Tensor) -> Tensor:
        parts = zip(x.split(batch["response_lengths"]), batch["loss_masks"], strict=True)
        return torch.stack([(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts]).sum()

    own = policy_loss_function if args.loss_type == "policy_loss" else value_loss_function
    function = partial(own, sum_of_sample_mean=sum_of_sample_mean)
    if args.recompute_loss_function:
        loss, log = checkpoint(function, args, batch, logits)
    else:
        loss, log = function(args, batch, logits)
    return loss, torch.tensor(1), {"keys": list(log), "values": torch.tensor([1.0, *log.values()])}
