"""One rank of a tensor-parallel group differs from the others: losses and gradients stay, and nobody waits.

Which collectives run follows from what every rank knows. It does not follow from whether this rank has read
the logits, holds a storage that can be overwritten, or has had an error of its own. More that one rank does,
before losses over logits, is in tests/faults/test_random_programs.py.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import slime_losses
from megatron_rl_patches.frameworks.log_probs import log_probs_and_entropy
from megatron_rl_patches.losses import (
    checkpointed,
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_and_entropy,
)
from megatron_rl_patches.losses.logits import compiling
from megatron_rl_patches.losses.output_layer import loss_of_labels
from tests.faults.programs import OPERATIONS
from tests.ranks import everywhere, on_ranks

T, H, V = 12, 6, 40
TOKENS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1))
Use = Callable[[Tensor], Any]

#: What one rank alone does with the logits ``[1, T, V / tp]``.
LOOKS: dict[str, Use] = {"waits for the gradient": lambda x: x.register_hook(lambda gradient: gradient)}
for _name in ("no operation", "read", "columns read", "stored", "nan_to_num in place"):
    LOOKS[_name] = OPERATIONS[_name]


def _upstream(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> Any:
    raise AssertionError("its collectives are others")


def _loss_of_labels(logits: Tensor, group: Any, look: Use) -> Tensor:
    look(logits)
    layer = Namespace(tp_group=group)
    return loss_of_labels(_upstream, layer, TOKENS[None], logits.transpose(0, 1)).sum()


def _slimes_loss(logits: Tensor, group: Any, look: Use) -> Tensor:
    """As up to slime v0.2.4, and in miles: sample after sample. The rank looks between two samples."""

    def framework(logits: Tensor, args: Namespace) -> Tensor:
        parts = []
        for start in (0, 5):
            chunk = logits[0].div(0.7)[start : start + 5]
            call = Call(_upstream, (chunk, TOKENS[start : start + 5], group), {"with_entropy": True})
            log_probs, entropy = slime_losses.calculate_log_probs_and_entropy(call)
            parts += [log_probs.squeeze(-1), entropy]
            look(logits)
        return torch.cat(parts).sum()

    return slime_losses.get_log_probs_and_entropy(Call(framework, (logits, Namespace())))


def _recomputed(logits: Tensor, group: Any, look: Use) -> Tensor:
    """The rank looks after forward, before backward computes the loss again."""
    log_probs = checkpointed(vocab_parallel_log_probs_and_entropy)(logits[0], TOKENS, tp_group=group)[0]
    look(logits)
    return log_probs.sum()


LOSSES = {"loss of labels": _loss_of_labels, "slime's loss": _slimes_loss, "recomputed": _recomputed}
#: A hook must be registered before the loss, and a write before what backward reads again.
LEFT_OUT = {("recomputed", "nan_to_num in place"), ("recomputed", "waits for the gradient")}
LEFT_OUT |= {("slime's loss", "waits for the gradient")}


def _gradients(loss: Callable[..., Tensor], look: Use, group: Any, deferred: bool = True) -> list[Tensor]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).double() for shape in ((1, T, H), (V, H)))
    leaves = hidden.requires_grad_(), weight.chunk(size)[rank].clone().requires_grad_()
    logits = deferred_logits(*leaves, tp_group=group) if deferred else linear(*leaves) * 1
    value = loss(logits, group, look)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@on_ranks(2, megatron=False)
def test_one_rank_has_looked() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    alone, _ = dist.new_subgroups(1)
    for (name, loss), (what, look) in product(LOSSES.items(), LOOKS.items()):
        if (name, what) in LEFT_OUT:
            continue
        value, of_hidden, of_weight = _gradients(loss, LOOKS["no operation"], alone)
        look = look if rank == 1 else LOOKS["no operation"]
        mine = _gradients(loss, look, group)
        torch.testing.assert_close(mine, [value, of_hidden, of_weight.chunk(2)[rank]])
        if name == "slime's loss":  # of logits that exist, whose model sums the gradient of hidden states
            of_value, _, of_weight_of_rank = _gradients(loss, look, group, deferred=False)
            torch.testing.assert_close([of_value, of_weight_of_rank], [value, of_weight.chunk(2)[rank]])


@on_ranks(2, megatron=False, timeout=60)
def test_one_rank_cannot_overwrite_its_logits() -> None:
    """As verl's losses, which overwrite the logits where they can."""
    rank = dist.get_rank()
    whole = torch.randn(T, V, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected, entropies = vocab_parallel_log_probs_and_entropy(whole, TOKENS)
    (expected + entropies).sum().backward()
    leaf = whole.detach().chunk(2, dim=1)[rank].contiguous().requires_grad_()
    log_probs, entropies = log_probs_and_entropy(
        leaf if rank == 1 else leaf * 1, TOKENS, dist.group.WORLD, with_entropy=True, inplace_backward=True
    )
    (log_probs + entropies).sum().backward()
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(leaf.grad, whole.grad.chunk(2, dim=1)[rank])


@on_ranks(2, megatron=False)
def test_one_rank_compiles() -> None:
    """It cuts blocks and sums in another way. Ids that one side rules out need a second pass on all ranks."""
    rank, columns = dist.get_rank(), 2048
    student, teacher = torch.randn(2, T, columns, generator=torch.Generator().manual_seed(0)).double()
    student[2, :256], teacher[1, 1100:1900] = -math.inf, -math.inf

    def values(student: Tensor, teacher: Tensor, group: Any = None) -> list[Tensor]:
        leaf = student.clone().requires_grad_()
        log_probs, entropies = vocab_parallel_log_probs_and_entropy(leaf, TOKENS, tp_group=group)
        kinds: Any = ("reverse_kl", "forward_kl", "jensen_shannon")
        divergences = [
            full_vocabulary_divergence(leaf, teacher, divergence=kind, tp_group=group) for kind in kinds
        ]
        results = torch.stack([log_probs, entropies, *divergences])
        return [results.detach(), *torch.autograd.grad(results[:, 1:].sum(), leaf)]

    expected, gradient = values(student, teacher)
    with (
        patch.object(compiling, "WORTHWHILE_ELEMENTS", 0 if rank == 0 else math.inf),
        patch.object(compiling, "_has_compiler", lambda device: True),
        patch.object(compiling, "_call_compiled", lambda function, *arguments: function(*arguments)),
    ):
        mine = (logits.chunk(2, dim=1)[rank] for logits in (student, teacher))
        results_here, gradient_here = values(*mine, group=dist.group.WORLD)
    assert all(torch.equal(results_here, other) for other in everywhere(results_here))
    torch.testing.assert_close([results_here, gradient_here], [expected, gradient.chunk(2, dim=1)[rank]])
