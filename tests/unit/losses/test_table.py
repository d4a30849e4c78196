"""Every function of logits × where they come from × options × dtype, against the formulas in float64.

Then what holds of each function, and what is peculiar to log-probabilities, entropies and top-k.

``tests/references/losses.py`` has functions, formulas and sources; ``tests/real/test_losses_on_ranks.py`` has
the same table on ranks.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses.vocab.arguments import as_slices
from megatron_rl_patches.losses.vocab.softmax import merged
from tests.references.dense import IGNORE, dense_log_probs_at, random_indices, selected
from tests.references.live_bytes import live_bytes
from tests.references.losses import (
    FULL_DIVERGENCES,
    FUNCTIONS,
    HALVES,
    OWN_STORAGE,
    SOURCES,
    STRIDES,
    Errors,
    Inputs,
    error,
    largest,
    measure,
)
from tests.unit.losses.vocab.pairwise import pairwise
from tests.unit.losses.vocab.sizes import Sizes

T, V = 13, 1003  # a prime number of rows, and no power of two divides the columns
INF = math.inf
FLOAT32 = 2e-6
#: Of values, and of gradients.
BOUND = {torch.float64: 1e-9, torch.float32: FLOAT32, torch.float16: FLOAT32, torch.bfloat16: FLOAT32}
GRADIENT_BOUND = {**BOUND, torch.float16: 1e-3, torch.bfloat16: 5e-3}
ROWS: list[Any] = [
    *(None, slice(3, 11), slice(-4, None), slice(None, None, 2), slice(5, 5), slice(5, 2, 2)),
    *(torch.arange(T - 1, -1, -1), torch.tensor([7, 3, 12, 0]), torch.arange(2, 9)),
    [slice(0, 2), slice(3, 8), slice(9, 10), slice(11, 13)],
]
TABLE: dict[str, Sequence[Any]] = {
    "function": list(FUNCTIONS),
    "source": ["existing", "overwritten", *(name for name in SOURCES if name not in STRIDES)],
    "rows": ROWS,
    "dtype": list(BOUND),
    "temperature": [1.0, 1.7, 0.3],
    "kept": [False, True],
    "masked": [None, slice(3, V // 2), slice(300, 310)],  # columns
    "teachers": [1, 2],
    "k": [5, 2, V // 2 + 100, V],
    "block_bytes": [None, 1, 3 * V * 4],
    "vocab_size": [None, V, V - 3, 768, 5],
}


def random_logits(rows: int = T, columns: int = V, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all temperaments: rows from next to uniform to next to one-hot, each with an offset of its own."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1.5, rows)[:, None]
    return (logits + torch.linspace(-100, 200, rows)[:, None]).to(dtype)


def random_targets(rows: int = T, columns: int = V) -> Tensor:
    """First and last columns of each quarter, and any."""
    targets = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(1))
    starts = torch.arange(0, columns - 3, columns // 4 or 1)
    borders = torch.cat([torch.tensor([0, columns - 1]), starts[1:], starts[1:] - 1])[:rows]
    targets[: len(borders)] = borders.clamp(max=columns - 1)
    return targets


def inputs_of(
    rows: Any,
    columns: int,
    size: int,
    *,
    rows_of_all: int = T,
    k: int = 5,
    kept: bool = False,
    teachers: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Return inputs for logits ``[rows_of_all, columns]`` of ``size`` ids; one target is none."""
    n = len(selected(torch.arange(rows_of_all), rows))
    targets, k = random_targets(n, size), min(k, size)
    ids = random_indices(n, size, k) if n else torch.zeros(0, k).long()
    targets[n // 2 : n // 2 + 1] = IGNORE
    keep_mask = torch.rand(n, columns, generator=torch.Generator().manual_seed(2)) < 0.2 if kept else None
    old, *others = torch.randn(teachers + 1, n, columns, generator=torch.Generator().manual_seed(3)).to(dtype)
    return Inputs(targets, ids, rows, keep_mask, tuple(others), old=old)


def name_of(case: dict[str, Any]) -> str:
    return f"{case['function']}, {case['source']}, {str(case['dtype'])[6:]}"


def check(case: dict[str, Any], width: int = V, **of_call: Any) -> Errors:
    """Check a row of the table; options that its function or its source does not have are left out."""
    name, source, dtype = case["function"], case["source"], case["dtype"]
    has, size = FUNCTIONS[name].options, case["vocab_size"] or width
    # Deferred logits stay as they are with inplace_backward, too.
    in_place = source == "overwritten" or (source not in STRIDES and case["teachers"] == 2)
    in_place = in_place and "inplace_backward" in has
    source = "existing" if source == "overwritten" else source
    if "divided" in source and dtype in HALVES:
        dtype = torch.float32  # a quotient is rounded, and materialized: see test_deferred.py
    elif "in float32" in source and dtype not in HALVES:
        dtype = torch.bfloat16
    is_divergence = name in FULL_DIVERGENCES
    logits = random_logits(T, width, dtype)
    if is_divergence:  # no rows next to one-hot, whose gradients are small differences of large numbers
        logits = torch.randn(T, width, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits[:, size:] = math.nan
    of_case = {name: case[name] for name in ("rows", "k", "teachers")}
    kept = case["kept"] and "keep_mask" in has
    inputs = inputs_of(columns=width, size=size, kept=kept, dtype=dtype, **of_case)
    masked = case["masked"]
    if masked is not None and size > masked.stop + 100:  # many ids are left; a teacher rules others out
        logits[:, masked] = -INF
        inputs.teachers[-1][:, masked.start + 90 : masked.stop + 90] = -INF
    if case["vocab_size"] and "group" not in of_call:  # on ranks see test_losses_on_ranks.py
        padded = tuple(torch.nn.functional.pad(x, (0, 26), value=math.nan) for x in inputs.teachers)
        inputs = replace(inputs, teachers=padded)
    chosen = torch.isin(torch.arange(T), selected(torch.arange(T), case["rows"]))
    logits[~chosen] = math.nan  # which any use would show
    options = {"inplace_backward": True} if in_place else {}
    of_call |= {name: case[name] for name in ("temperature", "vocab_size", "block_bytes")}
    is_product = source.startswith("product")
    if is_divergence or is_product:  # a low temperature enlarges the roundings of products
        of_call["temperature"] = max(0.7, case["temperature"])
    worst = measure(name, logits, inputs, source, **of_call, **options)
    of_values, of_gradient = [BOUND[dtype]] * len(worst.values), GRADIENT_BOUND[dtype]
    if dtype == torch.float64:
        if is_divergence or is_product:
            of_values = [1e-10] * len(of_values)
        elif name == "at ids":  # the tail of rows next to one-hot is a small difference
            of_values = [1e-10, 1e-9]
        of_gradient = 1e-10 if name == "at ids" or is_product else of_gradient
    if is_divergence:  # a small difference of two numbers
        of_gradient = 10 * GRADIENT_BOUND[dtype]
    if is_product and dtype in HALVES:
        of_gradient = 1e-2
    assert all(x <= bound for x, bound in zip(worst.values, of_values, strict=True)), worst
    assert worst.gradient <= of_gradient, worst
    return worst


def check_targets(logits: Tensor, **options: Any) -> None:
    """Check log-probabilities and entropies of targets; one is none."""
    targets = random_targets(*logits.shape)
    worst = measure("entropy", logits, Inputs(targets, targets[:, None]), **options)
    assert worst.value <= BOUND[logits.dtype] and worst.gradient <= GRADIENT_BOUND[logits.dtype]


@pytest.mark.parametrize("case", pairwise(TABLE), ids=name_of)
def test_values_and_gradients(case: dict[str, Any]) -> None:
    check(case)


NO_IDS = torch.zeros(3, 0, dtype=torch.int64)


#: Each way to rule ids out meets each dtype, size of blocks and number of teachers.
RULED_OUT: dict[str, Sequence[Any]] = {
    "way": list(
        product(
            ("existing", "deferred", "deferred, frozen"),
            ("student", "teacher", "old"),
            (-3e3, torch.finfo(torch.float32).min, -INF),
            (slice(0, 512), slice(300, 310)),
        )
    ),
    "dtype": [torch.float32, torch.float64],
    "block_bytes": [None, 1],
    "weights": [None, (3.0, 7.0)],
}


@pytest.mark.parametrize("name", FULL_DIVERGENCES)
def test_divergences_where_ids_are_ruled_out(name: str) -> None:
    """Large negative logits count as ruled out. Their mask covers whole tiles, or a part of one."""
    for case in pairwise(RULED_OUT):
        (source, who, mask, columns), weights = case["way"], case["weights"]
        logits = torch.randn(4, 3, 600, generator=torch.Generator().manual_seed(0)).to(case["dtype"])
        logits[("student", "teacher", "old").index(who)][:, columns] = mask
        student, teacher, old, other = logits
        teachers = (teacher, other) if weights else (teacher,)
        inputs = Inputs(NO_IDS[0], NO_IDS, teachers=teachers, teacher_weights=weights, old=old)
        worst = measure(name, student, inputs, source, temperature=0.7, block_bytes=case["block_bytes"])
        bound = 1e-10 if case["dtype"] == torch.float64 else FLOAT32
        assert worst.value < bound and worst.gradient < 3 * bound, (case, worst)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
def test_compiled() -> None:
    """In one test, since a process reuses compiled functions."""
    table = {**TABLE, "function": ["entropy", "entropy as a metric"], "source": ["existing", "overwritten"]}
    table |= {"dtype": [torch.float32, torch.bfloat16], "temperature": [1.0, 1.7], "block_bytes": [None]}
    for case in pairwise({**table, "rows": [None, torch.tensor([7, 3, 12, 0])]}):
        check(case, fused=True)


# --- logits of any value

ONE_HOT = torch.full((4, V), -1e4).index_fill_(1, torch.tensor([7]), 1e4)
EXTREMES: dict[str, Tensor] = {
    "one-hot": ONE_HOT,
    "one-hot upside down": -ONE_HOT,
    "large and small": torch.linspace(-1e4, 1e4, V).repeat(4, 1),
    "large and random": torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 1e4,
    "zero": torch.zeros(4, V),
    "equal and large": torch.full((4, V), -1e4),
    "masked entries": random_logits(4).index_fill(1, torch.arange(0, V, 3), -INF),
    "all but the target": torch.full((4, V), -INF).index_fill_(1, torch.tensor([7]), 2.0),
    "two equal": ONE_HOT.index_fill(1, torch.tensor([8]), 1e4),
    "wide": random_logits(4, 18992),
    "half ruled out": random_logits(4).index_fill(1, torch.arange(V // 2), -INF),
}
NO_MASK, NOTHING_KEPT = None, torch.zeros(4, 18992, dtype=torch.bool)


def check_extreme(logits: Tensor, fused: bool, **options: Any) -> None:
    """Targets are the likeliest id, others, and none; kept are all columns, or none but the target."""
    targets = [torch.tensor([7, 7, IGNORE, 7])]
    if logits[0, 8].isfinite():
        targets.append(torch.tensor([8, logits.shape[1] - 2, 7, 1]))
    ids = torch.tensor([[7, 0, 7], [6, 999, 2], [5, IGNORE, 4], [IGNORE] * 3])
    for some, keep_mask in product(targets, (NO_MASK, NOTHING_KEPT)):
        mask = None if keep_mask is None else keep_mask[:, : logits.shape[1]]
        worst = measure("entropy", logits, Inputs(some, ids, keep_mask=mask), fused=fused, **options)
        assert worst.value <= FLOAT32 and worst.gradient <= GRADIENT_BOUND[logits.dtype], worst
    for name in ("at ids", "top-k"):
        worst = measure(name, logits, Inputs(targets[0], ids), strange=True, **options)
        assert worst.value <= FLOAT32 and worst.gradient <= max(5e-6, GRADIENT_BOUND[logits.dtype]), worst


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_logits(name: str, fused: bool) -> None:
    for dtype, temperature in ((torch.float32, 1.0), (torch.float32, 0.5), (torch.bfloat16, 0.5)):
        check_extreme(EXTREMES[name].to(dtype), fused, temperature=temperature)


ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SCALES = (0.0, 1e-41, 1e-3, 1.0, 30.0, 6e4, 1e30)
STRANGE: dict[str, Sequence[Any]] = {
    "dtype": list(ROUNDING),
    "source": [*STRIDES, "deferred, frozen"],
    "width": [1, 2, 3, 31, 32, 33, 64, 257, 1100],  # the last is two tiles
    "rows": [None, slice(3, 11), torch.tensor([10, 2, 7, 0, 5]), slice(4, 4)],
    "temperature": [1.0, 0.25, 3.0],
    "block_bytes": [None, 1, 4096],
    "seed": [0, 1, 2],
    "inplace_backward": [False, True],
}
#: What each case has: all functions, with and without a keep-mask, of one id and of several.
STRANGE_USES = list(
    product([name for name in FUNCTIONS if name not in FULL_DIVERGENCES], ((1, False), (2, True), (5, False)))
)


def strange_logits(rows: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return logits of many magnitudes, with NaN and infinities in most rows."""
    # The reference divides float64 by temperatures, which must not overflow.
    most = min(torch.finfo(dtype).max, 1e100)
    poisons = torch.tensor([math.nan, INF, -INF, 0.0, -0.0, most, -most, 1.0])
    scales = torch.tensor(SCALES, dtype=torch.float64)[torch.randint(7, (rows, 1), generator=generator)]
    values = torch.randn(rows, width, dtype=torch.float64, generator=generator) * scales
    order = torch.randperm(rows, generator=generator)
    columns = torch.randint(width, (8,), generator=generator)
    values[order[:8], columns] = poisons.double()
    values[order[8], :], values[order[9], :] = -INF, poisons[int(columns[0]) % 3]
    return values.clamp(-most, most).where(values.isfinite(), values).to(dtype)


@pytest.mark.parametrize(
    "case", pairwise(STRANGE), ids=lambda case: f"{case['source']}, {str(case['dtype'])[6:]}"
)
def test_strange_logits(case: dict[str, Any]) -> None:
    """NaN and infinities propagate as in the formulas: they spoil their own row and no other.

    Where the definition is silent, these rules hold:

    * a row whose values get a gradient of zero has a gradient of zero, whatever its logits are (autograd says
      NaN there, as 0 * NaN is, and so do rows that a loss mask leaves out);
    * where a row's gradient is NaN, it may be so too in columns that the keep-mask leaves out;
    * of a row with NaN or +inf the tail is NaN, also where no id is left for it, and the top-k ids are some
      valid ids, each once.
    """
    for name, (k, kept) in STRANGE_USES:
        check_strange(name, case, k, kept)


def check_strange(name: str, case: dict[str, Any], k: int, kept: bool, **of_rank: Any) -> None:
    rows, width, source = case["rows"], case["width"], case["source"]
    width = max(width, 2) if source not in STRIDES else width  # a transpose of one column materializes
    generator = torch.Generator().manual_seed(case["seed"])
    logits = strange_logits(12, width, case["dtype"], generator)
    if source not in STRIDES:  # of products one NaN or infinity of hidden states makes a row NaN
        logits[~logits.isfinite().all(1)] = math.nan
        logits[:, ::3] = -INF
    n, has = len(selected(torch.arange(12), rows)), FUNCTIONS[name].options
    ids = torch.randint(width, (n, (min(k, width) if name == "top-k" else k) + 1), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = IGNORE
    keep_mask = torch.rand(n, width, generator=generator) < 0.5
    inputs = Inputs(ids[:, 0], ids[:, 1:], rows, keep_mask if kept and "keep_mask" in has else None)
    options = {name: case[name] for name in ("temperature", "block_bytes")} | of_rank
    if case["inplace_backward"] and "inplace_backward" in has:
        options["inplace_backward"] = True
        if source in STRIDES and source not in OWN_STORAGE:
            with pytest.raises(InvalidInputError, match="a storage of their own"):
                measure(name, logits, inputs, source, **options)
            return
    worst = measure(name, logits, inputs, source, strange=True, **options)
    assert worst.value <= ROUNDING[torch.float64 if case["dtype"] == torch.float64 else torch.float32], worst
    assert worst.gradient <= ROUNDING[case["dtype"]], worst


# --- what holds of each function, wherever its logits come from

WITH_GRADIENT = [name for name in FUNCTIONS if name != "top-k"]
BY_SOURCE = pytest.mark.parametrize(
    ("name", "source"), list(product(WITH_GRADIENT, ("existing", "deferred", "product")))
)
Results = tuple[Sequence[Tensor], Sequence[Tensor]]


def results_of(
    name: str,
    source: str,
    shape: tuple[int, int] = (T, 96),
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    **options: Any,
) -> Results:
    """Return results that require a gradient, and the leaves of the logits."""
    logits = random_logits(*shape, dtype) / 10
    inputs = inputs_of(slice(0, shape[0]), shape[1], shape[1], rows_of_all=shape[0], dtype=dtype)
    inputs = inputs if source == "existing" else inputs.deferred()
    made = SOURCES[source](logits, torch.ones(shape[0], dtype=torch.bool), slice(None), None)
    call = losses.checkpointed(FUNCTIONS[name].call, enabled=recompute)
    results = call(made.logits, inputs, {"temperature": 0.7, **options})
    return [x for x in results if x.requires_grad], made.leaves


def gradients_of(results: Sequence[Tensor], leaves: Sequence[Tensor], **options: Any) -> Sequence[Tensor]:
    weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in results]
    counted = [torch.where(x == -INF, 0.0, x) for x in results]
    return torch.autograd.grad(counted, leaves, weights, **options)


AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16)
COPIED = partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x.detach().clone(), lambda x: x)
SEEN = partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x, lambda x: x)
ON_CPU = torch.autograd.graph.save_on_cpu


@BY_SOURCE
def test_modes_change_nothing(name: str, source: str) -> None:
    """Nor does backward that computes the loss again, under hooks of saved tensors either."""
    results, leaves = results_of(name, source)
    expected = *results, *gradients_of(results, leaves)
    for forward, backward, recompute in (
        *((AUTOCAST, nullcontext, False), (nullcontext, AUTOCAST, False), (nullcontext, nullcontext, True)),
        *product((ON_CPU, COPIED, SEEN), (nullcontext,), (False, True)),
    ):
        with forward():
            results, leaves = results_of(name, source, recompute=recompute)
        with backward():
            assert all(map(torch.equal, (*results, *gradients_of(results, leaves)), expected))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = random_logits(columns=96) / 10
            values = FUNCTIONS[name].call(logits, inputs_of(None, 96, 96), {"temperature": 0.7})
        assert not any(x.requires_grad for x in values)
        assert source != "existing" or all(map(torch.equal, values, expected[: len(results)]))


@BY_SOURCE
def test_each_result_has_its_gradient_and_may_be_changed_in_place(name: str, source: str) -> None:
    """A second backward is none of another graph: it has the same gradient."""
    results, leaves = results_of(name, source)
    expected = gradients_of(results, leaves, retain_graph=True)
    of_each = [gradients_of([x], leaves, retain_graph=True) for x in results]
    for whole, parts in zip(expected, zip(*of_each, strict=True), strict=True):
        torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
    again, same_leaves = results_of(name, source)
    for x in again:
        x.unsqueeze(-1).squeeze(-1).mul_(2)
        x += 1
    for gradient, single in zip(gradients_of(again, same_leaves), expected, strict=True):
        torch.testing.assert_close(gradient, 2 * single, rtol=1e-5, atol=1e-6)


@BY_SOURCE
def test_a_second_derivative_is_refused(name: str, source: str) -> None:
    """Rather than taking the gradient for a constant. To ask for its graph alone is no error."""
    results, leaves = results_of(name, source)
    weight = torch.ones((), requires_grad=True)
    expected = gradients_of(results, leaves, retain_graph=True)
    for of_which, differentiated in ((results, leaves), ([x * weight for x in results], [weight])):
        gradients = gradients_of(of_which, leaves, create_graph=True)
        assert all(map(torch.equal, gradients, expected))
        with pytest.raises(InvalidInputError, match="differentiated twice"):
            torch.autograd.grad(sum(x.sum() for x in gradients), differentiated)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_the_block_size_does_not_change_a_bit(name: str) -> None:
    """Megatron pads the vocabulary, so no column is left over from vectors of up to 32."""
    options = {"fused": False} if "fused" in FUNCTIONS[name].options else {}
    of_blocks = []
    for block_bytes in (1 << 30, 1, 3 * 4096, 1 << 16):
        results, leaves = results_of(
            name, "existing", (T, 4096), torch.float64, block_bytes=block_bytes, **options
        )
        of_blocks.append((*results, *gradients_of(results, leaves)))
        assert all(map(torch.equal, of_blocks[0], of_blocks[-1])), block_bytes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_tensor_of_rows_and_vocabulary(name: str) -> None:
    """The weight of an output layer is smaller, and so are the tiles of logits, of student and teachers."""
    shape, chosen = (16, V), torch.ones(16, dtype=torch.bool)
    student, teacher = (SOURCES["product"](torch.zeros(shape), chosen, slice(None), None) for _ in range(2))
    of_teacher = teacher.logits.detach()
    inputs = replace(inputs_of(None, V, V, rows_of_all=16), teachers=(of_teacher,), old=of_teacher)
    with Sizes() as sizes:
        results = FUNCTIONS[name].call(student.logits, inputs, {"temperature": 0.7})
        if name != "top-k":
            gradients_of([x for x in results if x.requires_grad], student.leaves)
    assert sizes.largest <= 12 * V < 16 * V


# --- what is peculiar to log-probabilities, entropies and rows


def test_long_runs_of_numbers_are_slices() -> None:
    first, second = torch.arange(3, 40), torch.arange(50, 60)
    assert as_slices(torch.cat([first, second])) == (slice(3, 40), slice(50, 60))
    assert as_slices(first) == slice(3, 40)
    for rows in (torch.cat([second, first]), first[::2], torch.tensor([0, 1, 3, 4, 5, 6, 7, 9])):
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


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("margin", "bound"), [(20.0, FLOAT32), (40.0, FLOAT32), (75.0, 2 * FLOAT32)])
def test_next_to_certain(margin: float, bound: float, kept: bool) -> None:
    """Tiny log-probabilities, entropies and gradients keep their digits, where ``1 - p`` has none left."""
    logits = torch.full((2, V), -300.0).index_fill_(1, torch.tensor([7]), margin - 300).requires_grad_()
    keep_mask = torch.ones(2, V, dtype=torch.bool) if kept else None
    values, entropies = losses.vocab_parallel_log_probs_and_entropy(
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
    assert losses.vocab_parallel_topk(logits, k).indices.equal(largest(logits, k))
    assert losses.vocab_parallel_topk(torch.zeros(2, 50_000), 7).indices.tolist() == [list(range(7))] * 2
    logits[5, width // 2] = float("nan")
    assert all(len(set(row.tolist())) == k for row in losses.vocab_parallel_topk(logits, k).indices)


def test_a_topk_takes_little_memory_and_has_no_graph() -> None:
    """Candidates and a few blocks, not the vocabulary; the logits stay."""
    logits = torch.randn(256, 32768, requires_grad=True)
    before = logits.detach().clone()
    assert not losses.vocab_parallel_topk(logits, 3).log_probs.requires_grad
    assert logits.equal(before)
    assert live_bytes(lambda: losses.vocab_parallel_topk(logits, 64)).peak <= 0.1 * logits.numel() * 4


def test_distributions_are_split_joined_and_selected() -> None:
    whole, other = (losses.vocab_parallel_topk(random_logits(), k) for k in (4, 3))
    parts = whole.split([3, 0, T - 3])
    assert [len(part) for part in parts] == [3, 0, T - 3]
    assert all(map(torch.equal, losses.TopKDistribution.cat(parts).tensors, whole.tensors))
    rows = torch.tensor([5, 1])
    assert whole[rows].indices.equal(whole.indices[rows])
    assert whole[2:4].tail_log_prob.equal(whole.tail_log_prob[2:4])
    assert whole.to("cpu")[whole.tail_log_prob < -INF].k == whole.k == 4
    for distributions in ([whole, other], []):
        with pytest.raises(InvalidInputError, match="of different k, or there are none"):
            losses.TopKDistribution.cat(distributions)


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
    _, tail = losses.vocab_parallel_log_probs_at(leaf, indices, with_tail=True)
    expected.sum().backward()
    tail.sum().backward()
    # Of the probability, whose relative error is the absolute one of its logarithm but for what float32
    # can say of the latter; and of each derivative.
    resolution = expected.abs().max().item() * 2**-24
    assert error(tail, expected, torch.ones(())) <= 5e-6 + resolution
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, indices, False)
    assert error(leaf.grad[outside], exact.grad[outside], exact.grad[outside].abs().clamp(min=1e-6)) <= 5e-6
    assert error(leaf.grad, exact.grad, exact.grad.abs().amax(1, keepdim=True).clamp(min=1e-6)) <= 5e-6


def test_a_tail_next_to_one() -> None:
    logits = torch.zeros(1, 32768).index_fill_(1, torch.arange(64), -25.0)
    inside = torch.tensor(-25.0, dtype=torch.float64).exp() * 64 / (32768 - 64)
    _, tail = losses.vocab_parallel_log_probs_at(logits, torch.arange(64)[None], with_tail=True)
    assert torch.allclose(tail.double(), -inside.log1p(), rtol=1e-6, atol=0)
