"""The losses over logits of any shape, dtype, stride and value, against float64 over the whole vocabulary.

NaN and infinities propagate as in the reference: they spoil their own row, forward and backward, no other.
Where the definition is silent, these rules hold:

* a row whose values get a gradient of zero has a gradient of zero, whatever its logits are (autograd says NaN
  there, as 0 * NaN is, and so do rows that a loss mask leaves out);
* where a row's gradient is NaN, it may be so too in columns that the keep-mask leaves out;
* of a row with NaN or +inf the tail is NaN, also where no id is left for it, and the top-k ids are some valid
  ids, each once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss as framework_distillation
from tests.references.dense import IGNORE, dense_log_probs_and_entropy
from tests.references.dense_topk import dense_log_probs_at, has_no_softmax
from tests.unit.losses.vocab.pairwise import pairwise

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = 12
SCALES = (0.0, 1e-41, 1e-3, 1.0, 30.0, 6e4, 1e30)
#: How logits of other strides are made of such that own their storage.
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "middle of something": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "one row again and again": lambda x: x[:1].expand(len(x), -1),
}
OWN_STORAGE = ("contiguous", "transposed")
OPTIONS: dict[str, Sequence[Any]] = {
    "dtype": list(ROUNDING),
    "strides": list(STRIDES),
    "width": [1, 2, 3, 31, 32, 33, 64, 257],
    "rows": [None, slice(3, 11), torch.tensor([10, 2, 7, 0, 5]), slice(4, 4)],
    "temperature": [1.0, 0.25, 3.0],
    "block_bytes": [None, 1, 4096],
    "seed": [0, 1, 2],
}
CASES = pairwise(OPTIONS)
#: How the loss is called: its kind, whether in place, with a keep-mask; each case has a third of these.
USES = list(product(("alone", "with entropy", "with entropy as a metric"), (False, True), (False, True)))


class Strange:
    """Logits of many magnitudes, with NaN and infinities in most rows, and what is drawn beside them."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.dtype, width = case["dtype"], case["width"]
        self.generator = generator = torch.Generator().manual_seed(case["seed"])
        # The reference divides float64 by temperatures, which must not overflow.
        largest = min(torch.finfo(self.dtype).max, 1e100)
        poisons = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, largest, -largest, 1.0])
        scales = torch.tensor(SCALES, dtype=torch.float64)[torch.randint(7, (ROWS, 1), generator=generator)]
        values = torch.randn(ROWS, width, dtype=torch.float64, generator=generator) * scales
        rows = torch.randperm(ROWS, generator=generator)
        columns = torch.randint(width, (8,), generator=generator)
        values[rows[:8], columns] = poisons.double()
        values[rows[8], :], values[rows[9], :] = -math.inf, poisons[int(columns[0]) % 3]
        values = values.clamp(-largest, largest).where(values.isfinite(), values).to(self.dtype)
        self.seen = STRIDES[case["strides"]](values)
        self.selected = torch.arange(ROWS)[slice(None) if case["rows"] is None else case["rows"]]
        self.options = {name: case[name] for name in ("rows", "temperature", "block_bytes")}
        self.known = {name: case[name] for name in ("rows", "temperature")}
        self.view = STRIDES[case["strides"]](values.requires_grad_() * 1)

    def rounding(self) -> float:
        """Return that of log-probabilities and entropies, which are in float32 at least."""
        return ROUNDING[torch.float64 if self.dtype == torch.float64 else torch.float32]

    def ids(self, *shape: int, share: float = 0.1) -> Tensor:
        """Return ids, of which some are none."""
        ids = torch.randint(self.seen.shape[1], (len(self.selected), *shape), generator=self.generator)
        ids[torch.rand(ids.shape, generator=self.generator) < share] = IGNORE
        return ids

    def weights(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, dtype=torch.float64) + 0.1


def backward(values: Sequence[Tensor], weights: Sequence[Tensor], logits: Tensor) -> Tensor:
    """Return the gradient of the logits."""
    gradients = [w.to(v.dtype) for w, v in zip(weights, values, strict=True)]
    return torch.autograd.grad(values, logits, gradients)[0]


def agree(measured: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float = 1.0) -> bool:
    """NaN and infinities in the same places, everything else within the tolerance of its scale."""
    expected = expected.to(measured.dtype).double()
    measured = measured.detach().double()
    error = torch.where(measured == expected, 0.0, (measured - expected).abs())
    close = error <= tolerance * (expected.abs() + scale)
    return bool((close | (measured.isnan() & expected.isnan())).all())


def gradients_agree(measured: Tensor, expected: Tensor) -> bool:
    """Within the rounding of each row's largest value, at least 0.1: weights are around one."""
    finite = torch.where(expected.isfinite(), expected, 0.0)
    largest = finite.abs().amax(1, keepdim=True).clamp(min=0.1)
    return measured.dtype in ROUNDING and agree(measured, expected, ROUNDING[measured.dtype], largest)


def test_log_probs_and_entropy() -> None:
    for number, case in enumerate(CASES):
        for use in USES[number % 3 :: 3]:
            check_log_probs_and_entropy(case, *use)


def check_log_probs_and_entropy(case: dict[str, Any], kind: str, inplace: bool, has_mask: bool) -> None:
    logits = Strange(case)
    targets = logits.ids()
    keep_mask = (
        torch.rand(len(targets), case["width"], generator=logits.generator) < 0.5 if has_mask else None
    )
    options: dict[str, Any] = {**logits.options, "keep_mask": keep_mask, "inplace_backward": inplace}
    if inplace and case["strides"] not in OWN_STORAGE:
        with pytest.raises(InvalidInputError, match="a storage of their own"):
            losses.vocab_parallel_log_probs(logits.view, targets, **options)
        return
    if kind == "alone":
        outputs: Sequence[Tensor] = (losses.vocab_parallel_log_probs(logits.view, targets, **options),)
    else:
        options["entropy_grad"] = kind == "with entropy"
        outputs = losses.vocab_parallel_log_probs_and_entropy(logits.view, targets, **options)
    leaf = logits.seen.double().requires_grad_()
    expected = dense_log_probs_and_entropy(leaf, targets, **logits.known, keep_mask=keep_mask)
    assert all(agree(*pair, logits.rounding()) for pair in zip(outputs, expected, strict=False)), case
    differentiated = 2 if kind == "with entropy" else 1
    weights = [logits.weights(values) for values in expected[:differentiated]]
    gradient = backward(expected[:differentiated], weights, leaf)
    mine = backward(outputs[:differentiated], weights, logits.view)
    if has_mask:
        left_out = gradient.isnan().any(1, keepdim=True) & ~gradient.isnan()
        mine = torch.where(left_out & mine.isnan(), 0.0, mine)
    assert mine.dtype == logits.dtype and gradients_agree(mine, gradient), (case, kind, inplace, has_mask)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_log_probs_at_ids_and_tail(k: int) -> None:
    for case in CASES:
        logits = Strange(case)
        indices = logits.ids(k, share=0.2)
        outputs = losses.vocab_parallel_log_probs_at(logits.view, indices, with_tail=True, **logits.options)
        leaf = logits.seen.double().requires_grad_()
        expected = dense_log_probs_at(leaf, indices, **logits.known)
        assert all(agree(*pair, logits.rounding()) for pair in zip(outputs, expected, strict=True)), case
        # What is -inf is no id, or has no derivative in the definition.
        weights = [torch.where(x.detach() == -torch.inf, 0.0, logits.weights(x)) for x in expected]
        counted = [torch.where(weight == 0, 0.0, x) for weight, x in zip(weights, expected, strict=True)]
        has_grad = torch.zeros(ROWS, dtype=torch.bool)
        has_grad[logits.selected] = (weights[0] > 0).any(1) | (weights[1] > 0)
        gradient = torch.where(has_grad[:, None], backward(counted, weights, leaf), 0.0)
        assert gradients_agree(backward(outputs, weights, logits.view), gradient), case


@pytest.mark.parametrize("k", [1, 2, 7])
def test_topk(k: int) -> None:
    for case in CASES:
        logits, width = Strange(case), min(k, case["width"])
        outputs = losses.vocab_parallel_topk(logits.view, width, **logits.options)
        selected = logits.seen.double()[logits.selected]
        order = selected.sort(dim=1, descending=True, stable=True).indices[:, :width]
        has_softmax = ~has_no_softmax(selected)
        assert torch.equal(outputs.indices[has_softmax], order[has_softmax]), case
        assert all(len(set(row)) == width for row in outputs.indices.tolist()), case
        assert ((outputs.indices >= 0) & (outputs.indices < case["width"])).all(), case
        expected = dense_log_probs_at(selected, outputs.indices, temperature=case["temperature"])
        assert agree(outputs.log_probs, expected[0], logits.rounding()), case
        assert agree(outputs.tail_log_prob, expected[1], logits.rounding()), case


@pytest.mark.parametrize("has_mask", [False, True], ids=["all", "some"])
def test_rows_whose_values_have_no_gradient_have_none(has_mask: bool) -> None:
    for dtype, inplace, seed in product(ROUNDING, (False, True), range(5)):
        case = {"dtype": dtype, "strides": "contiguous", "width": 33, "rows": None, "seed": seed}
        first, second = (Strange({**case, "temperature": 1.0, "block_bytes": None}) for _ in range(2))
        counts = torch.rand(ROWS, generator=first.generator) < 0.5
        targets, weight = first.ids(share=0.0), counts.double()
        keep_mask = torch.rand(ROWS, 33, generator=first.generator) < 0.5 if has_mask else None
        values = losses.vocab_parallel_log_probs_and_entropy(
            first.view, targets, keep_mask=keep_mask, inplace_backward=inplace
        )
        assert not backward(values, [weight, weight], first.view)[~counts].any()
        values = losses.vocab_parallel_log_probs_at(
            second.view, targets[:, None], with_tail=True, inplace_backward=inplace
        )
        assert not backward(values, [weight[:, None], weight], second.view)[~counts].any()


def test_of_one_id_a_filler_of_the_framework_is_no_teacher() -> None:
    """With k = 1 its one probability of one, at id 0, adds up to no more than it should."""
    indices = torch.tensor([[0], [3], [0], [0]])
    log_probs = torch.tensor([[0.0], [0.0], [-0.5], [-1e-7]])
    batch = {"teacher_topk_indices": [indices], "teacher_topk_log_probs": [log_probs]}
    _, is_known = framework_distillation._stored_topk(batch, [4], torch.device("cpu"))
    assert is_known.tolist() == [False, True, True, True]
    batch["teacher_topk_tail"] = [torch.full((4,), -torch.inf)]
    _, is_known = framework_distillation._stored_topk(batch, [4], torch.device("cpu"))
    assert is_known.all()
