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

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss as framework_distillation
from megatron_rl_patches.losses import (
    PolicyBatch,
    PolicyOptions,
    SequenceLayout,
    make_loss_func,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.loss_functions import LossFunc
from tests.unit.losses.logits.dense import IGNORE, dense_log_probs_and_entropy
from tests.unit.losses.logits.dense_topk import dense_log_probs_at, has_no_softmax

from .strange_logits import (
    agree,
    owns_its_storage,
    selections,
    strange_logits,
)

TEMPERATURES = st.sampled_from([1.0, 0.25, 3.0])
BLOCKS = st.sampled_from([None, 1, 4096])
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def examples(campaign: int) -> Callable[[Callable[[Any], None]], Callable[[int], None]]:
    """Test 30 random examples, and as many as a campaign has where slow tests are run."""

    def decorate(check: Callable[[Any], None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("number", [30, pytest.param(campaign, marks=pytest.mark.slow)])
        def test(number: int) -> None:
            settings(max_examples=number)(given(data=st.data())(check))()

        test.__doc__ = check.__doc__
        return test

    return decorate


def of_values(dtype: torch.dtype) -> float:
    """Return the rounding of log-probabilities and entropies, which are in float32 at least."""
    return ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32]


def largest_of_rows(gradient: Tensor) -> Tensor:
    """Return the largest value of each row, at least 0.1: weights are around one, and sums are rounded."""
    finite = torch.where(gradient.isfinite(), gradient, 0.0)
    return finite.abs().amax(1, keepdim=True).clamp(min=0.1)


def backward(values: list[Tensor], weights: list[Tensor], logits: Tensor) -> Tensor:
    """Return the gradient of the logits."""
    return torch.autograd.grad(values, logits, [w.to(v.dtype) for w, v in zip(weights, values, strict=True)])[
        0
    ]


@examples(400)
def test_log_probs_and_entropy(data: st.DataObject) -> None:
    logits, inplace = data.draw(strange_logits()), data.draw(st.booleans())
    rows = data.draw(selections(len(logits.values)))
    kind = data.draw(st.sampled_from(["alone", "with entropy", "with entropy as a metric"]))
    seen, dtype = logits.seen, logits.values.dtype
    n = len(torch.arange(len(seen)) if rows is None else torch.arange(len(seen))[rows])
    numbers = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))
    generator = data.draw(numbers)
    targets = torch.randint(seen.shape[1], (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < 0.1] = IGNORE
    keep_mask = None
    if data.draw(st.booleans()):
        keep_mask = torch.rand(n, seen.shape[1], generator=generator) < 0.5
    temperature = data.draw(TEMPERATURES)
    weights = [torch.rand(n, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2)]

    leaf = seen.double().requires_grad_()
    expected = dense_log_probs_and_entropy(leaf, targets, rows, temperature, keep_mask)
    differentiated = 2 if kind == "with entropy" else 1
    gradient = backward(list(expected[:differentiated]), weights[:differentiated], leaf)

    _, view = logits.leaf_and_view()
    options: dict[str, Any] = {
        "rows": rows,
        "temperature": temperature,
        "keep_mask": keep_mask,
        "inplace_backward": inplace,
        "block_bytes": data.draw(BLOCKS),
    }
    if inplace and not owns_its_storage(view):
        with pytest.raises(InvalidInputError, match="a storage of their own"):
            vocab_parallel_log_probs(view, targets, **options)
        return
    if kind == "alone":
        outputs = (vocab_parallel_log_probs(view, targets, **options),)
    else:
        options["entropy_grad"] = differentiated == 2
        outputs = vocab_parallel_log_probs_and_entropy(view, targets, **options)
    for values, reference in zip(outputs, expected, strict=False):
        assert agree(values, reference, of_values(dtype))
    mine = backward(list(outputs[:differentiated]), weights[:differentiated], view)
    assert mine.dtype == dtype
    if keep_mask is not None:
        left_out = gradient.isnan().any(1, keepdim=True) & ~gradient.isnan()
        mine = torch.where(left_out & mine.isnan(), 0.0, mine)
    assert agree(mine, gradient, ROUNDING[dtype], largest_of_rows(gradient))


@examples(300)
def test_log_probs_at_ids_and_tail(data: st.DataObject) -> None:
    logits = data.draw(strange_logits())
    seen, dtype = logits.seen, logits.values.dtype
    rows, temperature = data.draw(selections(len(seen))), data.draw(TEMPERATURES)
    n = len(torch.arange(len(seen)) if rows is None else torch.arange(len(seen))[rows])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    k = data.draw(st.integers(1, 5))
    indices = torch.randint(seen.shape[1], (n, k), generator=generator)
    indices[torch.rand(n, k, generator=generator) < 0.2] = IGNORE

    leaf = seen.double().requires_grad_()
    expected = dense_log_probs_at(leaf, indices, rows, temperature)
    _, view = logits.leaf_and_view()
    outputs = vocab_parallel_log_probs_at(
        view, indices, rows=rows, temperature=temperature, with_tail=True, block_bytes=data.draw(BLOCKS)
    )
    for values, reference in zip(outputs, expected, strict=True):
        assert agree(values, reference, of_values(dtype))
    # What is -inf is no id, or has no derivative in the definition.
    weights = [
        torch.where(values.detach() == -torch.inf, 0.0, torch.rand(values.shape, generator=generator) + 0.1)
        for values in expected
    ]
    counted = [
        torch.where(weight == 0, 0.0, values) for weight, values in zip(weights, expected, strict=True)
    ]
    gradient = backward(counted, weights, leaf)
    has_grad = torch.zeros(len(seen), dtype=torch.bool)
    has_grad[slice(None) if rows is None else rows] = (weights[0] > 0).any(1) | (weights[1] > 0)
    gradient = torch.where(has_grad[:, None], gradient, 0.0)
    mine = backward(list(outputs), weights, view)
    assert agree(mine, gradient, ROUNDING[dtype], largest_of_rows(gradient))


@examples(300)
def test_topk(data: st.DataObject) -> None:
    logits = data.draw(strange_logits())
    seen, dtype = logits.seen, logits.values.dtype
    rows, temperature = data.draw(selections(len(seen))), data.draw(TEMPERATURES)
    k = data.draw(st.integers(1, min(7, seen.shape[1])))
    outputs = vocab_parallel_topk(logits.leaf_and_view()[1], k, rows=rows, temperature=temperature)
    selected = seen.double() if rows is None else seen.double()[rows]
    order = selected.sort(dim=1, descending=True, stable=True).indices[:, :k]
    without_softmax = has_no_softmax(selected)
    assert torch.equal(outputs.indices[~without_softmax], order[~without_softmax])
    assert all(len(set(row)) == k for row in outputs.indices.tolist())
    assert ((outputs.indices >= 0) & (outputs.indices < seen.shape[1])).all()
    expected = dense_log_probs_at(selected, outputs.indices, temperature=temperature)
    assert agree(outputs.log_probs, expected[0], of_values(dtype))
    assert agree(outputs.tail_log_prob, expected[1], of_values(dtype))


@examples(100)
def test_rows_whose_values_have_no_gradient_have_none(data: st.DataObject) -> None:
    logits = data.draw(strange_logits(strides=("contiguous",)))
    n, width = logits.values.shape
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    counts = torch.rand(n, generator=generator) < 0.5
    targets = torch.randint(width, (n,), generator=generator)
    keep_mask = torch.rand(n, width, generator=generator) < 0.5 if data.draw(st.booleans()) else None
    weight = counts.double()
    for inplace in (False, True):
        _, view = logits.leaf_and_view()
        log_probs, entropies = vocab_parallel_log_probs_and_entropy(
            view, targets, keep_mask=keep_mask, inplace_backward=inplace
        )
        assert not backward([log_probs, entropies], [weight, weight], view)[~counts].any()
        _, view = logits.leaf_and_view()
        at_ids, tail = vocab_parallel_log_probs_at(
            view, targets[:, None], with_tail=True, inplace_backward=inplace
        )
        assert not backward([at_ids, tail], [weight[:, None], weight], view)[~counts].any()


TOTALS, RESPONSES, VOCABULARY = [5, 7, 4], [3, 5, 2], 11
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 0])]
LAYOUT = SequenceLayout.build(TOTALS, RESPONSES)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def policy_loss_func(inplace: bool) -> LossFunc:
    tokens = [torch.arange(total) for total in TOTALS]
    values = [random(length) for length in RESPONSES]
    batch = PolicyBatch(values, MASKS, values, values)
    options = PolicyOptions(entropy_coef=0.1, kl_coef=0.1)
    return make_loss_func(tokens, LAYOUT, batch, options, inplace_backward=inplace)


@pytest.mark.parametrize("inplace", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_logits_of_tokens_that_do_not_count_may_hold_anything(inplace: bool, value: float) -> None:
    """Of a policy; of a student, see ``tests/unit/losses/objectives/test_distillation.py``."""
    counts = torch.zeros(LAYOUT.num_rows, dtype=torch.bool)
    counts[LAYOUT.response_rows] = torch.cat(MASKS) != 0
    clean = random(LAYOUT.num_rows, VOCABULARY)
    found = []
    for logits in (clean, torch.where(counts[:, None], clean, value)):
        leaf = logits[None].clone().requires_grad_()
        total, _, metrics = policy_loss_func(inplace)(leaf * 1)
        total.backward()
        found.append((total.detach(), leaf.grad[0], torch.stack([metrics[name] for name in sorted(metrics)])))
    for ours, of_clean in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, of_clean)
    assert not found[1][1][~counts].any() and found[1][1][counts].any()


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
