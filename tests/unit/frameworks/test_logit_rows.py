"""Which operations :class:`LogitRows` follows, and that it knows afterwards which rows it stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.frameworks.logit_rows import LogitRows, LogitsNeeded, call_with_rows

B, S, V = 2, 6, 5

FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[1],
    "slice of a slice": lambda x: x[0][1:5][2:],
    "negative bounds": lambda x: x[1][-3:-1],
    "no rows": lambda x: x[0][0:0],
    "a step": lambda x: x[0, ::2],
    "squeeze and unsqueeze": lambda x: x[:1].squeeze(0).unsqueeze(1),
    "view": lambda x: x.view(-1, x.size(-1))[4:9],
    "reshape": lambda x: x.reshape(B * S, V),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "split": lambda x: torch.split(x[0], [1, 3, 2])[1],
    "chunk": lambda x: x.chunk(3, dim=1)[2],
    "cat": lambda x: torch.cat([x[0, 4:], x[1, :2], x[0, 1:2]], dim=0),
    "row numbers": lambda x: x[0][torch.tensor([4, 0, 2])],
    "mask": lambda x: x[torch.arange(B * S).view(B, S) % 3 == 0],
    "mask of one dimension": lambda x: x[:, torch.arange(S) % 3 == 0],
    "contiguous, same dtype": lambda x: x[0, 1:3].contiguous().float().to(torch.float32),
    "divided": lambda x: x.div(0.7)[0, 2:],
    "divided late": lambda x: torch.cat([x[0, 2:], x[1, :2]]) / 0.7,
}


def logits_of_a_model() -> Tensor:
    return torch.randn(B, S, V, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1


@pytest.mark.parametrize("select", FOLLOWED.values(), ids=list(FOLLOWED))
def test_rows_that_are_followed_are_the_real_ones(select: Callable[[Tensor], Tensor]) -> None:
    logits = logits_of_a_model()
    expected, rows = select(logits), select(LogitRows.of(logits))
    assert isinstance(rows, LogitRows)
    assert (rows.shape, rows.dtype, rows.device) == (expected.shape, expected.dtype, expected.device)
    assert rows.requires_grad

    assert torch.equal(logits.view(-1, V)[rows.rows.reshape(-1)].view(rows.shape) / rows.divisor, expected)


NOT_FOLLOWED: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda x: x[0, 1:3] * 1.25,
    "capped": lambda x: torch.tanh(x[0, 1:3] / 30) * 30,
    "rounded": lambda x: x[0].to(torch.bfloat16),
    "written": lambda x: x[0, 1:3].div_(2),
    "clamped": lambda x: x.clamp(-1, 1),
    "shifted": lambda x: x[0] - torch.arange(V),
    "divided by a tensor": lambda x: x / torch.ones(V),
    "divided twice": lambda x: x / 0.7 / 0.9,
    "divided by a negative number": lambda x: x / -1,
    "columns": lambda x: x[..., 1:],
    "one column": lambda x: x[..., 0],
    "a mask of elements": lambda x: x[torch.arange(B * S * V).view(B, S, V) % 3 == 0],
    "a mask of elements of a sample": lambda x: x[0][torch.arange(S * V).view(S, V) % 3 == 0],
    "a value": lambda x: x[0, 0, 0].item(),
    "transposed": lambda x: x.transpose(-1, -2),
    "regrouped": lambda x: x.view(B, V, S),
    "cat along the columns": lambda x: torch.cat([x, x], dim=-1),
    "cat with something else": lambda x: torch.cat([x, torch.zeros(1, S, V)]),
    "cat of differently divided": lambda x: torch.cat([x[0], x[1] / 2]),
    "assigned": lambda x: x.__setitem__((0, 1), 0.0),
    "an argument": lambda x: torch.zeros(B, S, V) + x,
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "numpy": lambda x: x.detach().numpy(),
    "a hook": lambda x: x[0].register_hook(lambda gradient: 2 * gradient),
    "an autograd function": lambda x: Doubled.apply(x)[0],
    "printed": str,
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize("use", NOT_FOLLOWED.values(), ids=list(NOT_FOLLOWED))
def test_all_else_needs_the_logits(use: Callable[[Tensor], Any]) -> None:
    logits = logits_of_a_model()
    before = logits.detach().clone()
    rows = LogitRows.of(logits)
    with pytest.raises((LogitsNeeded, RuntimeError)):  # autograd itself refuses to write
        use(rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quotient_that_the_framework_rounds_needs_the_logits(dtype: torch.dtype) -> None:
    logits = logits_of_a_model().to(dtype)
    assert isinstance(LogitRows.of(logits) / 1.0, LogitRows)

    def divide(x: Tensor) -> Tensor:
        return x[0, 1:4] / 0.7

    found = call_with_rows(divide, logits, on_logits=lambda written: divide(logits))
    assert type(found) is Tensor and torch.equal(found, divide(logits))


def test_without_grad_mode_everything_is_tracked() -> None:
    rows = LogitRows.of(logits_of_a_model())
    with torch.no_grad():
        part = rows[0, 1:3]
        assert part.is_tracked and part[:1].is_tracked
    assert not part.is_tracked


def test_the_logits_come_in_where_they_are_needed() -> None:
    logits, calls = logits_of_a_model(), []

    def call(use: Callable[[Tensor], Any]) -> Any:
        return call_with_rows(use, logits, on_logits=lambda written: calls.append(written) or use(logits))

    assert isinstance(call(lambda x: x[0]), LogitRows)
    assert torch.equal(call(lambda x: x[0].exp()), logits[0].exp())
    call(lambda x: x[0].mul_(2))
    assert calls == [False, True]

    def catches(x: Tensor) -> Any:
        try:
            return x.exp()
        except RuntimeError:
            return "gave up"

    assert torch.equal(call(catches), logits.exp())


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, IndexError, AssertionError])
def test_an_error_of_the_rows_is_none_of_the_logits(kind: type[Exception], scored: bool) -> None:
    logits = logits_of_a_model()

    def fails_on_rows(x: Tensor) -> Tensor:
        if isinstance(x, LogitRows):
            x.source.scored = scored
            raise kind
        return x

    def raises(x: Tensor) -> Any:
        raise kind(f"given {type(x).__name__}")

    assert call_with_rows(fails_on_rows, logits, on_logits=lambda written: fails_on_rows(logits)) is logits
    with pytest.raises(kind, match="given Tensor") as caught:
        call_with_rows(raises, logits, on_logits=lambda written: raises(logits))
    assert caught.value.__context__ is None


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.distributed.DistError])
def test_an_error_of_one_rank_starts_no_collective_again(kind: type[Exception]) -> None:
    def fails(x: Any) -> Any:
        x.source.scored = True
        raise kind

    with pytest.raises(kind):
        call_with_rows(fails, logits_of_a_model(), on_logits=lambda written: pytest.fail("called again"))
