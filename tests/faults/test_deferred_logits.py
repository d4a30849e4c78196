"""Deferred logits when things go wrong: no logits are made without a warning, and nothing hangs.

Pickling, copying and storing them is tested in ``tests/unit/losses/logits/test_deferred.py``.
"""

from __future__ import annotations

import gc
import pprint
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    DeferredLogits,
    deferred_logits,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from megatron_rl_patches.losses.logits import deferred
from megatron_rl_patches.testing import RanksFailed, cpu_backend, spawn_ranks
from tests.unit.losses.logits.dense import IGNORE, dense_log_probs_and_entropy
from tests.unit.losses.logits.dense_topk import dense_log_probs_at, has_no_softmax

from .strange_logits import POISONS, agree
from .test_losses import examples

T, H, V = 6, 5, 40
TOKENS = torch.arange(T)


@pytest.fixture(autouse=True)
def _nothing_has_been_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_warned", set())


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_()


def was_made(logits: Tensor) -> bool:
    return isinstance(logits, DeferredLogits) and logits._contents.values is not None


@st.composite
def strange_heads(draw: st.DrawFn) -> dict[str, Tensor]:
    """Hidden states, weight and bias, some of which have gradients, with NaN and infinities in some rows."""
    rows, width, size = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 3, 33, 257])),
        draw(st.integers(1, 4)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {
        "hidden": torch.randn(rows, size, dtype=torch.float64, generator=generator),
        "weight": torch.randn(width, size, dtype=torch.float64, generator=generator),
        "bias": torch.randn(width, dtype=torch.float64, generator=generator),
    }
    for row in range(rows):
        tensors["hidden"][row] *= draw(st.sampled_from([0.0, 1e-3, 1.0, 1.0, 30.0, 1e4]))
        if draw(st.integers(0, 4)) == 0:
            tensors["hidden"][row, draw(st.integers(0, size - 1))] = draw(st.sampled_from(POISONS))
    for place in draw(st.lists(st.integers(0, width - 1), max_size=2)):
        tensors["bias"][place] = draw(st.sampled_from([-torch.inf, -1e6, 1e6]))
    trained = draw(st.sampled_from(["hidden", "hidden weight", "hidden weight bias", "weight bias"]))
    return {name: tensor.requires_grad_(name in trained.split()) for name, tensor in tensors.items()}


@examples(150)
def test_any_output_layer(data: st.DataObject) -> None:
    """Values, and gradients of hidden states, weight and bias, are those of logits that are made."""
    tensors = data.draw(strange_heads())
    n, width = len(tensors["hidden"]), len(tensors["weight"])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    targets = torch.randint(width, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < 0.2] = IGNORE
    ids = torch.randint(width, (n, 3), generator=generator)
    made = linear(*tensors.values())
    logits = deferred_logits(
        tensors["hidden"],
        tensors["weight"],
        bias=tensors["bias"],
        tile_bytes=data.draw(st.sampled_from([8, 256, 4096, None])),
        keep_bytes=data.draw(st.sampled_from([0, 1000, 1 << 20])),
    )
    if data.draw(st.booleans()):
        expected = dense_log_probs_and_entropy(made, targets)
        values = vocab_parallel_log_probs_and_entropy(logits, targets)
    else:
        expected = dense_log_probs_at(made, ids)
        values = vocab_parallel_log_probs_at(logits, ids, with_tail=True)
    for mine, reference in zip(values, expected, strict=True):
        assert agree(mine, reference, 1e-9)

    weights = [
        torch.where(v.isfinite(), torch.rand(v.shape, generator=generator) + 0.1, 0.0) for v in expected
    ]
    finite = [torch.where(weight == 0, 0.0, exact) for exact, weight in zip(expected, weights, strict=True)]
    names = [name for name, tensor in tensors.items() if tensor.requires_grad]
    trained = [tensors[name] for name in names]
    of_made = torch.autograd.grad(finite, [made], weights)[0]
    # Rows without a finite value are left out; elsewhere they would spoil the gradient of the weight.
    has_gradient = torch.stack([w.reshape(n, -1).sum(1) > 0 for w in weights]).any(0)
    of_made = torch.where(has_gradient[:, None], of_made, 0.0)
    mine = torch.autograd.grad(values, trained, weights)
    clean = tensors["hidden"].isfinite().all(1)
    for name, gradient in zip(names, mine, strict=True):
        if name == "hidden":
            reference = of_made @ tensors["weight"]
        elif not clean.all():
            continue  # zero times the NaN of a hidden state is NaN, with logits that are made too
        else:
            reference = of_made.T @ tensors["hidden"] if name == "weight" else of_made.sum(0)
        assert agree(gradient, reference.detach(), 1e-8, max(reference.abs().max().item(), 1.0)), name
    top = vocab_parallel_topk(logits, min(3, width))
    order = made.sort(dim=1, descending=True, stable=True).indices[:, : min(3, width)]
    without_softmax = has_no_softmax(made)
    assert torch.equal(top.indices[~without_softmax], order[~without_softmax])
    assert not was_made(logits)


def test_an_exception_between_forward_and_backward_leaves_nothing() -> None:
    hidden, weight = inputs(torch.float64)
    expected = torch.autograd.grad(
        vocab_parallel_log_probs(linear(hidden, weight), TOKENS).sum(), [hidden, weight]
    )
    alive = []

    def fails() -> None:
        logits = deferred_logits(hidden, weight, keep_bytes=1 << 20)
        loss = vocab_parallel_log_probs(logits, TOKENS).sum()
        alive.extend([weakref.ref(logits), weakref.ref(loss)])
        raise KeyError("a metric")

    gc.disable()
    try:
        with pytest.raises(KeyError):
            fails()
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()
    assert hidden.grad is None and weight.grad is None
    vocab_parallel_log_probs(deferred_logits(hidden, weight), TOKENS).sum().backward()  # type: ignore[no-untyped-call]
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        assert tensor.grad is not None and torch.allclose(tensor.grad, gradient, rtol=1e-10)


def test_an_exception_in_backward_leaves_the_graph_usable() -> None:
    """As with ``retain_graph``, which losses of several terms are differentiated with."""
    hidden, weight = inputs(torch.float64)
    logits = deferred_logits(hidden, weight, keep_bytes=1 << 20, tile_bytes=256)
    loss = vocab_parallel_log_probs(logits, TOKENS).sum()

    def refuse(gradient: Tensor) -> None:
        raise KeyError("a hook")

    handle = hidden.register_hook(refuse)
    with pytest.raises(KeyError):
        torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    handle.remove()
    expected = torch.autograd.grad(
        vocab_parallel_log_probs(linear(hidden, weight), TOKENS).sum(), [hidden, weight]
    )
    for mine, reference in zip(torch.autograd.grad(loss, [hidden, weight]), expected, strict=True):
        assert torch.allclose(mine, reference, rtol=1e-10)


def _read_all_attributes(logits: Tensor) -> int:
    """Read what a debugger does that shows an object; return how many attributes have a value."""
    read = 0
    for name in dir(logits):
        with suppress(Exception):  # some attributes exist of leaves only, or of sparse tensors
            repr(getattr(logits, name))
            read += 1
    return read


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r:>90}".format, pprint.pformat, vars, dir])
def test_what_shows_them_makes_nothing(show: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    logits = deferred_logits(*inputs())
    assert show(logits)
    assert not was_made(logits) and not caplog.text


@pytest.mark.filterwarnings("ignore")  # of torch: attributes that are deprecated
def test_a_debugger_that_reads_all_attributes(caplog: pytest.LogCaptureFixture) -> None:
    """A transposed view, as the attribute ``T``, makes the logits, and says so."""
    logits = deferred_logits(*inputs())
    assert _read_all_attributes(logits) > 100
    assert was_made(logits) and "transpose" in caplog.text


# --- several ranks


def _differing(counts: tuple[int, int], folder: str) -> tuple[str, bool]:
    """Return the error of a rank whose number of rows is not that of its tensor-parallel peer."""
    import torch.distributed as dist

    from tests.faults.groups import error_of, short_lived_groups

    with short_lived_groups(Path(folder), f"{counts}"):
        hidden, weight = inputs()
        logits = deferred_logits(hidden, weight.detach().requires_grad_(), tp_group=dist.group.WORLD)
        rows = slice(0, counts[dist.get_rank()])

        def step() -> None:
            loss = vocab_parallel_log_probs(logits, TOKENS[rows], rows=rows, tp_group=dist.group.WORLD)
            loss.sum().backward()  # type: ignore[no-untyped-call]

        return error_of(step), was_made(logits)


@pytest.mark.parametrize("counts", [(4, 3), (4, 0)], ids=str)
def test_tensor_parallel_ranks_whose_rows_differ(counts: tuple[int, int], tmp_path: Path) -> None:
    """An error within the time-out of the collectives; where sizes differ, gloo ends a process."""
    try:
        outcomes = spawn_ranks(_differing, 2, counts, str(tmp_path), timeout=60)
    except RanksFailed as failed:
        assert counts == (4, 3) and "Fatal Python error: Aborted" in str(failed)
    else:
        assert all(error != "no error" and not made for error, made in outcomes)


def _no_rows_on_one_rank(lean: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps; the responses of the second data-parallel rank are empty."""
    import torch.distributed as dist

    from tests.real import test_loss_func
    from tests.real.test_lean_head import CASES, LAYOUTS, _train

    microbatch = test_loss_func.microbatch

    def without_responses(number: int, packed: bool) -> Any:
        data = microbatch(number, packed)
        empty = [torch.zeros(0) for _ in data.tokens]
        batch = type(data.batch)(empty, empty, empty, empty, empty)
        return data._replace(response_lengths=[0] * len(data.tokens), batch=batch)

    with (
        cpu_backend(),
        mock.patch.object(test_loss_func, "microbatch", without_responses if dist.get_rank() else microbatch),
    ):
        outcome = _train(LAYOUTS["DP 2"], CASES["entropy bonus"], lean)
        assert not outcome.made
        return outcome.losses, outcome.gradients


def test_a_data_parallel_rank_without_rows() -> None:
    """Its parameters' hooks still run, so that its peer does not wait for its part of the gradients."""
    runs = [spawn_ranks(_no_rows_on_one_rank, 2, lean, timeout=120) for lean in (False, True)]
    for (losses, gradients), (lean_losses, lean_gradients) in zip(*runs, strict=True):
        assert lean_losses == pytest.approx(losses, rel=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(lean_gradients[name], gradient, rtol=1e-4, atol=1e-6), name
