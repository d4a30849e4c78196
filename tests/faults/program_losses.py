"""The losses of random programs: their formulas in float64 over the whole vocabulary, and this package's."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import losses
from tests.references.losses import FUNCTIONS, Inputs

from .programs import Loss

K = 3
OF_OTHER_ROWS = ("mutual", "mixture")
FUNCTION_OF = {"alone": "log-probs", "scores": "entropy", "kept": "entropy", "at": "at ids", "topk": "top-k"}


def inputs_of(loss: Loss, logits: Tensor) -> Inputs:
    """Draw what a loss gets besides the logits ``[n, V]`` of all ranks."""
    draw, generator = random.Random(loss.draw), torch.Generator().manual_seed(loss.draw)
    size, vocabulary = logits.shape
    rows = None
    if draw.random() < 0.5:
        rows = torch.tensor(sorted(draw.sample(range(size), size // 2)), dtype=torch.int64)
    n = size if rows is None else len(rows)
    targets = torch.randint(vocabulary, (n,), generator=generator)
    distinct = [draw.sample(range(vocabulary), K) for _ in range(n)]
    ids = torch.tensor(distinct, dtype=torch.int64).view(n, K)
    if loss.kind == "at" and n and draw.random() < 0.3:
        ids[:, 1] = ids[:, 0]
    keep_mask = torch.rand(n, vocabulary, generator=generator) < 0.7
    teacher = torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)
    student = logits if rows is None else logits[rows]
    if draw.random() < 0.3:
        teacher[draw.randrange(2) :: 2, vocabulary // 2 :] = draw.choice([-math.inf, -1e5])
    inputs = Inputs(targets, ids, rows, keep_mask if loss.kind == "kept" else None, (teacher,))
    return _of_other_rows(loss, inputs, student.flip(0), student.roll(1, 0))


def _of_other_rows(loss: Loss, inputs: Inputs, teacher: Tensor, old: Tensor) -> Inputs:
    if loss.kind == "mixture":
        return replace(inputs, teachers=(teacher, old))
    return replace(inputs, teachers=(teacher,), old=old) if loss.kind == "mutual" else inputs


def dense(loss: Loss, inputs: Inputs, logits: Tensor) -> Tensor:
    """Return the values of a loss of whole logits ``[n, V]``, in float64."""
    if loss.kind == "sum":
        return logits.double().sum()[None]
    function = FUNCTIONS[FUNCTION_OF.get(loss.kind, loss.divergence)]
    return _joined(function.formula(logits.double(), inputs, loss.temperature, None))


def ours(
    loss: Loss, inputs: Inputs, logits: Tensor, columns: slice, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the values of a loss of this rank's columns of the logits."""
    of_rows = partial(_ours, loss, inputs.of_columns(columns), group)
    if logits.is_inference() or not loss.within:  # torch itself refuses to checkpoint these
        return of_rows(logits)
    if loss.within == "checkpointed":
        return losses.checkpointed(of_rows)(logits)
    can_be_reentrant = logits.requires_grad and loss.kind != "topk"
    return checkpoint(of_rows, logits, use_reentrant=True) if can_be_reentrant else of_rows(logits)


def _ours(loss: Loss, inputs: Inputs, group: dist.ProcessGroup | None, logits: Tensor) -> Tensor:
    if loss.kind == "sum":
        return logits.sum()[None]
    if loss.kind in OF_OTHER_ROWS:
        numbers = torch.arange(len(logits)) if inputs.rows is None else inputs.rows
        others = logits.detach()[numbers.flip(0)], logits.detach()[numbers.roll(1)]
        inputs = _of_other_rows(loss, inputs, *others)
    function = FUNCTIONS[FUNCTION_OF.get(loss.kind, loss.divergence)]
    return _joined(function.call(logits, inputs, {"tp_group": group, "temperature": loss.temperature}))


def _joined(results: Sequence[Tensor]) -> Tensor:
    return torch.cat([x if x.dim() > 1 else x[:, None] for x in results], 1)
