"""What is peculiar to logits that are not materialized; test_table.py has the losses against formulas."""

import copy
import gc
import io
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    DeferredLogits,
    deferred_logits,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
)
from megatron_rl_patches.losses.vocab import deferred, output_layer
from megatron_rl_patches.losses.vocab.arguments import VocabParallelOptions
from megatron_rl_patches.losses.vocab.output_layer import OutputLayerRows, TileOptions
from megatron_rl_patches.losses.vocab.reduction import grid_of
from megatron_rl_patches.losses.vocab.sources import rows_of
from tests.references.live_bytes import live_bytes

from .sizes import Sizes

B, S, H, V = 2, 7, 12, 1003
T = B * S
TOKENS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1))
NAMES = ("hidden", "weight", "bias")
Inputs = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _nothing_has_been_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_warned", set())


def inputs(dtype: torch.dtype = torch.float32, trained: Sequence[str] = NAMES) -> Inputs:
    """Rows from next to uniform to next to one-hot."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "hidden": torch.randn(B, S, H, generator=generator) * torch.logspace(-2, 0.7, S)[:, None],
        "weight": torch.randn(V, H, generator=generator),
        "bias": torch.randn(V, generator=generator),
    }
    return {name: t.to(dtype).requires_grad_(name in trained) for name, t in tensors.items()}


def logits_of(tensors: Inputs, **options: Any) -> DeferredLogits:
    return deferred_logits(tensors["hidden"], tensors["weight"], bias=tensors["bias"], **options)


def dense_of(tensors: Inputs) -> Tensor:
    return linear(tensors["hidden"], tensors["weight"], tensors["bias"])


def run(function: Callable[[Tensor], Tensor], logits: Tensor, tensors: Inputs) -> list[Tensor]:
    """Return the function's value, and the gradients of its weighted sum for all tensors."""
    value = function(logits)
    weights = torch.linspace(-1, 2, value.numel()).view(value.shape)
    return [value.detach(), *torch.autograd.grad((value * weights).sum(), [*tensors.values()])]


def test_float32_logits_of_16_bit_tensors() -> None:
    """Once somebody asks they are products of converted operands; test_table.py has losses of such logits."""
    tensors = inputs(torch.bfloat16)
    logits = logits_of(tensors, tile_bytes=8192, logit_dtype=torch.float32)
    with Sizes() as sizes:
        vocab_parallel_log_probs(logits.view(T, V), TOKENS).sum().backward()
    assert logits.is_deferred and logits.dtype == torch.float32
    assert sizes.largest <= V * H
    converted = {name: tensor.detach().double() for name, tensor in tensors.items()}
    torch.testing.assert_close((logits + 0).double(), dense_of(converted), rtol=1e-6, atol=1e-6)


def test_an_accumulated_gradient_goes_into_its_buffer() -> None:
    """As of a weight that DDP has prepared for ``gradient_accumulation_fusion``."""
    tensors = inputs(torch.bfloat16)
    weight: Any = tensors["weight"]
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.ones(V, H), False, True
    options = TileOptions(tile_bytes=4096, accumulating=weight)
    logits = deferred.defer(*tensors.values(), options, lambda _: dense_of(tensors))
    vocab_parallel_log_probs(logits.view(T, V), TOKENS).sum().backward()
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    x = dense_of(tensors).detach().double() + (dense_of(exact) - dense_of(exact).detach())
    vocab_parallel_log_probs(x.view(T, V), TOKENS).sum().backward()
    expected = exact["weight"].grad
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    assert (weight.main_grad - 1 - expected).abs().max() < 0.005 * expected.abs().max()


# --- what is in memory


def _log_probs(logits: Tensor) -> Tensor:
    return vocab_parallel_log_probs_and_entropy(logits, TOKENS, entropy_grad=False)[0]


def _at_ids(logits: Tensor) -> Tensor:
    return vocab_parallel_log_probs_at(logits, TOKENS[:, None])


@pytest.mark.parametrize(
    ("loss", "trained", "products"),
    [
        # One in forward, whose only tile waits for backward, and two for the gradients.
        (_log_probs, NAMES, 3),
        (_log_probs, ("hidden",), 2),
        (_log_probs, ("weight", "bias"), 2),
        (_log_probs, (), 1),
        (_at_ids, ("hidden",), 2),  # whose backward reads the tile
    ],
)
def test_matrix_products(loss: Callable[[Tensor], Tensor], trained: Sequence[str], products: int) -> None:
    tensors = inputs(torch.float32, trained)
    for _ in range(2):
        with Sizes() as sizes:
            value = loss(logits_of(tensors).view(T, V)).sum()
            if trained:
                value.backward()
        assert sizes.products == products


def test_a_tile_that_waits_is_freed_when_other_logits_are_materialized() -> None:
    loss = _log_probs(logits_of(inputs()).view(T, V)).sum()
    (logits_of(inputs()) + 0).sum()
    with Sizes() as sizes:
        loss.backward()
    assert sizes.products == 3  # the tile again, and two for the gradients


@pytest.mark.parametrize("width", [131_072, 151_936, 248_320])
def test_tiles_have_all_rows_where_these_fit(width: int) -> None:
    """A tile has a multiple of 256 columns, and still all rows, not nearly all."""
    rows = OutputLayerRows((*torch.empty(2, 1, 1), None), slice(0, 1), TileOptions())
    rows.width = width
    for rows.n in range(64, 16385, 64):
        most_rows, columns = rows.shape_of_tiles(width, 1)
        assert most_rows == rows.n and (columns % 256 == 0 or columns == width)


@pytest.mark.parametrize("keep_bytes", [0, 4 * 4 * 1024])
def test_backward_begins_with_the_tile_that_forward_ended_with(keep_bytes: int) -> None:
    hidden, weight = torch.randn(4, H, requires_grad=True), torch.randn(4096, H, requires_grad=True)
    targets = torch.tensor([0, 1024, 3000, 4095])

    def loss(logits: Tensor) -> Tensor:
        return vocab_parallel_log_probs(logits, targets).sum()

    def deferred() -> Tensor:
        return deferred_logits(hidden, weight, tile_bytes=4 * 4 * 1024, keep_bytes=keep_bytes)

    inputs = hidden, weight
    expected = torch.autograd.grad(loss(hidden @ weight.T), inputs)
    stored_tiles = int(keep_bytes > 0)
    with Sizes() as sizes:
        gradients = torch.autograd.grad(loss(deferred()), inputs)
    assert sizes.products == 4 + (4 - 1 - stored_tiles) + 2 * 4
    torch.testing.assert_close(gradients, expected)
    # The tile of the latest forward waits, for autograd begins with its backward.
    with Sizes() as sizes:
        losses = [loss(deferred()) for _ in range(2)]
        for value in reversed(losses):
            torch.testing.assert_close(torch.autograd.grad(value, inputs), expected)
    assert sizes.products == 2 * (4 + (4 - stored_tiles) + 2 * 4) - 1


def test_one_tile_is_in_memory_whatever_the_order_of_losses_is() -> None:
    hidden, weight = torch.randn(64, H, requires_grad=True), torch.randn(4096, H, requires_grad=True)
    tile_bytes = 64 * 1024 * 4

    def loss() -> Tensor:
        logits = deferred_logits(hidden, weight, tile_bytes=tile_bytes)
        return vocab_parallel_log_probs(logits, torch.arange(64)).sum()

    def several() -> None:
        first, second = loss(), loss()
        with torch.no_grad():
            loss()
        first.backward()
        third = loss()
        second.backward()
        third.backward()

    others = live_bytes(lambda: loss().backward()).peak - tile_bytes  # the gradients and numbers of each row
    assert 0 < live_bytes(several).peak - others < 1.2 * tile_bytes


def test_a_tile_without_rows_is_not_kept_for_other_rows() -> None:
    logits = logits_of(inputs(trained=())).view(T, V)
    assert vocab_parallel_log_probs(logits[:0], TOKENS[:0]).shape == (0,)
    assert vocab_parallel_log_probs(logits[:3], TOKENS[:3]).shape == (3,)


class _OnGPU(Tensor):
    """A tensor in host memory that says it is on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("release", "hip"), [((2, 6), None), ((2, 9), None), ((2, 10), None), ((2, 10), "7.0")]
)
def test_a_gpu_adds_products_in_float32_with_every_torch(
    release: tuple[int, int], hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins refuse what the kernels of these releases refuse."""

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert release >= (2, 8) and hip is None
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert release >= (2, 8) and hip is None
        assert total.dtype in ((a.dtype, out_dtype) if release >= (2, 10) else (a.dtype,))
        assert out is total
        return out.add_(a.to(out_dtype) @ b.to(out_dtype))

    a, b = torch.randn(30, 700).bfloat16(), torch.randn(700, 9).bfloat16()
    expected = 1.0 + a.double() @ b.double()
    total = torch.ones(30, 9)
    monkeypatch.setattr(output_layer, "TORCH", release)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(output_layer, "_PRODUCT_BYTES", 4 * 9 * 7)  # of seven rows
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    output_layer.add_product(total, a.as_subclass(_OnGPU), b.as_subclass(_OnGPU))
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


# --- what other code sees

FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze, unsqueeze": lambda x: x[:1].squeeze(0).unsqueeze(1),
    "view": lambda x: x.view(T, V),
    "reshape": lambda x: x.transpose(0, 1).reshape(-1, V),
    "transpose": lambda x: x.transpose(0, 1).contiguous(),
    "permute": lambda x: x.permute(1, 0, 2),
    "slices": lambda x: x[1, 2:5],
    "steps": lambda x: x[:, ::2][:, -3:-1],
    "split": lambda x: x.view(T, V).split([4, 3, 7])[1],
    "unbind": lambda x: list(x)[1],
    "numbers": lambda x: x.view(T, V)[torch.tensor([3, 1, 3, 0])],
    "mask": lambda x: x[torch.arange(T).view(B, S) % 3 == 1],
    "index_select": lambda x: x.index_select(1, torch.tensor([4, 2])),
    "cat": lambda x: torch.cat([x[0, 3:], x[1, :2], x[0, :1]]),
    "cat of copies": lambda x: torch.cat([x.view(T, V)[torch.tensor([3, 1])][1:], x[0, :1]]),
    "clone, detach": lambda x: x.clone().detach(),
    "float": lambda x: x.float(),
    "div": lambda x: x / 0.7,
    "div of a copy": lambda x: x[0].clone() / 3,
    "div in place": lambda x: x.squeeze(0).div_(1.3)[0],
    "divided twice": lambda x: (x / 3).div_(0.7),
    "data": lambda x: x.data,
}


#: The quotient of 16-bit logits is rounded to 16 bits, which a temperature is not.
ROUNDED = ("div", "div of a copy", "div in place", "divided twice")


#: Where logits are made, and where they are used: with a graph, to score, and as verl's engine scores.
MODES: tuple[tuple[Callable[[], Any], Callable[[], Any]], ...] = (
    (nullcontext, nullcontext),
    (torch.inference_mode, torch.inference_mode),
    (nullcontext, torch.inference_mode),
    (torch.inference_mode, nullcontext),
    (torch.no_grad, torch.no_grad),
)


@pytest.mark.parametrize("name", FOLLOWED)
def test_stays_deferred(name: str) -> None:
    """The values are those of the same rows of the layer's logits, bit for bit, once somebody asks."""
    for created, used in MODES:
        # Torch refuses to write to inference tensors elsewhere, and a division past the graph materializes.
        if name == "div in place" and (created is not used or used is torch.inference_mode):
            continue
        with created():
            logits, expected = logits_of(inputs()), dense_of(inputs())
        with used():
            assert logits.sum().allclose(expected.sum())
            _assert_stays_deferred(FOLLOWED[name](logits), FOLLOWED[name](expected))
    if name not in ROUNDED:
        halves = inputs(torch.bfloat16)
        _assert_stays_deferred(FOLLOWED[name](logits_of(halves)), FOLLOWED[name](dense_of(halves)))


def _assert_stays_deferred(logits: Tensor, expected: Tensor) -> None:
    assert isinstance(logits, DeferredLogits) and logits.is_deferred
    assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
    # Under inference mode, what torch says of views is not the same for all of them.
    assert logits.requires_grad == expected.requires_grad or torch.is_inference_mode_enabled()
    assert logits.is_inference() == expected.is_inference()
    tokens = TOKENS[: expected.shape[:-1].numel()]
    values, expected_values = (vocab_parallel_log_probs(x.reshape(-1, V), tokens) for x in (logits, expected))
    assert torch.allclose(values, expected_values, rtol=2e-6, atol=1e-6)
    assert logits.is_deferred
    assert torch.equal(logits + 0, expected + 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_quotient_that_is_rounded_is_materialized(name: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype)
    logits, expected = FOLLOWED[name](logits_of(tensors)), FOLLOWED[name](dense_of(tensors))
    tokens = TOKENS[: expected.shape[:-1].numel()]
    values, expected_values = (vocab_parallel_log_probs(x.reshape(-1, V), tokens) for x in (logits, expected))
    assert torch.equal(values, expected_values)
    by_one = logits_of(tensors) / 1.0
    assert isinstance(by_one, DeferredLogits) and by_one.is_deferred


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (1, 2, 0, 3), (2, 0, 1, 3)])
@pytest.mark.parametrize(
    "operation", [torch.clone, lambda x: x / 2, lambda x: x.to(torch.float32, copy=True)]
)
def test_results_lie_in_memory_as_those_of_ordinary_logits(
    order: tuple[int, ...], operation: Callable[[Tensor], Tensor]
) -> None:
    """Whether ``reshape`` copies or aliases follows from the strides, and a later write from that."""
    hidden, weight = torch.randn(2, 3, 4, H), torch.randn(V, H)
    expected = operation(linear(hidden, weight).permute(order))
    result = operation(deferred_logits(hidden, weight).permute(order))
    assert isinstance(result, DeferredLogits) and result.stride() == expected.stride()
    torch.testing.assert_close(result + 0, expected)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda x: x[..., 5:9],
    "rounded": lambda x: x.half().float(),
    "whole, in place, past the graph": lambda x: [x.detach().div_(2), x + 0][1],
    "a larger quotient": lambda x: x[:1] / torch.full((3, 1, 1), 2.0),
    "a complex quotient": lambda x: (x / torch.tensor(2 + 0j)).real,
    "a quotient by an unsigned number": lambda x: x / torch.tensor(2, dtype=torch.uint16),
    "a quotient of more dimensions": lambda x: x.view(T, V) / torch.full((1, T, 1), 2.0),
    "copies of copies": lambda x: [x.clone().clone(), x.mul_(0)][0],
    "copies of a division": lambda x: [(x / 2)[0], x.zero_()][0],
    "copies before a division in place": lambda x: [x.clone().clone(), x.div_(2), x + 0][0],
    "a copy before an alias is written": lambda x: [x.clone(), x.max(), x.view(-1).mul_(0)][0],
    "a reshaped copy, written": lambda x: [
        x.transpose(0, 1).contiguous().transpose(0, 1).reshape(-1).zero_(),
        x + 0,
    ][1],
    "copied into another": lambda x: [torch.zeros_like(x).copy_(x), x / 2][1],
    "rows in order, written": lambda x: [x[1][torch.tensor([2, 3])].mul_(3.0), x + 0][1],
    "as it was before a write": lambda x: [x.clone(), x.div_(2), x.mul_(3.0)][0],
    "after a write": lambda x: [x[0].mul_(3.0), x[:, 1:4]][1],
    "columns written": lambda x: [x.clone()[..., 3:5].zero_(), x][1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_see_ordinary_logits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Values and gradients, once, and a warning that says who asked."""
    tensors = inputs()
    expected = run(OTHERS[name], dense_of(tensors), tensors)
    layer = mock.Mock(side_effect=lambda _: dense_of(tensors))
    logits = deferred.defer(*tensors.values(), TileOptions(), layer)
    with caplog.at_level(logging.WARNING):
        assert all(map(torch.equal, expected, run(OTHERS[name], logits, tensors)))
    # A write takes the values for itself, so a copy that is read later computes them again.
    assert layer.call_count == 1 or (layer.call_count == 2 and "cop" in name) or name == "columns written"
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert f" at {__file__}:" in caplog.text


def test_the_warning_names_operation_and_line_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            logits_of(inputs()).exp()
    line = test_the_warning_names_operation_and_line_once.__code__.co_firstlineno + 3
    [message] = caplog.messages
    assert message.startswith(
        f"megatron_rl_patches: aten.exp.default at {__file__}:{line} has materialized deferred logits "
        f"[{B}, {S}, {V}]. "
    )


def test_what_only_needs_the_shape_materializes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logits = logits_of(inputs())
    whole = (torch.zeros_like(logits), torch.empty_like(logits), logits.new_empty(B, S, V))
    assert all(type(t) is Tensor and t.shape == (B, S, V) for t in whole)
    assert torch.equal(logits.new_zeros(3), torch.zeros(3))
    text = f"DeferredLogits([{B}, {S}, {V}], torch.float32, device=cpu, deferred)"
    assert repr(logits) == str(logits) == text
    assert (logits.numel(), logits.element_size(), logits.is_contiguous()) == (T * V, 4, True)
    turned = logits.transpose(0, 1)
    assert turned.stride() == torch.empty_like(turned).stride() == dense_of(inputs()).transpose(0, 1).stride()
    assert logits.is_deferred and not caplog.records


def test_the_sum_of_no_rows_is_zero() -> None:
    tensors = inputs(torch.float64)
    ruled_out = torch.full((V,), -float("inf"), dtype=torch.float64)
    assert deferred_logits(tensors["hidden"][:0], tensors["weight"], bias=ruled_out).sum() == 0


def test_a_leaf_of_its_own_keeps_its_gradient() -> None:
    tensors = inputs()
    leaf = logits_of(tensors).detach().requires_grad_()
    vocab_parallel_log_probs(leaf.view(T, V), TOKENS).sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().sum() > 0
    assert all(tensor.grad is None for tensor in tensors.values())


class InGradMode(torch.autograd.Function):
    """Makes logits in grad mode, and has twice their gradient."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        with torch.enable_grad():
            return make(hidden.detach().requires_grad_(), weight.detach().requires_grad_())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        return None, 2 * gradient @ weight, 2 * gradient.T @ hidden


@pytest.mark.parametrize("use", [lambda x: x[1:], lambda x: x.div_(0.7)], ids=["rows", "div_"])
def test_deferred_inside_of_a_function_that_autograd_wraps(use: Callable[[Tensor], Tensor]) -> None:
    """Reentrant checkpoints, which call functions without grad mode, are in tests/faults/programs.py."""
    results = []
    for make in (linear, deferred_logits):
        hidden, weight, _ = (x.view(-1, x.shape[-1]) for x in inputs(torch.float64).values())
        logits = use(InGradMode.apply(make, hidden, weight))
        value = vocab_parallel_log_probs(logits, TOKENS[: len(logits)]).sum()
        results.append((value.detach(), *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_nothing_outlives_its_users() -> None:
    """Without the garbage collector, which Megatron can run by hand."""
    gc.disable()
    try:
        for use in ("div in place", "float", "numbers", "div of a copy"):
            tensors = inputs()
            hidden = tensors["hidden"] * 1
            logits = deferred_logits(hidden, tensors["weight"])
            alive = [weakref.ref(hidden), weakref.ref(logits)]
            rows = FOLLOWED[use](logits).flatten(0, -2)
            vocab_parallel_log_probs(rows, TOKENS[: len(rows)]).sum().backward()
            del hidden, logits, rows
            assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("retains", [False, True])
def test_a_hook_sees_the_gradient_and_comes_before_the_loss(retains: bool) -> None:
    seen: list[Tensor] = []

    def wait(logits: Tensor) -> None:
        logits.retain_grad() if retains else logits.register_hook(seen.append)

    logits = logits_of(inputs())
    wait(logits)
    vocab_parallel_log_probs(logits.view(T, V) / 2, TOKENS).sum().backward()
    gradient = logits.grad if retains else seen[0]
    assert gradient.shape == (B, S, V) and gradient.any()
    logits = logits_of(inputs())
    vocab_parallel_log_probs(logits.view(T, V), TOKENS)
    with pytest.raises(InvalidInputError, match="before the loss"):
        wait(logits)


@pytest.mark.parametrize("write", ["hidden", "weight"])
def test_an_overwritten_input_is_an_error_not_another_value(write: str) -> None:
    tensors = inputs()
    logits = logits_of(tensors)
    loss = vocab_parallel_log_probs(logits.view(T, V), TOKENS).sum()
    with torch.no_grad():
        tensors[write].mul_(2)
    for use in (lambda: vocab_parallel_log_probs(logits.view(T, V), TOKENS), lambda: logits.exp()):
        with pytest.raises(InvalidInputError, match="behind deferred logits were overwritten"):
            use()
    with pytest.raises(InvalidInputError, match=r"the (hidden|weight).* had been overwritten after"):
        loss.backward()


@pytest.mark.parametrize("kept", [0.3, 1.0])
def test_an_exception_in_backward_leaves_the_graph_usable(kept: float) -> None:
    """Backward writes gradients over a tile's logits, so it must not keep the tile for a later backward."""
    tensors = inputs(torch.float64)
    size = T * V * 8
    logits = logits_of(tensors, tile_bytes=size // 4, keep_bytes=int(kept * size)).view(T, V)
    loss = vocab_parallel_log_probs(logits, TOKENS).sum()
    handle = tensors["hidden"].register_hook(lambda gradient: {}["a hook"])
    with pytest.raises(KeyError):
        torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
    handle.remove()
    expected = torch.autograd.grad(
        vocab_parallel_log_probs(dense_of(tensors).view(T, V), TOKENS).sum(), list(tensors.values())
    )
    for _ in range(2):
        found = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
        for mine, reference in zip(found, expected, strict=True):
            assert torch.allclose(mine, reference, rtol=1e-10)


def test_a_second_derivative_is_refused() -> None:
    for reduce in (Tensor.sum, lambda x: x.exp().sum()):
        hidden = (tensors := inputs())["hidden"]
        (gradient,) = torch.autograd.grad(reduce(logits_of(tensors)), [hidden], create_graph=True)
        with pytest.raises(InvalidInputError, match=r"deferred logits or .* cannot be differentiated twice"):
            gradient.sum().backward()


STORED: dict[str, Callable[[Tensor], Tensor]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": lambda x: copy.deepcopy(x),
    "torch.save": lambda x: [torch.save(x, file := io.BytesIO()), file.seek(0), torch.load(file)][2],
    "tolist": lambda x: torch.tensor(x.tolist()),
    "sum of two": lambda x: x + x.new_zeros(1),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "dlpack": lambda x: torch.from_dlpack(x),
    "item": lambda x: torch.tensor([v.item() for v in x.view(T * V)]).view(x.shape),
}


@pytest.mark.parametrize("name", STORED)
def test_what_stores_the_values_materializes_them_and_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What shares no memory leaves them deferred."""
    tensors = inputs()
    with torch.no_grad():
        logits = logits_of(tensors)
        stored = STORED[name](logits)
    assert type(stored) is Tensor
    assert torch.equal(stored, dense_of(tensors))
    assert "has materialized deferred logits" in caplog.text
    assert logits.is_deferred == (name not in ("numpy", "dlpack", "item"))


def test_a_hook_of_saved_tensors_that_reads_the_memory() -> None:
    """As one that offloads them. Python's own override of tensor methods is switched off there."""
    logits, addresses = logits_of(inputs()), []

    def pack(tensor: Tensor) -> Tensor:
        addresses.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (logits * logits).sum().backward()
    assert addresses and all(addresses)


def test_threads_that_look_at_the_same_time_see_the_same_values() -> None:
    tensors, barrier = inputs(), threading.Barrier(4)
    # The other threads arrive meanwhile.
    layer = mock.Mock(side_effect=lambda _: time.sleep(0.05) or dense_of(tensors))
    logits = deferred.defer(*tensors.values(), TileOptions(), layer)

    def look(number: int) -> Tensor:
        barrier.wait(timeout=60)
        return logits.detach() + 0

    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(look, range(4)))
    layer.assert_called_once()
    assert all(torch.equal(values, dense_of(tensors)) for values in seen)


@pytest.mark.parametrize("export", [torch.utils.dlpack.to_dlpack, Tensor.data_ptr, lambda x: x.apply_(abs)])
def test_code_past_the_class_gets_an_error_not_a_null_pointer(export: Callable[[Tensor], Any]) -> None:
    logits = logits_of(inputs(trained=()))
    try:
        export(logits)
    except RuntimeError as error:
        assert "Cannot access data pointer" in str(error)
    else:  # torch 2.6 exports a view, for which the memory is handed out
        assert not logits.is_deferred


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_hidden_states_whose_writes_do_not_count_are_copied(mode: Callable[[], Any]) -> None:
    """A part of a sequence is flattened to a copy, and under inference mode tensors have no versions."""
    with mode():
        hidden, weight = torch.randn(2, 5, H), torch.randn(V, H)
        states = hidden if mode is torch.inference_mode else hidden[:, :-1]
        expected, logits = linear(states, weight), deferred_logits(states, weight)
        hidden.zero_()
        rows, expected = logits.flatten(0, 1), expected.flatten(0, 1)
        values, expected_values = (vocab_parallel_log_probs(x, TOKENS[: len(x)]) for x in (rows, expected))
        torch.testing.assert_close(values, expected_values)
        torch.testing.assert_close(rows + 0, expected, rtol=0, atol=0)


def test_another_shape_is_refused() -> None:
    logits = logits_of(inputs())
    for change, arguments in (("set_", [torch.zeros(1)]), ("resize_", [T, V]), ("transpose_", [0, 1])):
        with pytest.raises(InvalidInputError, match="keep their shape and their memory"):
            getattr(logits.detach(), change)(*arguments)
    assert logits.is_deferred


def test_an_output_layer_in_host_memory_comes_tile_by_tile() -> None:
    """The hidden states are on another device: tensors of ``meta`` have one, and no values."""
    width, tile_bytes = 3000, 4 * T * 1024
    hidden = torch.empty(T, H, device="meta")
    layer = {"weight": torch.ones(width, H), "bias": torch.ones(width)}
    source = rows_of(deferred_logits(hidden, **layer, tile_bytes=tile_bytes), None, VocabParallelOptions())
    with Sizes() as seen:
        sizes = [tile.x.numel() for tile in source.tiles(grid_of([source]))]
    assert sum(sizes) == T * width and 4 * max(sizes) <= tile_bytes
    assert sum(seen.copied) == width * (H + 1)
    assert max(seen.copied) == 1024 * H
    with pytest.raises(InvalidInputError, match="where nothing requires a gradient"):
        deferred_logits(hidden.requires_grad_(), **layer)
