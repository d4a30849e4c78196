"""Random programs on logits: deferred logits give the values and gradients of those that exist.

A program takes logits ``[B, S, V]`` apart and puts them together again, writes to them, reads them, and takes
losses of what results. It runs twice: on logits of :func:`torch.nn.functional.linear`, with losses by the
formulas in float64, and on deferred ones, with the losses of this package. The time is bounded. A failure
names the seed of its program, and ``PROGRAM_SEED=17`` runs that one alone.
"""

from __future__ import annotations

import os
import random
import time
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
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES
from tests.unit.losses.logits.dense import dense_log_probs_and_entropy
from tests.unit.losses.logits.dense_topk import dense_log_probs_at
from tests.unit.losses.objectives.test_divergences import dense as dense_divergence

pytestmark = pytest.mark.slow

SECONDS = 60.0
B, S, H, V = 2, 5, 4, 9
Step = Callable[[Tensor], Tensor]


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
        rows = x.dim() - 1
        kind = draw.choice(
            [
                "slice",
                "index",
                "mask",
                "cat",
                "reshape",
                "transpose",
                "split",
                "divide",
                "detach",
                "clone",
                "convert",
            ]
            * 2
            + ["write", "write alias", "divide in place", "look", "hook", "function", "no_grad", "inference"]
        )
        seed = draw.random()  # the same draws on both sides, whatever a step makes of them
        step = random.Random(seed)
        without_graph = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        mode = without_graph.get(kind, nullcontext)
        if kind in without_graph:
            kind = step.choice(["slice", "index", "clone", "reshape"])
        with mode():
            result = self._result(kind, x, rows, tensors, step)
        if result is not None:
            tensors.append(result)

    def _result(
        self, kind: str, x: Tensor, rows: int, tensors: list[Tensor], step: random.Random
    ) -> Tensor | None:
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

    def loss(self, tensors: list[Tensor], teacher: Tensor, ours: bool) -> Tensor:
        """Return the loss of some of the tensors."""
        draw = self.draw
        total = teacher.new_zeros(())
        for x in draw.choices(tensors, k=draw.randrange(1, 3)):
            flat = x.reshape(-1, V)
            kind, step = draw.choice(["scores", "at", "divergence", "sum"]), random.Random(draw.random())
            rows = torch.tensor(sorted(step.sample(range(len(flat)), len(flat) // 2)), dtype=torch.int64)
            index = step.choice([None, rows])
            n = len(flat if index is None else rows)
            values = self._values(kind, flat, index, n, teacher, step, ours)
            weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).view(values.shape)
            total = total + (weights * values).sum()
        return total

    def _values(
        self,
        kind: str,
        flat: Tensor,
        index: Tensor | None,
        n: int,
        teacher: Tensor,
        step: random.Random,
        ours: bool,
    ) -> Tensor:
        temperature = step.choice([1.0, 0.6])
        if kind == "sum":
            return flat.sum()[None]
        if kind == "scores":
            tokens = torch.tensor([step.randrange(V) for _ in range(n)], dtype=torch.int64)
            mask = torch.rand(n, V, generator=torch.Generator().manual_seed(n)) < 0.5
            options = {"rows": index, "temperature": temperature, "keep_mask": step.choice([None, mask])}
            if not ours:
                return torch.stack(dense_log_probs_and_entropy(flat, tokens, **options))  # type: ignore[arg-type]
            function = vocab_parallel_log_probs_and_entropy
            if step.random() < 0.3 and not flat.is_inference():  # torch itself refuses these
                function = checkpointed(function)
            return torch.stack(function(flat, tokens, **options))  # type: ignore[arg-type]
        if kind == "at":
            ids = torch.tensor([step.sample(range(V), 3) for _ in range(n)], dtype=torch.int64).view(n, 3)
            if not ours:
                log_probs, tail = dense_log_probs_at(flat, ids, index, temperature)
            else:
                log_probs, tail = vocab_parallel_log_probs_at(
                    flat, ids, rows=index, temperature=temperature, with_tail=True
                )
            return torch.cat([log_probs, tail[:, None]], 1)
        name = step.choice(["reverse_kl", "forward_kl", "jensen_shannon"])
        of_teacher = teacher[torch.arange(n) % len(teacher)]
        if ours:
            return full_vocabulary_divergence(
                flat,
                of_teacher,
                divergence=name,
                rows=index,
                temperature=temperature,  # type: ignore[arg-type]
            )
        chosen = flat if index is None else flat[index]
        log_p, log_q = (torch.log_softmax(x / temperature, 1) for x in (chosen, of_teacher))
        log_m = ((log_p.exp() + log_q.exp()) / 2).log()
        kl = {
            "reverse_kl": log_p.exp() * (log_p - log_q),
            "forward_kl": log_q.exp() * (log_q - log_p),
            "jensen_shannon": (log_q.exp() * (log_q - log_m) + log_p.exp() * (log_p - log_m)) / 2,
        }
        return kl[name].sum(1)


def outcome(seed: int, make: Callable[..., Tensor], ours: bool) -> tuple[Tensor, ...] | None:
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
        loss = program.loss(tensors, teacher, ours)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        has_graph = loss.requires_grad and wanted
        gradients = (
            torch.autograd.grad(loss, wanted, allow_unused=True) if has_graph else [None] * len(wanted)
        )
        pairs = zip(gradients, wanted, strict=True)
        return loss.detach(), *(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)
    except (RuntimeError, IndexError) as error:
        # torch lets a detached inference tensor be written to; deferred logits keep to its documented rule.
        if ours and "Inplace update to inference tensor" not in str(error):
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
    one = os.environ.get("PROGRAM_SEED")
    first = int(one) if one else random.SystemRandom().randrange(1 << 30)
    deadline, seed, compared = time.monotonic() + SECONDS, first, 0
    while seed == first or (one is None and time.monotonic() < deadline):
        expected = outcome(seed, product, ours=False)
        if expected is not None:
            try:
                found = outcome(seed, make, ours=True)
                for a, b in zip(expected, found or expected, strict=True):
                    torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8, equal_nan=True)
            except Exception as error:
                raise AssertionError(f"PROGRAM_SEED={seed} (the first one was {first})") from error
            compared += 1
        seed += 1
    print(f"{compared} programs from PROGRAM_SEED={first} on")


def test_random_divergences() -> None:
    """Divergences of random students and teachers, and gradients of hidden states and weight, in float64."""
    one = os.environ.get("PROGRAM_SEED")
    first = int(one) if one else random.SystemRandom().randrange(1 << 30)
    deadline, seed, compared = time.monotonic() + SECONDS / 3, first, 0
    while seed == first or (one is None and time.monotonic() < deadline):
        expected, values = divergence_and_gradients(seed)
        try:
            for a, b in zip(expected, values, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)
        except AssertionError as error:
            raise AssertionError(f"PROGRAM_SEED={seed} (the first one was {first})") from error
        compared, seed = compared + 1, seed + 1
    print(f"{compared} divergences from PROGRAM_SEED={first} on")


def divergence_and_gradients(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the formulas give, and what the package gives."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = draw.choice([name for name in DIVERGENCES if name != "generalized_kl"])
    rows, width, beta = draw.randrange(6), draw.randrange(2, 40), draw.uniform(0.05, 0.95)
    temperature, scale = draw.choice([1.0, 0.6, 1.7]), draw.choice([0.01, 1.0, 6.0])
    num_ids = draw.choice([width, draw.randrange(1, width + 1)])
    index = torch.tensor(draw.sample(range(rows), draw.randrange(rows + 1)), dtype=torch.int64)
    count = draw.choice([1, 1, 2, 3])
    shares = [draw.uniform(0.1, 1) for _ in range(count)]

    def head(rows: int) -> tuple[Tensor, Tensor]:
        hidden, weight = draw.randrange(1, 6), scale * draw.uniform(0.5, 1)
        states = torch.randn(rows, hidden, generator=generator, dtype=torch.float64)
        return states, weight * torch.randn(width, hidden, generator=generator, dtype=torch.float64)

    def logits(hidden: Tensor, weight: Tensor) -> Tensor:
        tile_bytes = 8 * draw.randrange(1, 40)
        return (
            deferred_logits(hidden, weight, tile_bytes=tile_bytes)
            if draw.random() < 0.5
            else linear(hidden, weight)
        )

    student, *others = head(rows), *(head(len(index)) for _ in range(count + 1))
    results = []
    for ours in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in student]
        if ours:
            *teachers, old = [logits(*other) for other in others]
            values = full_vocabulary_divergence(
                logits(*leaves),
                teachers,
                divergence=name,  # type: ignore[arg-type]
                beta=beta,
                teacher_weights=shares,
                old=old,
                rows=index,
                temperature=temperature,
                num_ids=num_ids,
                block_bytes=draw.choice([None, 1, 100]),
            )
        else:
            *teachers, old = [linear(*other)[:, :num_ids] / temperature for other in others]
            weights = [share / sum(shares) for share in shares]
            chosen = linear(*leaves)[index, :num_ids] / temperature
            values = dense_divergence(name, chosen, teachers, weights, old, beta)
        slopes = torch.linspace(-1, 2, len(values), dtype=torch.float64)
        results.append([values.detach(), *torch.autograd.grad((slopes * values).sum(), leaves)])
    return results[0], results[1]
