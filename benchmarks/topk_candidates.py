"""What ``topk`` compares: log-probs at chosen ids, and selections, as their frameworks have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_at, vocab_parallel_topk
from megatron_rl_patches.losses.logits.distributions import log1mexp

from .candidates import Candidate, checkout

Group = dist.ProcessGroup
#: Log-probs [T, K] and, where there is one, the tail's [T].
Values = tuple[Tensor, ...]
# (logits [T, V / tp], ids [T, K], group) -> values.
AtIds = Callable[[Tensor, Tensor, Group], Values]
# (logits [T, V / tp], k, group) -> ids [T, k].
Selection = Callable[[Tensor, int, Group], Tensor]
MOST_BYTES = 6 << 30


def ours(logits: Tensor, ids: Tensor, group: Group, **options: Any) -> Values:
    return vocab_parallel_log_probs_at(logits, ids, tp_group=group, with_tail=True, **options)


def naive(logits: Tensor, ids: Tensor, group: Group) -> Values:
    log_probs = torch.log_softmax(logits, 1).gather(1, ids)
    return log_probs, log1mexp(log_probs.logsumexp(1))


def nemo_rl(module: Any, logits: Tensor, ids: Tensor, group: Group, chunk_size: int) -> Values:
    start = group.rank() * logits.shape[1]
    place = start, start + logits.shape[1]
    gather = module.ChunkedDistributedGatherLogprob.apply
    return (gather(logits[None], ids[None], *place, chunk_size, group)[0],)


def openclaw(module: Any, logits: Tensor, ids: Tensor, group: Group) -> Values:
    """Its loop over the K ids, each with a copy of the logits, and its tail."""
    if ids.shape[1] * logits.nbytes > MOST_BYTES:
        raise MemoryError(f"keeps {ids.shape[1]} times the logits, which may be more than there is")
    columns = [module.compute_log_probs(logits.clone(), one, group).squeeze(-1) for one in ids.T]
    log_probs = torch.stack(columns, dim=-1)
    log_sum = torch.logsumexp(log_probs, dim=-1).clamp(max=-1e-7)
    return log_probs, torch.log(-torch.expm1(log_sum))


def select_ours(logits: Tensor, k: int, group: Group) -> Tensor:
    return vocab_parallel_topk(logits, k, tp_group=group).indices


def select_nemo_rl(module: Any, logits: Tensor, k: int, group: Group) -> Tensor:
    start = group.rank() * logits.shape[1]
    place = {"vocab_start_index": start, "vocab_end_index": start + logits.shape[1]}
    return module.distributed_vocab_topk(logits[None], k, group, **place, chunk_size=128)[1][0]


def select_by_gathering(logits: Tensor, k: int, group: Group) -> Tensor:
    """The whole vocabulary to every rank, as the draft slime#2033 does."""
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits, group=group)
    return torch.cat(parts, 1).topk(k).indices


NEMO_RL = checkout("nemo-rl", "nemo_rl.distributed.model_utils")
AT_IDS = (
    Candidate("ours", ours),
    Candidate("ours, in place", partial(ours, inplace_backward=True)),
    Candidate("log_softmax, log1mexp", naive, splits_vocabulary=False),
    Candidate("NeMo-RL, chunks of 128", partial(nemo_rl, chunk_size=128), NEMO_RL),
    Candidate("NeMo-RL, chunks of 1024", partial(nemo_rl, chunk_size=1024), NEMO_RL),
    Candidate("OpenClaw-RL, loop over ids", openclaw, checkout("OpenClaw-RL", "slime.utils.ppo_utils")),
)
SELECTIONS = (
    Candidate("ours", select_ours),
    Candidate("NeMo-RL, chunks of 128", select_nemo_rl, NEMO_RL),
    Candidate("all-gather of the vocabulary", select_by_gathering),
)
