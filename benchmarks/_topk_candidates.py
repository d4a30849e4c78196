"""Candidates of ``bench_topk``: log-probs at chosen ids, and selections, as their frameworks have them.

A candidate is loaded where it is measured; what it raises then is the reason why it is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.losses import vocab_parallel_log_probs_at, vocab_parallel_topk
from megatron_rl_patches.losses.logits.distributions import log1mexp

from ._loss_candidates import _from_checkout as from_checkout

Group = dist.ProcessGroup
MOST_BYTES = 6 << 30
# (logits [T, V / tp], ids [T, K], group) -> log-probs [T, K] and, where there is one, the tail's [T].
AtIds = Callable[[Tensor, Tensor, Group], tuple[Tensor, ...]]
# (logits [T, V / tp], k, group) -> ids [T, k].
Selection = Callable[[Tensor, int, Group], Tensor]


@dataclass(frozen=True)
class Candidate:
    name: str
    load: Callable[[], Any]
    splits_vocabulary: bool = True


def ours(**options: Any) -> AtIds:
    return lambda logits, ids, group: vocab_parallel_log_probs_at(
        logits, ids, tp_group=group, with_tail=True, **options
    )


def naive() -> AtIds:
    def at_ids(logits: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, ...]:
        log_probs = torch.log_softmax(logits, 1).gather(1, ids)
        return log_probs, log1mexp(log_probs.logsumexp(1))

    return at_ids


def nemo_rl(chunk_size: int) -> AtIds:
    module = from_checkout("nemo-rl", "nemo_rl.distributed.model_utils")

    def at_ids(logits: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, ...]:
        start = group.rank() * logits.shape[1]
        place = start, start + logits.shape[1]
        found = module.ChunkedDistributedGatherLogprob.apply(
            logits[None], ids[None], *place, chunk_size, group
        )
        return (found[0],)

    return at_ids


def openclaw() -> AtIds:
    """Its loop over the K ids, each with a copy of the logits, and its tail."""
    module = from_checkout("OpenClaw-RL", "slime.utils.ppo_utils")

    def at_ids(logits: Tensor, ids: Tensor, group: Group) -> tuple[Tensor, ...]:
        if ids.shape[1] * logits.nbytes > MOST_BYTES:
            raise MemoryError(f"keeps {ids.shape[1]} times the logits, which may be more than there is")
        columns = [module.compute_log_probs(logits.clone(), one, group).squeeze(-1) for one in ids.T]
        log_probs = torch.stack(columns, dim=-1)
        log_sum = torch.logsumexp(log_probs, dim=-1).clamp(max=-1e-7)
        return log_probs, torch.log(-torch.expm1(log_sum))

    return at_ids


def select_ours() -> Selection:
    return lambda logits, k, group: vocab_parallel_topk(logits, k, tp_group=group).indices


def select_nemo_rl(chunk_size: int) -> Selection:
    module = from_checkout("nemo-rl", "nemo_rl.distributed.model_utils")

    def select(logits: Tensor, k: int, group: Group) -> Tensor:
        start = group.rank() * logits.shape[1]
        return module.distributed_vocab_topk(
            logits[None],
            k,
            group,
            vocab_start_index=start,
            vocab_end_index=start + logits.shape[1],
            chunk_size=chunk_size,
        )[1][0]

    return select


def select_by_gathering() -> Selection:
    """The whole vocabulary to every rank, as the draft slime#2033 does."""

    def select(logits: Tensor, k: int, group: Group) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits, group=group)
        return torch.cat(parts, 1).topk(k).indices

    return select


AT_IDS = (
    Candidate("ours", ours),
    Candidate("ours, in place", partial(ours, inplace_backward=True)),
    Candidate("log_softmax, log1mexp", naive, splits_vocabulary=False),
    Candidate("NeMo-RL, chunks of 128", partial(nemo_rl, 128)),
    Candidate("NeMo-RL, chunks of 1024", partial(nemo_rl, 1024)),
    Candidate("OpenClaw-RL, loop over ids", openclaw),
)
SELECTIONS = (
    Candidate("ours", select_ours),
    Candidate("NeMo-RL, chunks of 128", partial(select_nemo_rl, 128)),
    Candidate("all-gather of the vocabulary", select_by_gathering),
)
