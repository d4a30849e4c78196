"""Deferred logits when things go wrong: no logits are made without a warning, and nothing hangs.

On one rank that is tested in ``tests/unit/losses/logits/test_deferred.py``, any use of them in
``test_random_programs.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches.losses import deferred_logits, vocab_parallel_log_probs
from megatron_rl_patches.testing import RanksFailed
from tests.faults.groups import error_of, short_lived_groups
from tests.ranks import on_ranks
from tests.real import test_loss_func
from tests.real.test_lean_head import CASES, LAYOUTS, _train


@on_ranks(2, megatron=False, timeout=60)
def _differing(counts: tuple[int, int], folder: Path) -> None:
    """Rows of a rank whose number is not that of its tensor-parallel peer."""
    with short_lived_groups(folder, f"{counts}"):
        hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(40, 5, requires_grad=True)
        logits = deferred_logits(hidden, weight, tp_group=dist.group.WORLD)
        rows = slice(0, counts[dist.get_rank()])

        def step() -> None:
            tokens = torch.arange(6)[rows]
            vocab_parallel_log_probs(logits, tokens, rows=rows, tp_group=dist.group.WORLD).sum().backward()

        assert error_of(step) != "no error"
        assert logits.is_deferred


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
