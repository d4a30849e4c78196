"""Deferred logits when things go wrong: no logits are made without a warning, and nothing hangs.

Pickling, copying and storing them is tested in ``tests/unit/losses/logits/test_deferred.py``, any use of them
in ``test_random_programs.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import DeferredLogits, deferred_logits, vocab_parallel_log_probs
from megatron_rl_patches.losses.logits import deferred
from megatron_rl_patches.testing import RanksFailed
from tests.faults.groups import error_of, short_lived_groups
from tests.ranks import on_ranks
from tests.real import test_loss_func
from tests.real.test_lean_head import CASES, LAYOUTS, _train

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


# --- several ranks


@on_ranks(2, megatron=False, timeout=60)
def _differing(counts: tuple[int, int], folder: Path) -> None:
    """Rows of a rank whose number is not that of its tensor-parallel peer."""
    with short_lived_groups(folder, f"{counts}"):
        hidden, weight = inputs()
        logits = deferred_logits(hidden, weight.detach().requires_grad_(), tp_group=dist.group.WORLD)
        rows = slice(0, counts[dist.get_rank()])

        def step() -> None:
            loss = vocab_parallel_log_probs(logits, TOKENS[rows], rows=rows, tp_group=dist.group.WORLD)
            loss.sum().backward()

        assert error_of(step) != "no error"
        assert not was_made(logits)


@pytest.mark.parametrize("counts", [(4, 3), (4, 0)], ids=str)
def test_tensor_parallel_ranks_whose_rows_differ(counts: tuple[int, int], tmp_path: Path) -> None:
    """An error within the time-out of the collectives; where sizes differ, gloo ends a process."""
    try:
        _differing(counts=counts, folder=tmp_path)
    except RanksFailed as failed:
        assert "Fatal Python error: Aborted" in str(failed)


@on_ranks(2)
def test_a_data_parallel_rank_without_rows() -> None:
    """Its parameters' hooks still run, so that its peer does not wait for its part of the gradients."""
    microbatch = test_loss_func.microbatch

    def without_responses(number: int, packed: bool) -> Any:
        data = microbatch(number, packed)
        empty = [torch.zeros(0) for _ in data.tokens]
        batch = type(data.batch)(empty, empty, empty, empty, empty)
        return data._replace(response_lengths=[0] * len(data.tokens), batch=batch)

    of_rank = without_responses if dist.get_rank() else microbatch
    with mock.patch.object(test_loss_func, "microbatch", of_rank):
        plain, lean = (_train(LAYOUTS["DP 2"], CASES["entropy bonus"], lean) for lean in (False, True))
    assert not lean.made
    assert lean.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, gradient in plain.gradients.items():
        assert torch.allclose(lean.gradients[name], gradient, rtol=1e-4, atol=1e-6), name
