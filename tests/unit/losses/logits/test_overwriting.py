"""Which logits an in-place backward may overwrite, and what happens to readers that come afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    full_vocabulary_divergence,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from tests.device_thread import device_thread

from .test_log_probs import V, random_logits, random_targets

ROWS = 6
TARGETS = random_targets(ROWS)


@pytest.fixture
def leaf() -> Tensor:
    return random_logits(ROWS).requires_grad_()


def in_place(logits: Tensor, fused: bool = False) -> Tensor:
    return vocab_parallel_log_probs(logits, TARGETS, inplace_backward=True, fused=fused).sum()


def expected_gradient(leaf: Tensor) -> Tensor:
    [gradient] = torch.autograd.grad(vocab_parallel_log_probs(leaf, TARGETS, fused=False).sum(), leaf)
    return gradient


def test_the_gradient_lies_in_the_storage_of_the_logits(leaf: Tensor) -> None:
    logits = leaf * 1
    loss = in_place(logits)
    assert loss.equal(vocab_parallel_log_probs(leaf, TARGETS, fused=False).sum())
    assert logits.equal(leaf) and logits._version == 0  # forward leaves them alone
    with device_thread():
        [gradient] = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == logits.data_ptr()
    assert gradient.equal(expected_gradient(leaf))


@pytest.mark.parametrize(
    "reshaped",
    [
        lambda x: (x * 1).view(1, ROWS, V).squeeze(0),
        lambda x: (x * 1).view(2, ROWS // 2, V).flatten(0, 1),
        lambda x: (x * 1).unsqueeze(1)[:, 0],
        lambda x: (x.t() * 1).t(),
    ],
)
def test_a_reshaped_whole_is_no_part(leaf: Tensor, reshaped: Callable[[Tensor], Tensor]) -> None:
    """As frameworks take their model's ``[1, T, V]`` or ``[T, 1, V]`` to ``[T, V]``."""
    in_place(reshaped(leaf)).backward()
    assert torch.allclose(leaf.grad, expected_gradient(leaf), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "part",
    [
        lambda whole: whole[ROWS:],
        lambda whole: whole[::2],
        lambda whole: whole.view(2, ROWS, V)[0],
        lambda whole: whole.split(ROWS)[1],
        lambda whole: whole[1 : ROWS + 1],
    ],
)
def test_a_part_of_something_alive_is_refused(part: Callable[[Tensor], Tensor]) -> None:
    whole = random_logits(2 * ROWS).requires_grad_() * 1
    before = whole.detach().clone()
    with pytest.raises(InvalidInputError, match="a part of something larger"):
        in_place(part(whole))
    assert whole.equal(before)


def test_a_leaf_is_refused(leaf: Tensor) -> None:
    for view_of in (lambda x: x, lambda x: x.view(ROWS, V), lambda x: x.unsqueeze(0)[0]):
        with pytest.raises(InvalidInputError, match="leaf that requires grad"):
            in_place(view_of(leaf))
        in_place(view_of(leaf.detach()))  # no gradient, nothing to overwrite


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "log_probs": lambda x: vocab_parallel_log_probs(x, TARGETS, inplace_backward=True),
    "at": lambda x: vocab_parallel_log_probs_at(x, TARGETS[:, None], inplace_backward=True),
    "divergence": lambda x: full_vocabulary_divergence(x, x.detach().flip(0), inplace_backward=True),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=list(LOSSES))
def test_a_second_claim_is_refused_while_the_first_lives(
    leaf: Tensor, loss_of: Callable[[Tensor], Tensor]
) -> None:
    logits = leaf * 1
    loss = loss_of(logits).sum()
    for same in (logits, logits.view(1, ROWS, V)[0]):
        with pytest.raises(InvalidInputError, match="given to another inplace_backward"):
            in_place(same)
    del loss
    loss_of(logits).sum().backward()


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=list(LOSSES))
def test_a_second_backward_is_an_error(
    leaf: Tensor, loss_of: Callable[[Tensor], Tensor], is_stored: bool
) -> None:
    """On a CPU ``save_on_cpu`` stores the logits themselves, and autograd does not look at their version."""
    with torch.autograd.graph.save_on_cpu() if is_stored else nullcontext():
        loss = loss_of(leaf * 1).sum()
    loss.backward(retain_graph=True)
    message = (
        "overwritten with their gradient" if is_stored else "overwritten after forward.*a second backward"
    )
    with pytest.raises(InvalidInputError, match=message):
        loss.backward()


@pytest.mark.parametrize("earlier", [False, True])
def test_another_loss_of_overwritten_logits_is_an_error(leaf: Tensor, earlier: bool) -> None:
    logits = leaf * 1
    if earlier:
        other = vocab_parallel_log_probs(logits, TARGETS).sum()
    loss = in_place(logits)
    if not earlier:
        other = vocab_parallel_log_probs(logits, TARGETS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(InvalidInputError, match="overwritten after forward"):
        other.backward()


def test_what_was_overwritten_is_named(leaf: Tensor) -> None:
    rows, keep_mask = torch.arange(ROWS).flip(0), torch.ones(ROWS, V, dtype=torch.bool)
    indices = TARGETS[:, None].clone()
    for overwritten, name in ((rows, "rows"), (keep_mask, "keep_mask"), (indices, "indices")):
        loss = vocab_parallel_log_probs(leaf * 1, TARGETS, rows=rows, keep_mask=keep_mask).sum()
        loss = loss + vocab_parallel_log_probs_at(leaf * 1, indices).sum()
        overwritten.copy_(overwritten.clone())
        with pytest.raises(InvalidInputError, match=f"since {name} had been overwritten after forward"):
            loss.backward()


def test_reading_overwritten_logits_again_is_an_error(leaf: Tensor) -> None:
    """Version counters do not see this: the reader comes after."""
    logits = leaf * 1
    in_place(logits).backward()
    for same in (logits, logits.detach(), logits.view(1, ROWS, V)[0], logits[1:]):
        with pytest.raises(InvalidInputError, match="overwritten with their gradient"):
            vocab_parallel_log_probs_and_entropy(same, TARGETS[: len(same)])
    with torch.no_grad():
        logits.copy_(leaf)  # new values are no gradient
        vocab_parallel_log_probs(logits, TARGETS)


def test_under_checkpointing_forward_runs_twice_and_backward_once(leaf: Tensor) -> None:
    logits = leaf * 1
    loss = checkpoint(in_place, logits, use_reentrant=False)
    loss.backward(retain_graph=True)
    assert leaf.grad.equal(expected_gradient(leaf))
    with pytest.raises((InvalidInputError, RuntimeError)):
        loss.backward()
    # In a whole step the logits are computed again, so that they are new ones.
    leaf.grad = None
    checkpoint(lambda x: in_place(x * 1), leaf, use_reentrant=False).backward()
    assert leaf.grad.equal(expected_gradient(leaf))
