"""The losses of random programs: their formulas in float64 over the whole vocabulary, and this package's."""

import math
import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches import losses
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import slime_losses
from megatron_rl_patches.losses.output_layer import loss_of_labels
from tests.references.losses import FUNCTIONS, Inputs

from .programs import Loss

K = 3
OF_OTHER_ROWS = ("mutual", "mixture")
OF_ALL_ROWS = ("labels", "samples")
FUNCTION_OF = {"alone": "log-probs", "scores": "entropy", "kept": "entropy", "at": "at ids", "topk": "top-k"}
FUNCTION_OF |= {"labels": "log-probs", "samples": "entropy"}


def inputs_of(loss: Loss, logits: Tensor) -> Inputs:
    """Draw what a loss gets besides the logits ``[n, V]`` of all ranks."""
    draw, generator = random.Random(loss.draw), torch.Generator().manual_seed(loss.draw)
    size, vocabulary = logits.shape
    rows = None
    if draw.random() < 0.5 and loss.kind not in OF_ALL_ROWS:
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
    if loss.kind == "labels":
        return _of_labels(inputs, group, logits)
    if loss.kind == "samples":
        return _of_samples(loss, inputs, group, logits)
    function = FUNCTIONS[FUNCTION_OF.get(loss.kind, loss.divergence)]
    return _joined(function.call(logits, inputs, {"tp_group": group, "temperature": loss.temperature}))


def _of_labels(inputs: Inputs, group: dist.ProcessGroup | None, logits: Tensor) -> Tensor:
    """Return log-probabilities as multi-token prediction has them, with a sign."""

    def compute() -> Tensor:
        assert not isinstance(logits, losses.DeferredLogits), "the collectives of Megatron's are others"
        return -losses.vocab_parallel_log_probs(logits, inputs.targets, tp_group=group)[None]

    layer = Namespace(tp_group=group)
    return -loss_of_labels(compute, layer, inputs.targets[None], logits[:, None]).transpose(0, 1)


def _of_samples(loss: Loss, inputs: Inputs, group: dist.ProcessGroup | None, logits: Tensor) -> Tensor:
    """Return scores as up to slime v0.2.4, and in miles: sample after sample. One rank looks between two."""

    def framework(logits: Tensor, args: Namespace) -> Tensor:
        parts = []
        for sample in (slice(5), slice(5, None)):
            arguments = logits[0].div(loss.temperature)[sample], inputs.targets[sample], group
            call = Call(_own_code, arguments, {"with_entropy": True})
            log_probs, entropies = slime_losses.calculate_log_probs_and_entropy(call)
            parts.append(torch.cat([log_probs, entropies[:, None]], 1))
            if dist.get_rank(group) == 1:
                logits.detach().sum()
        return torch.cat(parts)

    scores: Tensor = slime_losses.get_log_probs_and_entropy(Call(framework, (logits[None], Namespace())))
    return scores


def _own_code(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> Any:
    raise AssertionError("its collectives are others")


def _joined(results: Sequence[Tensor]) -> Tensor:
    return torch.cat([x if x.dim() > 1 else x[:, None] for x in results], 1)
