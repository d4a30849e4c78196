"""The losses of random programs: their formulas in float64 over the whole vocabulary, and this package's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import losses
from tests.references.dense import dense_divergence, dense_log_probs_and_entropy
from tests.references.dense_topk import dense_log_probs_at

from .programs import RESPONSES, TOTALS, Loss, Program, S

BETA, K = 0.3, 3
_POLICY = losses.PolicyOptions(entropy_coef=0.1, kl_coef=0.2)
_NUM_TOKENS = sum(RESPONSES)
OF_MICROBATCH = ("policy", "distillation")
OF_OTHER_ROWS = ("mutual", "mixture")


class Place(NamedTuple):
    """This process among the ranks of a program."""

    tp_rank: int = 0
    cp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None


class Data:
    """What a loss gets besides the logits ``[n, V]``, which of a microbatch are those of response tokens."""

    def __init__(self, loss: Loss, program: Program, logits: Tensor) -> None:
        draw, generator = random.Random(loss.draw), torch.Generator().manual_seed(loss.draw)
        size, self.vocabulary = logits.shape
        self.rows = None
        if loss.kind not in OF_MICROBATCH and draw.random() < 0.5:
            self.rows = torch.tensor(sorted(draw.sample(range(size), size // 2)), dtype=torch.int64)
        n = size if self.rows is None else len(self.rows)

        noise = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(self.vocabulary, (n,), generator=generator)
        distinct = [draw.sample(range(self.vocabulary), K) for _ in range(n)]
        self.ids = torch.tensor(distinct, dtype=torch.int64).view(n, K)
        self.per_token = noise(3, n) - 2
        self.mask = torch.tensor([draw.random() < 0.7 for _ in range(n)] if n else [], dtype=torch.bool)
        student = logits if self.rows is None else logits[self.rows]
        self.teacher = noise(n, self.vocabulary)
        if program.close:
            self.teacher = student + 5e-5 * self.teacher
        self.is_full = draw.random() < 0.4 and not loss.wrong
        if not program.close and draw.random() < 0.3:
            # A full teacher's logits are a product, in which zero times -inf is NaN.
            masked = -1e5 if loss.kind == "distillation" and self.is_full else draw.choice([-math.inf, -1e5])
            self.teacher[draw.randrange(2) :: 2, self.vocabulary // 2 :] = masked
        self.teacher = self.teacher.to(torch.float32 if program.close else torch.float64)
        if loss.kind == "at" and n and draw.random() < 0.3:
            self.ids[:, 1] = self.ids[:, 0]
        if loss.wrong:
            place = draw.randrange(n)
            self.mask[place] = True
            self.targets[place] = draw.choice([self.vocabulary, -1])
            self.ids[place, 1] = self.ids[place, 0] if loss.wrong == "duplicate" else self.vocabulary
        self.keep_mask = torch.rand(n, self.vocabulary, generator=generator) < 0.7
        if loss.kind in OF_OTHER_ROWS:
            self.teacher = student.flip(0)
            self.old = (student.roll(1, 0) / loss.temperature).log_softmax(1)
        self.log_q = (self.teacher.double() / loss.temperature).log_softmax(1)

    @property
    def teacher_at_ids(self) -> losses.TopKDistribution:
        ids = self.ids.clamp(0, self.vocabulary - 1)
        others = self.log_q.scatter(1, ids, -math.inf).logsumexp(1)
        return losses.TopKDistribution(self.ids, self.log_q.gather(1, ids), others)


# --- the formulas


def dense(loss: Loss, data: Data, logits: Tensor) -> Tensor:
    """Return the values of a loss of whole logits ``[n, V]``, in float64."""
    logits, temperature = logits.double(), loss.temperature
    if loss.kind == "sum":
        return logits.sum()[None]
    if loss.kind in OF_MICROBATCH:
        per_token = _policy if loss.kind == "policy" else _distillation
        # What does not count takes no part: zero times infinity is NaN.
        return torch.stack([per_token(loss, data, logits[data.mask]).sum(), data.mask.sum().double()])
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
    return dense_divergence(loss.divergence, log_p, data.log_q, getattr(data, "old", None), BETA)


def _policy(loss: Loss, data: Data, logits: Tensor) -> Tensor:
    """PPO with a KL penalty (k3) and an entropy bonus."""
    targets = data.targets.clamp(0, data.vocabulary - 1)[data.mask]
    log_prob, entropy = dense_log_probs_and_entropy(logits, targets, temperature=loss.temperature)
    advantage, old, ref = data.per_token[:, data.mask]
    ratio, gap = (log_prob - old).exp(), log_prob - ref
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -surrogate + _POLICY.kl_coef * ((-gap).exp() - 1 + gap) - _POLICY.entropy_coef * entropy


def _distillation(loss: Loss, data: Data, logits: Tensor) -> Tensor:
    if data.is_full:
        log_q = data.log_q[data.mask]
        return dense_divergence(loss.divergence, (logits / loss.temperature).log_softmax(1), log_q)
    ids = data.ids.clamp(0, data.vocabulary - 1)[data.mask]
    student = dense_log_probs_at(logits, ids, temperature=loss.temperature)
    teacher = data.teacher_at_ids
    log_q = torch.cat([teacher.log_probs, teacher.tail_log_prob[:, None]], 1)[data.mask]
    return dense_divergence(loss.divergence, torch.cat([student[0], student[1][:, None]], 1), log_q)


# --- ours


def ours(loss: Loss, data: Data, logits: Tensor, program: Program, place: Place) -> Tensor:
    """Return the values of a loss of this rank's part of the logits."""
    function = _function(loss, data, program, place)
    if loss.within == "checkpointed" and not logits.is_inference():  # torch itself refuses these
        function = losses.checkpointed(function)
    can_be_reentrant = logits.requires_grad and not logits.is_inference() and loss.kind != "topk"
    if loss.within == "reentrant" and can_be_reentrant:
        return checkpoint(function, logits, use_reentrant=True)
    return function(logits)


def _function(loss: Loss, data: Data, program: Program, place: Place) -> Callable[[Tensor], Tensor]:
    group, columns = place.tp_group, slice(place.tp_rank * program.width, (place.tp_rank + 1) * program.width)
    options: dict[str, Any] = {"tp_group": group, "temperature": loss.temperature}

    def of_rows(logits: Tensor) -> Tensor:
        if loss.kind == "sum":
            return logits.sum()[None]
        if loss.kind == "alone":
            return losses.vocab_parallel_log_probs(logits, data.targets, rows=data.rows, **options)
        if loss.kind in ("scores", "kept"):
            how = {"rows": data.rows, "keep_mask": data.keep_mask[:, columns], **options}
            if loss.kind == "scores":
                del how["keep_mask"]
            return torch.stack(losses.vocab_parallel_log_probs_and_entropy(logits, data.targets, **how))
        if loss.kind == "at":
            how = {"rows": data.rows, "with_tail": True, **options}
            at_ids, tail = losses.vocab_parallel_log_probs_at(logits, data.ids, **how)
            return torch.cat([at_ids, tail[:, None]], 1)
        if loss.kind == "topk":
            topk = losses.vocab_parallel_topk(logits, K, rows=data.rows, **options)
            numbers = topk.indices.to(topk.log_probs.dtype)
            return torch.cat([numbers, topk.log_probs, topk.tail_log_prob[:, None]], 1)
        teacher, old = data.teacher[:, columns], None
        if loss.kind in OF_OTHER_ROWS:
            numbers = torch.arange(len(logits)) if data.rows is None else data.rows
            teacher, old = logits.detach()[numbers.flip(0)], logits.detach()[numbers.roll(1)]
        how = {"divergence": loss.divergence, "beta": BETA, "rows": data.rows, **options}
        if loss.kind == "mixture":
            return losses.full_vocabulary_divergence(logits, [teacher, old], **how)
        return losses.full_vocabulary_divergence(logits, teacher, old=old, **how)

    if loss.kind not in OF_MICROBATCH:
        return of_rows
    of_rank = {"cp_rank": place.cp_rank, "cp_size": program.cp}
    layout = losses.SequenceLayout.build(
        TOTALS, RESPONSES, qkv_format="bshd", max_seq_lens=[S] * len(TOTALS), **of_rank
    )
    split, options["cp_group"] = partial(torch.split, split_size_or_sections=RESPONSES), place.cp_group
    if loss.kind == "policy":
        tokens = [torch.cat([response.new_zeros(2), response]) for response in split(data.targets)]
        batch = losses.PolicyBatch(*map(split, (data.per_token[0], data.mask, *data.per_token[1:])))
        loss_func = losses.make_loss_func(tokens, layout, batch, _POLICY, **options)
    else:
        whole: Any = data.teacher_at_ids
        if data.is_full:
            # The teacher's hidden states select the rows of logits that are given.
            head = losses.OutputHead(data.teacher[:, columns].T.contiguous())
            whole = losses.FullDistribution.from_hidden(torch.eye(_NUM_TOKENS, dtype=torch.float64), head)
        distillation = losses.DistillationBatch([whole.split(RESPONSES)], split(data.mask))
        how = losses.DistillationOptions(divergence=loss.divergence, beta=BETA)
        loss_func = losses.make_distillation_loss_func(layout, distillation, how, **options)

    def of_microbatch(logits: Tensor) -> Tensor:
        total, count, _ = loss_func(logits)
        return torch.stack([total, count.to(total.dtype)])

    return of_microbatch
