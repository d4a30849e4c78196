"""Random programs on logits: deferred logits give the values and gradients of those that exist.

A program takes logits ``[B, S, V]`` apart and puts them together again, writes to them, reads them, and takes
losses of what results. It runs twice: on logits of :func:`torch.nn.functional.linear`, and on deferred ones.
``test_losses.py`` compares the losses with their formulas. A failure names the seed of its program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    checkpointed,
    deferred_logits,
    full_vocabulary_divergence,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from megatron_rl_patches.losses.logits.deferred import rows_of_existing

pytestmark = pytest.mark.slow

PROGRAMS = 2000
B, S, H, V = 2, 5, 4, 9
OFTEN = (
    *("slice", "index", "mask", "cat", "reshape", "transpose", "split"),
    *("divide", "detach", "clone", "convert"),
)
RARELY = ("write", "write alias", "divide in place", "look", "hook", "function", "no_grad", "inference")


class ThreeTimes(torch.autograd.Function):
    """Rows whose gradient is three times what it is, as no known operation's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Program:
    """A program drawn from a seed; two instances of the same seed do the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def step(self, tensors: list[Tensor]) -> None:
        """Append a tensor made of those before, or write to one of these."""
        draw, x = self.draw, self.draw.choice(tensors)
        kind = draw.choice(OFTEN * 2 + RARELY)
        step = random.Random(draw.random())  # the same draws on both sides, whatever a step makes of them
        without_graph = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        mode = without_graph.get(kind, nullcontext)
        if kind in without_graph:
            kind = step.choice(["slice", "index", "clone", "reshape"])
        with mode():
            result = self._result(kind, x, tensors, step)
        if result is not None:
            tensors.append(result)

    def _result(self, kind: str, x: Tensor, tensors: list[Tensor], step: random.Random) -> Tensor | None:
        rows = x.dim() - 1
        if rows == 0:
            return x.unsqueeze(0)
        size = x.shape[0]
        if kind == "slice":
            dim = step.randrange(rows)
            start, stop = sorted(step.choices(range(x.shape[dim] + 1), k=2))
            part = x.narrow(dim, start, stop - start)
            return part[:: step.choice([1, 1, 2])]
        if kind == "index":
            numbers = torch.tensor([step.randrange(size) for _ in range(step.randrange(4))] if size else [])
            return x[numbers.long()] if step.random() < 0.5 else x.index_select(0, numbers.long())
        if kind == "mask":
            mask = torch.tensor([step.random() < 0.6 for _ in range(size)], dtype=torch.bool)
            return x[mask]
        if kind == "cat":
            others = [other for other in tensors if other.shape[1:] == x.shape[1:]]
            return torch.cat([x, *step.choices(others, k=step.randrange(1, 3))])
        if kind == "reshape":
            return x.reshape(-1, V) if step.random() < 0.7 else x.unsqueeze(step.randrange(rows))
        if kind == "transpose":
            return x.transpose(0, rows - 1).contiguous() if step.random() < 0.5 else x.transpose(0, rows - 1)
        if kind == "split":
            return step.choice(x.split(max(size // 2, 1))) if size else x
        if kind == "divide":
            number = step.choice([2.0, 0.7, 1.0])
            return x / (torch.tensor(number, dtype=x.dtype) if step.random() < 0.3 else number)
        if kind == "detach":
            return x.detach()
        if kind == "clone":
            return x.clone()
        if kind == "convert":
            return x.to(torch.float64)
        if kind == "function":
            return ThreeTimes.apply(x)  # type: ignore[no-untyped-call, no-any-return]
        if kind == "divide in place" and x.numel():
            x.div_(step.choice([2.0, 0.7]))
        elif kind == "write" and size:
            x[step.randrange(size)] = step.random()
        elif kind == "write alias" and x.numel():
            x[..., 2:4].mul_(1.5)
        elif kind == "look":
            step.choice([lambda: x.detach().abs().max(), lambda: x.detach().sum(), lambda: x.exp().sum()])()
        elif kind == "hook" and x.grad_fn is not None:
            x.register_hook(lambda gradient: 2 * gradient)
        return None

    def loss(self, tensors: list[Tensor], teacher: Tensor) -> Tensor:
        """Return the loss of some of the tensors."""
        draw = self.draw
        total = teacher.new_zeros(())
        for x in draw.choices(tensors, k=draw.randrange(1, 3)):
            values = self._values(x.reshape(-1, V), teacher)
            weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view(values.shape)
            total = total + (weights * values).sum()
        return total

    def _values(self, flat: Tensor, teacher: Tensor) -> Tensor:
        kind, step = (
            self.draw.choice(["scores", "at", "divergence", "sum"]),
            random.Random(self.draw.random()),
        )
        rows = torch.tensor(sorted(step.sample(range(len(flat)), len(flat) // 2)), dtype=torch.int64)
        index = step.choice([None, rows])
        n = len(flat if index is None else rows)
        options: dict[str, Any] = {"rows": index, "temperature": step.choice([1.0, 0.6])}
        if kind == "scores":
            function = vocab_parallel_log_probs_and_entropy
            if step.random() < 0.3 and not flat.is_inference():  # torch itself refuses these
                function = checkpointed(function)
            tokens = torch.tensor([step.randrange(V) for _ in range(n)], dtype=torch.int64)
            return torch.stack(function(flat, tokens, **options))
        if kind == "at":
            ids = torch.tensor([step.sample(range(V), 3) for _ in range(n)], dtype=torch.int64).view(n, 3)
            return vocab_parallel_log_probs_at(flat, ids, **options)
        if kind == "divergence":
            name = step.choice(["reverse_kl", "forward_kl", "jensen_shannon"])
            of_teacher = teacher[torch.arange(n) % len(teacher)]
            return full_vocabulary_divergence(flat, of_teacher, divergence=name, **options)
        return flat.sum()[None]


def outcome(seed: int, make: Callable[..., Tensor]) -> tuple[Tensor, ...] | None:
    """Return loss and gradients; ``None`` where torch refuses the program."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias, teacher = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((B, S, H), (V, H), (V,), (4, V))
    )
    leaves = [hidden, weight, bias]
    program = Program(seed)
    for leaf in leaves:
        leaf.requires_grad_(program.draw.random() < 0.8)
    tensors = [make(hidden, weight, bias)]
    try:
        for _ in range(program.draw.randrange(1, 9)):
            program.step(tensors)
        loss = program.loss(tensors, teacher)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        has_graph = loss.requires_grad and wanted
        gradients = (
            torch.autograd.grad(loss, wanted, allow_unused=True) if has_graph else [None] * len(wanted)
        )
        pairs = zip(gradients, wanted, strict=True)
        return loss.detach(), *(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)
    except (RuntimeError, IndexError) as error:
        # torch lets a detached inference tensor be written to; deferred logits keep to its documented rule.
        if make is not product and "Inplace update to inference tensor" not in str(error):
            raise
        assert "megatron_rl_patches" not in str(error)
        return None


def product(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # No view: a hook of a view is lost when somebody writes to it.
    return linear(hidden, weight, bias).clone()


def existing(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return rows_of_existing(product(hidden, weight, bias))


@pytest.mark.parametrize(
    "make",
    [lambda h, w, b: deferred_logits(h, w, bias=b, tile_bytes=8 * 16), existing],
    ids=["of an output layer", "that exist"],
)
def test_random_programs(make: Callable[..., Tensor]) -> None:
    for seed in range(PROGRAMS):
        expected = outcome(seed, product)
        if expected is None:
            continue
        try:
            found = outcome(seed, make)
            torch.testing.assert_close(found or expected, expected, rtol=1e-8, atol=1e-8, equal_nan=True)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
