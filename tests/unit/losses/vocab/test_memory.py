"""What the losses take beyond the caller's logits, and which logits backward may overwrite.

They take the gradient and one block of rows; with ``inplace_backward`` one block alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

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
from tests.references.live_bytes import live_bytes

from .test_log_probs import V, random_logits, random_targets

LOG_PROBS, ENTROPY, AT = (
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
#: ``scattered`` rows, all columns ``kept``, and ``k`` ids are made for the sizes of the logits.
MODES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "log_probs": (LOG_PROBS, {}),
    "log_probs_at_temperature": (LOG_PROBS, {"temperature": 0.7}),
    "kept_log_probs": (LOG_PROBS, {"kept": True}),
    "log_probs_without_padding": (LOG_PROBS, {"vocab_size": 15 * 1024}),
    "entropy_without_gradient": (ENTROPY, {"entropy_grad": False}),
    "entropy": (ENTROPY, {"temperature": 0.7}),
    "kept_entropy": (ENTROPY, {"kept": True}),
    "entropy_of_a_range": (ENTROPY, {"rows": slice(50, 200)}),
    "entropy_of_scattered_rows": (ENTROPY, {"scattered": True}),
    "at": (AT, {"k": 16, "temperature": 0.7, "with_tail": True}),
    "at_many": (AT, {"k": 64, "with_tail": True}),
}
# By default the block of large logits is 1% of them at most.
LARGE = {"rows_and_columns": (2048, 32768), "block_bytes": None}
#: Each mode, the first size also in the default suite.
CASES = [
    *((mode, {}) for mode in MODES),
    *(
        pytest.param(
            mode, LARGE, marks=pytest.mark.slow if mode in ("kept_entropy", "at") else pytest.mark.nightly
        )
        for mode in MODES
    ),
]


def peak(
    mode: str,
    rows_and_columns: tuple[int, int] = (256, 16384),
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> float:
    """Return that of forward and backward, over the bytes of the logits."""
    torch.manual_seed(0)
    rows, columns = rows_and_columns
    loss, mode_options = MODES[mode]
    options = {"block_bytes": 1 << 17, **mode_options, **options}
    logits = torch.randn(rows, columns).to(dtype).requires_grad_() * 1
    if options.pop("kept", False):
        options["keep_mask"] = torch.ones(rows, columns, dtype=torch.bool).tril()
    if options.pop("scattered", False):
        options["rows"] = torch.arange(rows).view(-1, 4)[:, :3].flatten()
    k = options.pop("k", None)
    size = options.get("vocab_size", columns)
    ids = torch.randint(size, (rows, k) if k else (rows,))[options.get("rows", slice(None))]

    def step() -> Tensor:
        values = loss(logits, ids, **options)
        values = [values] if isinstance(values, Tensor) else values
        return torch.autograd.grad(sum(x.sum() for x in values if x.requires_grad), logits)[0]

    return live_bytes(step).peak / logits.nbytes


@pytest.mark.parametrize(("mode", "size"), CASES)
def test_plain(mode: str, size: dict[str, Any]) -> None:
    options = size if mode.startswith("at") else {**size, "fused": False}
    assert 1.0 <= peak(mode, **options) <= 1.02
    assert peak(mode, inplace_backward=True, **options) <= 0.02


def test_forward_keeps_a_few_numbers_per_row() -> None:
    logits, ids = torch.randn(512, 8192, requires_grad=True), torch.randint(8192, (512, 8))
    assert live_bytes(lambda: ENTROPY(logits, ids[:, 0])).retained <= 512 * 100
    assert live_bytes(lambda: AT(logits, ids, with_tail=True)).retained <= 512 * 100


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize("size", [{}, LARGE])
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("at")])
def test_compiled(mode: str, size: dict[str, Any]) -> None:
    for inplace, least, most in ((False, 1.0, 1.02), (True, 0.0, 0.02)):
        peak(mode, fused=True, inplace_backward=inplace, **size)  # compiles
        assert least <= peak(mode, fused=True, inplace_backward=inplace, **size) <= most


@pytest.mark.parametrize(
    "without_compiling",
    [
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: mock.patch.object(torch, "compile", lambda function, **_: function),
    ],
    ids=["stance", "replaced"],
)
def test_compiling_switched_off_costs_a_few_blocks(without_compiling: Callable[[], Any]) -> None:
    """As in tests that run Megatron on a CPU: plain operators compute a block at a time."""
    with without_compiling():
        assert peak("entropy", inplace_backward=True, fused=True) <= 0.03


@pytest.mark.parametrize("block_bytes", [1 << 18, 1 << 20])
def test_the_block_is_of_the_size_asked_for(block_bytes: int) -> None:
    share = peak("kept_entropy", fused=False, inplace_backward=True, block_bytes=block_bytes)
    assert 0.8 * block_bytes <= share * 256 * 16384 * 4 <= 1.2 * block_bytes


def test_half_precision_needs_no_float32_copy() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "fused": False}
    assert 1.0 <= peak("entropy", **options) <= 1.03
    assert peak("entropy", inplace_backward=True, **options) <= 0.03


# --- overwriting

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
    ],
)
def test_a_part_of_something_alive_is_refused(part: Callable[[Tensor], Tensor]) -> None:
    whole = random_logits(2 * ROWS).requires_grad_() * 1
    with pytest.raises(InvalidInputError, match="a part of something larger"):
        in_place(part(whole))


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


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=list(LOSSES))
def test_a_second_backward_is_an_error(leaf: Tensor, loss_of: Callable[[Tensor], Tensor]) -> None:
    """On a CPU ``save_on_cpu`` stores the logits themselves, and autograd does not look at their version."""
    for stored, message in (
        (nullcontext(), "overwritten after forward.*a second backward"),
        (torch.autograd.graph.save_on_cpu(), "overwritten with their gradient"),
    ):
        with stored:
            loss = loss_of(leaf * 1).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(InvalidInputError, match=message):
            loss.backward()


def test_another_loss_of_overwritten_logits_is_an_error(leaf: Tensor) -> None:
    logits = leaf * 1
    earlier = vocab_parallel_log_probs(logits, TARGETS).sum()
    loss = in_place(logits)
    later = vocab_parallel_log_probs(logits, TARGETS).sum()
    loss.backward(retain_graph=True)
    for other in (earlier, later):
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
