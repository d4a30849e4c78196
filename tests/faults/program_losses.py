"""The losses of random programs: their formulas in float64 over the whole vocabulary, and this package's."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import losses
from tests.references.dense import dense_divergence, dense_log_probs_and_entropy
from tests.references.dense_topk import dense_log_probs_at

from .programs import Loss, Program

BETA, K = 0.3, 3
OF_OTHER_ROWS = ("mutual", "mixture")


class Data:
    """What a loss gets besides the logits ``[n, V]``."""

    def __init__(self, loss: Loss, program: Program, logits: Tensor) -> None:
        draw, generator = random.Random(loss.draw), torch.Generator().manual_seed(loss.draw)
        noise = partial(torch.randn, generator=generator, dtype=torch.float64)
        size, vocabulary = logits.shape
        self.rows = None
        if draw.random() < 0.5:
            self.rows = torch.tensor(sorted(draw.sample(range(size), size // 2)), dtype=torch.int64)
        n = size if self.rows is None else len(self.rows)
        self.targets = torch.randint(vocabulary, (n,), generator=generator)
        distinct = [draw.sample(range(vocabulary), K) for _ in range(n)]
        self.ids = torch.tensor(distinct, dtype=torch.int64).view(n, K)
        if loss.kind == "at" and n and draw.random() < 0.3:
            self.ids[:, 1] = self.ids[:, 0]
        self.keep_mask = torch.rand(n, vocabulary, generator=generator) < 0.7
        student = logits if self.rows is None else logits[self.rows]
        self.teacher, self.old = noise(n, vocabulary), None
        if loss.kind in OF_OTHER_ROWS:
            self.teacher = student.flip(0)
            self.old = (student.roll(1, 0) / loss.temperature).log_softmax(1)
        elif program.close:
            self.teacher = (student + 5e-5 * self.teacher).float()
        elif draw.random() < 0.3:
            self.teacher[draw.randrange(2) :: 2, vocabulary // 2 :] = draw.choice([-math.inf, -1e5])
        self.log_q = (self.teacher.double() / loss.temperature).log_softmax(1)


def dense(loss: Loss, data: Data, logits: Tensor) -> Tensor:
    """Return the values of a loss of whole logits ``[n, V]``, in float64."""
    logits, temperature = logits.double(), loss.temperature
    if loss.kind == "sum":
        return logits.sum()[None]
    options: dict[str, Any] = {"rows": data.rows, "temperature": temperature}
    if loss.kind in ("alone", "scores", "kept"):
        options["keep_mask"] = data.keep_mask if loss.kind == "kept" else None
        log_probs, entropies = dense_log_probs_and_entropy(logits, data.targets, **options)
        return log_probs if loss.kind == "alone" else torch.stack([log_probs, entropies])
    if loss.kind == "at":
        log_probs, tail = dense_log_probs_at(logits, data.ids, **options)
        return torch.cat([log_probs, tail[:, None]], 1)
    rows = logits if data.rows is None else logits[data.rows]
    if loss.kind == "topk":
        order = rows.sort(dim=1, descending=True, stable=True).indices[:, :K]
        log_probs, tail = dense_log_probs_at(rows.detach(), order, temperature=temperature)
        return torch.cat([order.double(), log_probs, tail[:, None]], 1)
    log_p = (rows / temperature).log_softmax(1)
    if loss.kind == "mixture":
        mixed = torch.logaddexp(data.log_q, data.old) - math.log(2)
        return dense_divergence(loss.divergence, log_p, mixed, beta=BETA)
    return dense_divergence(loss.divergence, log_p, data.log_q, data.old, BETA)


def ours(loss: Loss, data: Data, logits: Tensor, columns: slice, group: dist.ProcessGroup | None) -> Tensor:
    """Return the values of a loss of this rank's columns of the logits."""
    of_rows = partial(_ours, loss, data, columns, {"tp_group": group, "temperature": loss.temperature})
    if logits.is_inference() or not loss.within:  # torch itself refuses to checkpoint these
        return of_rows(logits)
    if loss.within == "checkpointed":
        return losses.checkpointed(of_rows)(logits)
    can_be_reentrant = logits.requires_grad and loss.kind != "topk"
    return checkpoint(of_rows, logits, use_reentrant=True) if can_be_reentrant else of_rows(logits)


def _ours(loss: Loss, data: Data, columns: slice, options: dict[str, Any], logits: Tensor) -> Tensor:
    if loss.kind == "sum":
        return logits.sum()[None]
    options = {"rows": data.rows, **options}
    if loss.kind == "alone":
        return losses.vocab_parallel_log_probs(logits, data.targets, **options)
    if loss.kind in ("scores", "kept"):
        mask = {"keep_mask": data.keep_mask[:, columns]} if loss.kind == "kept" else {}
        both = losses.vocab_parallel_log_probs_and_entropy(logits, data.targets, **mask, **options)
        return torch.stack(both)
    if loss.kind == "at":
        at_ids, tail = losses.vocab_parallel_log_probs_at(logits, data.ids, with_tail=True, **options)
        return torch.cat([at_ids, tail[:, None]], 1)
    if loss.kind == "topk":
        topk = losses.vocab_parallel_topk(logits, K, **options)
        numbers = topk.indices.to(topk.log_probs.dtype)
        return torch.cat([numbers, topk.log_probs, topk.tail_log_prob[:, None]], 1)
    teacher, old = data.teacher[:, columns], None
    if loss.kind in OF_OTHER_ROWS:
        numbers = torch.arange(len(logits)) if data.rows is None else data.rows
        teacher, old = logits.detach()[numbers.flip(0)], logits.detach()[numbers.roll(1)]
    how = {"divergence": loss.divergence, "beta": BETA, **options}
    if loss.kind == "mixture":
        return losses.full_vocabulary_divergence(logits, [teacher, old], **how)
    return losses.full_vocabulary_divergence(logits, teacher, old=old, **how)
