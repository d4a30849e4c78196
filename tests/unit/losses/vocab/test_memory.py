"""What the losses take beyond the caller's logits, and which logits backward may overwrite.

They take the gradient and one block of rows; with ``inplace_backward`` one block alone.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import vocab_parallel_log_probs, vocab_parallel_log_probs_at
from tests.device_thread import device_thread
from tests.references.live_bytes import live_bytes
from tests.references.losses import FUNCTIONS, Inputs
from tests.unit.losses.test_table import V, random_logits, random_targets

#: Functions and options; ``rows`` and a keep-mask are made for the sizes of the logits.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "log_probs": ("log-probs", {}),
    "log_probs_at_temperature": ("log-probs", {"temperature": 0.7}),
    "kept_log_probs": ("log-probs", {"kept": True}),
    "log_probs_without_padding": ("log-probs", {"vocab_size": 15 * 1024}),
    "entropy_without_gradient": ("entropy as a metric", {}),
    "entropy": ("entropy", {"temperature": 0.7}),
    "entropy_of_half_precision": ("entropy", {"dtype": torch.bfloat16}),
    "kept_entropy": ("entropy", {"kept": True}),
    "entropy_of_a_range": ("entropy", {"rows": lambda rows: slice(50, 200)}),
    "entropy_of_scattered_rows": (
        "entropy",
        {"rows": lambda rows: torch.arange(rows).view(-1, 4)[:, ::3].flatten()},
    ),
    "at": ("at ids", {"k": 16, "temperature": 0.7}),
    "at_many": ("at ids", {"k": 64}),
}
# By default the block of large logits is 1% of them at most.
LARGE = {"shape": (2048, 32768), "block_bytes": None}
#: Mode, size and whether it is compiled. Rows by number are not copied then.
SLOW = [("kept_entropy", LARGE, False), ("at", LARGE, False), ("entropy_of_scattered_rows", {}, True)]
CASES = [
    *((mode, {}, False) for mode in MODES),
    *(
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.nightly)
        for case in product(MODES, ({}, LARGE), (False, True))
        if case[1:] != ({}, False) and not (case[2] and case[0].startswith("at"))
    ),
]


def peak(mode: str, shape: tuple[int, int] = (256, 16384), **options: Any) -> float:
    """Return that of forward and backward, over the bytes of the logits."""
    torch.manual_seed(0)
    name, mode_options = MODES[mode]
    options = {"block_bytes": 1 << 17, **mode_options, **options}
    logits = torch.randn(shape).to(options.pop("dtype", torch.float32)).requires_grad_() * 1
    keep_mask = torch.ones(shape, dtype=torch.bool).tril() if options.pop("kept", False) else None
    rows = options.pop("rows", lambda rows: slice(None))(shape[0])
    ids = torch.randint(options.get("vocab_size", shape[1]), (shape[0], options.pop("k", 1)))[rows]
    inputs = Inputs(ids[:, 0].clone(), ids, rows, keep_mask)

    def step() -> Tensor:
        values = FUNCTIONS[name].call(logits, inputs, options)
        return torch.autograd.grad(sum(x.sum() for x in values if x.requires_grad), logits)[0]

    return live_bytes(step).peak / logits.nbytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, when inductor is imported
@pytest.mark.parametrize(("mode", "size", "fused"), CASES)
def test_peak(mode: str, size: dict[str, Any], fused: bool) -> None:
    options = size if mode.startswith("at") else {**size, "fused": fused}
    for inplace, least, most in ((False, 1.0, 1.02), (True, 0.0, 0.02)):
        for _ in range(1 + fused):  # the first call compiles
            share = peak(mode, inplace_backward=inplace, **options)
        assert least <= share <= most


def test_forward_keeps_a_few_numbers_per_row() -> None:
    logits, ids = torch.randn(512, 8192, requires_grad=True), torch.randint(8192, (512, 8))
    for name in ("entropy", "at ids"):
        call = partial(FUNCTIONS[name].call, logits, Inputs(ids[:, 0], ids), {})
        assert live_bytes(call).retained <= 512 * 100


def test_compiling_switched_off_costs_a_few_blocks() -> None:
    """As in tests that run Megatron on a CPU: plain operators compute a block at a time."""
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        assert peak("entropy", inplace_backward=True, fused=True) <= 0.03


def test_the_block_is_of_the_size_asked_for() -> None:
    for block_bytes in (1 << 18, 1 << 20):
        share = peak("kept_entropy", fused=False, inplace_backward=True, block_bytes=block_bytes)
        assert 0.8 * block_bytes <= share * 256 * 16384 * 4 <= 1.2 * block_bytes


# --- overwriting

ROWS = 6
TARGETS = random_targets(ROWS)


@pytest.fixture
def leaf() -> Tensor:
    return random_logits(ROWS).requires_grad_()


def loss_of(name: str, logits: Tensor, inplace: bool = True) -> Tensor:
    targets = TARGETS[: len(logits)]
    inputs = Inputs(targets, targets[:, None], teachers=(torch.zeros(logits.shape),))
    return sum(x.sum() for x in FUNCTIONS[name].call(logits, inputs, {"inplace_backward": inplace}))


in_place = partial(loss_of, "log-probs")


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


def test_parts_of_something_alive_and_leaves_are_refused(leaf: Tensor) -> None:
    whole = random_logits(2 * ROWS).requires_grad_() * 1
    for part in (whole[ROWS:], whole[::2], whole.view(2, ROWS, V)[0], whole.split(ROWS)[1]):
        with pytest.raises(InvalidInputError, match="a part of something larger: pass the whole"):
            in_place(part)
    for view_of in (lambda x: x, lambda x: x.view(ROWS, V), lambda x: x.unsqueeze(0)[0]):
        with pytest.raises(InvalidInputError, match="a leaf that requires grad: pass the output"):
            in_place(view_of(leaf))
        in_place(view_of(leaf.detach()))  # no gradient, nothing to overwrite


of_each = pytest.mark.parametrize("name", ["log-probs", "entropy", "at ids", "reverse_kl", "jensen_shannon"])


@of_each
def test_a_second_claim_is_refused_while_the_first_lives(leaf: Tensor, name: str) -> None:
    logits = leaf * 1
    loss = loss_of(name, logits)
    for same in (logits, logits.view(1, ROWS, V)[0]):
        with pytest.raises(InvalidInputError, match="given to another inplace_backward"):
            in_place(same)
    del loss
    loss_of(name, logits).backward()


@of_each
def test_a_second_backward_is_an_error(leaf: Tensor, name: str) -> None:
    """On a CPU ``save_on_cpu`` stores the logits themselves, and autograd does not look at their version."""
    for stored, message in (
        (nullcontext(), "overwritten after forward.*a second backward"),
        (torch.autograd.graph.save_on_cpu(), "overwritten with their gradient"),
    ):
        with stored:
            loss = loss_of(name, leaf * 1)
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


@of_each
def test_reading_overwritten_logits_again_is_an_error(leaf: Tensor, name: str) -> None:
    """Version counters do not see this: the reader comes after."""
    logits = leaf * 1
    loss_of(name, logits).backward()
    for same in (logits, logits.detach(), logits.view(1, ROWS, V)[0], logits[1:]):
        with pytest.raises(InvalidInputError, match="overwritten with their gradient"):
            loss_of(name, same, inplace=False)
    with torch.no_grad():
        logits.copy_(leaf)  # new values are no gradient
        loss_of(name, logits, inplace=False)


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
