"""Log-probabilities of targets and of ids, tails, entropies and top-k, against the formulas in float64.

tests/faults and tests/real have those at ids and the top-k with all dtypes and options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.objectives.distributions import log1mexp
from megatron_rl_patches.losses.vocab.arguments import as_slices
from megatron_rl_patches.losses.vocab.softmax import merged
from tests.references.dense import IGNORE, dense_log_probs_and_entropy, errors, relative_error
from tests.references.dense_topk import dense_log_probs_at, random_indices
from tests.references.live_bytes import live_bytes

from .pairwise import pairwise

FLOAT32 = 2e-6
GRADIENT_BOUND = {torch.float32: FLOAT32, torch.float64: 1e-9, torch.float16: 1e-3, torch.bfloat16: 5e-3}
T, V = 13, 1003  # a prime number of rows, and no power of two divides the columns
INF = float("inf")


def random_logits(rows: int = T, columns: int = V, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all temperaments: rows from next to uniform to next to one-hot, each with an offset of its own."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1.5, rows)[:, None]
    return (logits + torch.linspace(-100, 200, rows)[:, None]).to(dtype)


def random_targets(rows: int = T, columns: int = V) -> Tensor:
    targets = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(1))
    targets[:2] = torch.tensor([0, columns - 1])[:rows]
    return targets


def check(logits: Tensor, targets: Tensor, fused: bool = False, **options: Any) -> None:
    found = errors(logits, targets, fused=fused, **options)
    values = GRADIENT_BOUND[torch.float64] if logits.dtype == torch.float64 else FLOAT32
    assert found.log_prob <= values
    assert found.entropy <= values
    assert found.gradient <= GRADIENT_BOUND[logits.dtype]


KEEP = torch.rand(T, V, generator=torch.Generator().manual_seed(2)) < 0.2
OPTIONS: dict[str, Sequence[Any]] = {
    "rows": [
        *(None, slice(3, 11), slice(-4, None), slice(None, None, 2), slice(5, 5), slice(5, 2, 2)),
        *(torch.arange(T - 1, -1, -1), torch.tensor([7, 3, 12, 0]), torch.arange(2, 9)),
    ],
    "dtype": list(GRADIENT_BOUND),
    "temperature": [1.0, 1.7, 0.3],
    "kept": [False, True],
    "entropy_grad": [False, True],
    "inplace_backward": [False, True],
    "block_bytes": [None, 1, 3 * V * 4],
    "vocab_size": [None, V, V - 3, 768, 5],
}


def check_case(case: dict[str, Any], fused: bool = False) -> None:
    logits, size = random_logits(dtype=case["dtype"]), case["vocab_size"] or V
    logits[:, size:] = math.nan
    n = len(torch.arange(T)[slice(None) if case["rows"] is None else case["rows"]])
    targets = random_targets(columns=size)[:n]
    targets[n // 2 : n // 2 + 1] = IGNORE
    options = {name: value for name, value in case.items() if name not in ("dtype", "kept")}
    check(logits, targets, fused, keep_mask=KEEP[:n] if case["kept"] else None, **options)


@pytest.mark.parametrize("case", pairwise(OPTIONS), ids=lambda case: f"{case['dtype']}"[6:])
def test_equals_the_dense_formulas(case: dict[str, Any]) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
def test_compiled_equals_the_dense_formulas() -> None:
    """In one test, since a process reuses compiled functions."""
    options = {**OPTIONS, "dtype": [torch.float32, torch.bfloat16], "temperature": [1.0, 1.7]}
    options |= {"block_bytes": [None], "rows": [None, torch.tensor([7, 3, 12, 0])]}
    for case in pairwise(options):
        check_case(case, fused=True)


SLICES = [slice(0, 2), slice(3, 8), slice(9, 10), slice(11, 13)]
NUMBERS = torch.tensor([0, 1, 3, 4, 5, 6, 7, 9, 11, 12])
DEFERRED = partial(deferred_logits, weight=torch.eye(V))
OF_ROWS: tuple[Callable[..., tuple[Tensor, ...]], ...] = (
    lambda x, **options: vocab_parallel_log_probs_and_entropy(x, random_targets(10), **options),
    lambda x, **options: vocab_parallel_log_probs_at(x, random_indices(10, 4, V), with_tail=True, **options),
    lambda x, **options: (vocab_parallel_topk(x, 5, **options).log_probs,),
)


@pytest.mark.parametrize("of_rows", OF_ROWS)
@pytest.mark.parametrize("make", [lambda x: x * 1, DEFERRED], ids=["", "deferred"])
def test_rows_of_slices_are_those_with_their_numbers(
    make: Callable[[Tensor], Tensor], of_rows: Callable[..., tuple[Tensor, ...]]
) -> None:
    def outcome(rows: Any, **options: Any) -> list[Tensor]:
        leaf = random_logits().requires_grad_()
        values = of_rows(make(leaf), rows=rows, **options)
        trained = [x.sum() for x in values if x.requires_grad]
        return [*values, *(torch.autograd.grad(sum(trained), leaf) if trained else ())]

    expected = outcome(NUMBERS)
    in_place = [] if make is DEFERRED or of_rows is OF_ROWS[2] else [{"inplace_backward": True}]
    for options in ({}, {"block_bytes": 2 * V * 4}, *in_place):
        # Sums of columns depend on where a row lies in memory.
        torch.testing.assert_close(outcome(SLICES, **options), expected, rtol=2e-6, atol=1e-6)


def test_long_runs_of_numbers_are_slices() -> None:
    first, second = torch.arange(3, 40), torch.arange(50, 60)
    assert as_slices(torch.cat([first, second])) == (slice(3, 40), slice(50, 60))
    assert as_slices(first) == slice(3, 40)
    for rows in (torch.cat([second, first]), first[::2], NUMBERS):
        assert as_slices(rows) is rows


def test_equal_parts_are_counted_whatever_the_default_dtype_is() -> None:
    """bfloat16 has no number between 996 and 1000."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        statistics = merged(list(torch.zeros(1000, 2, 1, dtype=torch.float64)), 1.0)
    finally:
        torch.set_default_dtype(default)
    assert statistics.tolist() == [[0.0], [999.0]]


ONE_HOT = torch.full((4, V), -1e4).index_fill_(1, torch.tensor([7]), 1e4)
EXTREMES: dict[str, Tensor] = {
    "one_hot": ONE_HOT,
    "one_hot_upside_down": -ONE_HOT,
    "large_and_small": torch.linspace(-1e4, 1e4, V).repeat(4, 1),
    "large_and_random": torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 1e4,
    "equal": torch.full((4, V), 3.0),
    "zero": torch.zeros(4, V),
    "equal_and_large": torch.full((4, V), -1e4),
    "masked_entries": random_logits(4).index_fill(1, torch.arange(0, V, 3), -INF),
    "all_but_the_target": torch.full((4, V), -INF).index_fill_(1, torch.tensor([7]), 2.0),
    "two_equal": ONE_HOT.index_fill(1, torch.tensor([8]), 1e4),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("logits", EXTREMES.values(), ids=EXTREMES)
def test_extreme_logits(logits: Tensor, fused: bool) -> None:
    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.bfloat16, 0.5)):
        logits = logits.to(dtype)
        targets = torch.tensor([7, 7, IGNORE, 7])
        check(logits, targets, fused, temperature=temperature)
        keep_mask = torch.zeros(4, V, dtype=torch.bool)
        check(logits, targets, fused, temperature=temperature, keep_mask=keep_mask)
        if logits[0, 8].isfinite():
            check(logits, torch.tensor([8, V - 2, 7, 1]), fused, temperature=temperature)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("margin", "bound"), [(20.0, FLOAT32), (40.0, FLOAT32), (75.0, 2 * FLOAT32)])
def test_next_to_certain(margin: float, bound: float, kept: bool) -> None:
    """Tiny log-probabilities, entropies and gradients keep their digits, where ``1 - p`` has none left."""
    logits = torch.full((2, V), -300.0).index_fill_(1, torch.tensor([7]), margin - 300).requires_grad_()
    keep_mask = torch.ones(2, V, dtype=torch.bool) if kept else None
    values, entropies = vocab_parallel_log_probs_and_entropy(
        logits, torch.tensor([7, 7]), keep_mask=keep_mask, entropy_grad=False
    )
    values.sum().backward()
    rest = torch.tensor(-margin, dtype=torch.float64).exp()
    log_total = ((V - 1) * rest).log1p()
    entropy = log_total + (V - 1) * rest * margin / (1 + (V - 1) * rest)
    assert torch.allclose(values.double(), -log_total, rtol=bound, atol=0)
    assert torch.allclose(entropies.double(), entropy, rtol=bound, atol=0)
    expected = -rest / (1 + (V - 1) * rest) * torch.ones(V, dtype=torch.float64)
    expected[7] *= -(V - 1)
    assert torch.allclose(logits.grad.double(), expected, rtol=bound, atol=0)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 64, 32000, 18992, 5003])
def test_widths(columns: int) -> None:
    for rows in (1, 3):
        check(random_logits(rows, columns), torch.arange(rows) % columns)


def test_some_of_the_gradients_or_none() -> None:
    for index in (0, 1):
        mine, dense = (random_logits().to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
        vocab_parallel_log_probs_and_entropy(mine, random_targets())[index].sum().backward()
        dense_log_probs_and_entropy(dense, random_targets())[index].sum().backward()
        assert relative_error(mine.grad, dense.grad, dense.grad.abs().amax(1, keepdim=True)) <= FLOAT32
    logits = random_logits()
    assert not vocab_parallel_log_probs(logits, random_targets()).requires_grad
    with torch.no_grad():
        values = vocab_parallel_log_probs(logits.requires_grad_(), random_targets(), inplace_backward=True)
    assert not values.requires_grad
    with torch.inference_mode():
        assert vocab_parallel_log_probs(random_logits(), random_targets()).equal(values)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("block_bytes", [1, 3 * V, 5000, 1 << 16])
def test_the_block_size_does_not_change_a_bit(block_bytes: int, temperature: float) -> None:
    """Megatron pads the vocabulary, so no column is left over from vectors of up to 32."""
    logits = random_logits(dtype=torch.float64).repeat(1, 32)
    of_blocks = []
    for size in (block_bytes, 1 << 30):
        leaf = logits.clone().requires_grad_()
        values = vocab_parallel_log_probs_and_entropy(
            leaf, random_targets(), temperature=temperature, block_bytes=size, fused=False
        )
        of_blocks.append([*values, *torch.autograd.grad(values[0].sum() + 2 * values[1].sum(), leaf)])
    assert all(map(torch.equal, *of_blocks))


RESULTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "entropy": lambda x: vocab_parallel_log_probs_and_entropy(x, random_targets()),
    "tail": lambda x: vocab_parallel_log_probs_at(x, random_targets()[:, None], with_tail=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("results_of", RESULTS.values(), ids=list(RESULTS))
def test_results_may_be_changed_in_place(
    results_of: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype
) -> None:
    logits = random_logits(dtype=dtype).requires_grad_()
    results = results_of(logits)
    [expected] = torch.autograd.grad(2 * results[0].sum() + results[1].sum(), logits)
    log_probs, others = results_of(logits)
    log_probs.unsqueeze(-1).squeeze(-1).mul_(2)
    others += 1
    [gradient] = torch.autograd.grad(log_probs.sum() + others.sum(), logits)
    assert gradient.equal(expected)


def test_a_second_derivative_is_refused() -> None:
    """Rather than taking the gradient for a constant. To ask for its graph alone is no error."""
    logits = random_logits(4, 9, torch.float64).requires_grad_()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    values = vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.int64))
    [expected] = torch.autograd.grad(values.sum(), logits, retain_graph=True)
    for loss, source in ((values.sum(), logits), ((values * weight).sum(), weight)):
        [gradient] = torch.autograd.grad(loss, logits, create_graph=True)
        assert gradient.requires_grad and gradient.equal(expected)
        with pytest.raises(InvalidInputError, match="differentiated twice"):
            torch.autograd.grad(gradient.sum(), source)


# --- top-k, and log-probabilities at ids


@pytest.mark.parametrize(("width", "k"), [(4096, 64), (4097, 64), (4127, 3), (4095, 64), (20, 5)])
def test_wide_rows_whose_largest_values_stand_anywhere(width: int, k: int) -> None:
    """Evenly spread, all together, at the end, equal, and next to a NaN."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, width, generator=generator)
    logits[1, 7 : 7 + k] += 10
    logits[2, -k:] += 10
    logits[3] = logits[3].round()
    logits[4, ::2] = -INF
    largest = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert vocab_parallel_topk(logits, k).indices.equal(largest)
    assert vocab_parallel_topk(torch.zeros(2, 50_000), 7).indices.tolist() == [list(range(7))] * 2
    logits[5, width // 2] = float("nan")
    assert all(len(set(row.tolist())) == k for row in vocab_parallel_topk(logits, k).indices)


def test_a_topk_takes_little_memory_and_has_no_graph() -> None:
    """Candidates and a few blocks, not the vocabulary; the logits stay."""
    logits = torch.randn(256, 32768, requires_grad=True)
    before = logits.detach().clone()
    assert not vocab_parallel_topk(logits, 3).log_probs.requires_grad
    assert logits.equal(before)
    assert live_bytes(lambda: vocab_parallel_topk(logits, 64)).peak <= 0.1 * logits.numel() * 4


def test_distributions_are_split_joined_and_selected() -> None:
    whole, other = (vocab_parallel_topk(random_logits(), k) for k in (4, 3))
    parts = whole.split([3, 0, T - 3])
    assert [len(part) for part in parts] == [3, 0, T - 3]
    assert all(map(torch.equal, TopKDistribution.cat(parts).tensors, whole.tensors))
    rows = torch.tensor([5, 1])
    assert whole[rows].indices.equal(whole.indices[rows])
    assert whole[2:4].tail_log_prob.equal(whole.tail_log_prob[2:4])
    assert whole.to("cpu")[whole.tail_log_prob < -INF].k == whole.k == 4
    for distributions in ([whole, other], []):
        with pytest.raises(InvalidInputError, match="of different k"):
            TopKDistribution.cat(distributions)


def test_log1mexp() -> None:
    x = -torch.logspace(-12, 2, 200, dtype=torch.float64)
    expected = torch.where(x > -0.1, (-torch.special.expm1(x)).log(), torch.log1p(-x.exp()))
    assert torch.allclose(log1mexp(x), expected, rtol=1e-12)
    assert torch.autograd.gradcheck(log1mexp, -torch.linspace(0.1, 5, 9).double().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_lost_tail_has_no_gradient(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1e-7, -1e-45, -INF, -1.0], dtype=dtype, requires_grad=True)
    found = log1mexp(x)
    assert (found[:2] == -INF).all() and found[3] == 0
    [gradient] = torch.autograd.grad(found[:2].sum() + found[3:].sum(), x)
    assert (gradient[[0, 1, 3]] == 0).all()
    assert gradient[4] == pytest.approx(-1 / (torch.tensor(1.0).exp() - 1))
    assert torch.autograd.grad(log1mexp(x).sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("mass", [1e-1, 1e-5, 1e-7, 1e-30])
def test_a_small_tail_keeps_its_digits(mass: float) -> None:
    """Value and gradient to 5e-6, where ``log(1 - sum(p))`` has no digit left from 1e-7 on."""
    torch.manual_seed(0)
    logits = torch.randn(6, 32768)
    indices = torch.stack([torch.randperm(32768)[:64] for _ in logits])
    probability = torch.log_softmax(logits.double(), 1).gather(1, indices).exp().sum(1, keepdim=True)
    lift = torch.log(probability / (1 - probability) * mass / (1 - mass))
    logits = logits.scatter_add(1, indices, -lift.float().expand(-1, 64).contiguous())

    exact, leaf = logits.double().requires_grad_(), logits.clone().requires_grad_()
    _, expected = dense_log_probs_at(exact, indices)
    assert torch.allclose(expected.exp(), torch.full_like(expected, mass), rtol=1e-3, atol=0)
    _, tail = vocab_parallel_log_probs_at(leaf, indices, with_tail=True)
    expected.sum().backward()
    tail.sum().backward()
    # Of the probability, whose relative error is the absolute one of its logarithm but for what float32
    # can say of the latter; and of each derivative.
    resolution = expected.abs().max().item() * 2**-24
    assert relative_error(tail, expected, torch.ones(())) <= 5e-6 + resolution
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, indices, False)
    assert relative_error(leaf.grad[outside], exact.grad[outside], exact.grad[outside].abs()) <= 5e-6
    scale = exact.grad.abs().amax(1, keepdim=True)
    assert relative_error(leaf.grad, exact.grad, scale) <= 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tail_next_to_one(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 32768, dtype=dtype)
    logits[0, :64] = -25.0
    inside = torch.tensor(-25.0, dtype=torch.float64).exp() * 64 / (32768 - 64)
    _, tail = vocab_parallel_log_probs_at(logits, torch.arange(64)[None], with_tail=True)
    assert torch.allclose(tail.double(), -inside.log1p(), rtol=1e-6, atol=0)


def test_a_mixed_use_of_the_gradients() -> None:
    """Only the ids', only the tail's, and weights of which autograd says nothing are all allowed for."""
    logits, indices = random_logits(5).requires_grad_(), random_indices(5, V, 4)
    log_probs, tail = vocab_parallel_log_probs_at(logits, indices, with_tail=True)
    of_ids, of_tail, of_both = (
        torch.autograd.grad(loss, logits, retain_graph=True)[0]
        for loss in (log_probs[0].sum(), tail.sum(), log_probs[0].sum() + tail.sum())
    )
    assert torch.allclose(of_ids + of_tail, of_both, atol=1e-6)
    assert (of_ids[1:] == 0).all()
