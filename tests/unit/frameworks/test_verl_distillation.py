"""The top-k losses of verl's rows, beside dense ones; ``test_real_verl_distillation.py`` runs verl itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.frameworks import verl_distillation
from megatron_rl_patches.frameworks.verl_distillation import MODES, Mode
from tests.device_thread import device_thread

ROWS, VOCABULARY, K = 12, 40, 3


def _rows(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)


def _buckets(log_probs: Tensor, ids: Tensor) -> Tensor:
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1)


def _compare(logits: Tensor, mode: Mode, floor: float | None = None, **changed: Tensor) -> dict[str, Tensor]:
    log_q, ids = _rows(1).log_softmax(1).topk(K, 1)
    old = _buckets(logits.detach().log_softmax(1), ids)
    columns = torch.cat([changed.get("log_q", log_q), *([old] if mode.needs_old else [])], 1)
    return verl_distillation._topk(logits * 1.0, columns, ids, mode, floor, None)


@pytest.mark.parametrize("name", MODES)
def test_all_buckets_count(name: str) -> None:
    """Each is zero where student and teacher agree; the first is the forward KL of the buckets."""
    logits = _rows(2).requires_grad_()
    outputs = _compare(logits, MODES[name])
    with device_thread():
        [gradient] = torch.autograd.grad(outputs["distillation_losses"].sum(), logits)
    assert gradient.abs().amax(1).min() > 0
    ids = _rows(1).topk(K, 1).indices
    p, q = (_buckets(rows.log_softmax(1), ids) for rows in (logits.detach(), _rows(1)))
    of_ids = (q.exp() * (q - p))[:, :K].sum(1)
    torch.testing.assert_close(outputs["truncated_losses"].double(), of_ids, rtol=1e-5, atol=1e-6)
    if name == verl_distillation.FORWARD_KL:
        expected = (q.exp() * (q - p)).sum(1)
        torch.testing.assert_close(outputs["distillation_losses"].double(), expected, rtol=1e-5, atol=1e-6)
    agreed = _compare(_rows(1), MODES[name])["distillation_losses"]
    assert agreed.abs().max() < 1e-6


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_rows_that_no_teacher_scored_have_neither_loss_nor_gradient(value: float) -> None:
    log_q = _rows(1).log_softmax(1).topk(K, 1).values
    log_q[4] = value
    logits = _rows(2).requires_grad_()
    outputs = _compare(logits, MODES[verl_distillation.FORWARD_KL], log_q=log_q)
    [gradient] = torch.autograd.grad(outputs["distillation_losses"].sum(), logits)
    assert all(values[4] == 0 and values.isfinite().all() for values in outputs.values())
    assert gradient.isfinite().all() and not gradient[4].any() and gradient[5].any()


def test_log_prob_min_clamp_bounds_ids_and_tail() -> None:
    logits = _rows(2)
    clamped = _compare(logits, MODES[verl_distillation.FORWARD_KL], floor=-2.0)["distillation_losses"]
    ids = _rows(1).topk(K, 1).indices
    p, q = (_buckets(rows.log_softmax(1), ids).clamp(min=-2.0) for rows in (logits, _rows(1)))
    # The divergence of clamped values adds p - q of each bucket, as these no longer cancel.
    expected = (q.exp() * (q - p) - q.exp() + p.exp()).sum(1)
    torch.testing.assert_close(clamped.double(), expected, rtol=1e-5, atol=1e-6)
