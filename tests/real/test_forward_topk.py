"""``forward_topk`` on real megatron-core: a student's own top-k, and a teacher at the student's ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import FullDistribution, vocab_parallel_log_probs_at
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.live_bytes import live_bytes
from tests.real.small_models import by_speed
from tests.real.test_scoring import (
    LAYOUTS,
    TEMPERATURE,
    _fill,
    _inference_model,
    dense_log_probs,
    microbatches,
)

K = 5
Distributions = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _models(options: Any) -> tuple[Any, Any]:
    """Student and teacher: the second has other weights."""
    from megatron.core import parallel_state

    from tests.real import tiny_gpt

    ddp, _ = tiny_gpt.build(options)
    tp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    _fill(ddp, tp)
    student, teacher = _inference_model(options, ddp), _inference_model(options, ddp)
    with torch.no_grad():
        for chunk in teacher:
            for parameter in chunk.parameters():
                parameter.mul_(0.7)
    return student, teacher


def _student_and_teacher(sizes: dict[str, Any]) -> tuple[Distributions, Distributions] | None:
    with cpu_backend():
        from megatron_rl_patches.inference import forward_hidden_states, forward_topk, output_head
        from tests.real import tiny_gpt

        student, teacher = _models(tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(**sizes)))
        options = {"temperature": TEMPERATURE, "progress": False}
        own = forward_topk(student, microbatches(), K, **options)
        of_teacher = forward_topk(teacher, microbatches(), at=own, **options)
        ids = None if own is None else [distribution.indices for distribution in own]
        by_ids = forward_topk(teacher, microbatches(), at=ids, **options)
        for refused, message in (
            ({"k": 0}, "k is 0"),
            ({"k": 33}, "k is 33. Expected: 1 to 32"),
            ({"k": 2, "at": []}, "k is 2"),
            ({"k": 2, "allgather_cp": True}, "all-gather context parallelism is not supported"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                forward_topk(student, microbatches(), **refused)
        # Only the last stage can see it, and all stages raise.
        for spoil, message in (
            (lambda ids: None, "pass k or"),
            (lambda ids: ids[:3], "ids for 3 samples, and the microbatches have 7"),
            (lambda ids: [*ids[:6], ids[6][:, :2]], r"sample 6 is \[1, 2\]. Expected: \[1, 5\]"),
            (lambda ids: [ids[0][1:], *ids[1:]], r"sample 0 is \[7, 5\]. Expected: \[8, 5\]"),
            (lambda ids: [ids[0].float(), *ids[1:]], "sample 0 is torch.float32"),
            (lambda ids: [ids[0] + 32, *ids[1:]], "Expected: 0 to 31"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                forward_topk(student, microbatches(), at=None if ids is None else spoil(ids))
        before = live_bytes()
        hidden = forward_hidden_states(teacher, microbatches(), progress=False)
        # Nothing of a microbatch is left but the results: h numbers for each response token.
        assert live_bytes() - before == sum(
            4 * len(hidden_lh) * teacher[-1].config.hidden_size for hidden_lh in hidden or ()
        )
        with _adapter(student), pytest.raises(InvalidInputError, match="not the product of hidden states"):
            forward_hidden_states(student, microbatches(), progress=False)
        if own is None:
            assert of_teacher is None and hidden is None
            return None
        _check_hidden_states(hidden, output_head(teacher), of_teacher)
        assert by_ids is not None and of_teacher is not None
        assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(of_teacher, by_ids, strict=True))
        return _plain(own), _plain(of_teacher)


@contextmanager
def _adapter(model: Any) -> Iterator[None]:
    """Give the output layer, which only the last stage has, a forward of its own."""
    layer = getattr(unwrap(model[-1]), "output_layer", None)
    with nullcontext() if layer is None else mock.patch.object(layer, "forward", layer.forward):
        yield


def _check_hidden_states(hidden: Any, head: Any, topk: Any) -> None:
    """With the output layer they are the same distributions, on every rank."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    for hidden_lh, of_sample in zip(hidden, topk, strict=True):
        assert hidden_lh.shape == (len(of_sample), head.weight.shape[1])
        (logits,) = FullDistribution.of(hidden_lh, head).logits()
        log_probs = vocab_parallel_log_probs_at(
            logits, of_sample.indices, tp_group=group, temperature=TEMPERATURE
        )
        torch.testing.assert_close(log_probs, of_sample.log_probs, rtol=1e-5, atol=2e-6)


def _plain(distributions: Any) -> Distributions:
    return [(d.indices, d.log_probs, d.tail_log_prob) for d in distributions]


def _reference() -> tuple[Distributions, Distributions]:
    with cpu_backend():
        from tests.real import tiny_gpt

        of_models = map(dense_log_probs, _models(tiny_gpt.Options()))
        found: tuple[dict[int, Any], dict[int, Any]] = {}, {}
        for (index, of_student_nv, _), (_, of_teacher_nv, _) in zip(*of_models, strict=True):
            ids_nk = of_student_nv.topk(K).indices
            for log_p_nv, per_sample in zip((of_student_nv, of_teacher_nv), found, strict=True):
                outside = log_p_nv.scatter(1, ids_nk, float("-inf")).logsumexp(1)
                per_sample[index] = ids_nk, log_p_nv.gather(1, ids_nk), outside
        return tuple([found[i] for i in sorted(found)] for found in found)


@pytest.fixture(scope="module")
def reference() -> tuple[Distributions, Distributions]:
    return spawn_ranks(_reference, 1, timeout=120)[0]


@pytest.mark.parametrize(
    "layout", by_speed([name for name in LAYOUTS if "parallel" not in name], fast=("1 rank", "TP 2", "PP 2"))
)
def test_layouts(layout: str, reference: tuple[Distributions, Distributions]) -> None:
    ranks, sizes = LAYOUTS[layout]
    runs = [run for run in spawn_ranks(_student_and_teacher, ranks, sizes, timeout=120) if run is not None]
    assert len(runs) == (1 if "pp" in sizes else ranks)
    for run in runs:
        for found, expected in zip(run, reference, strict=True):
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours[0], theirs[0])
                assert ours[1].dtype == torch.float32
                torch.testing.assert_close(ours[1].double(), theirs[1], rtol=1e-5, atol=2e-6)
                torch.testing.assert_close(ours[2].double(), theirs[2], rtol=1e-5, atol=2e-6)
            assert all(
                torch.equal(a, b)
                for ours, other in zip(run, runs[0], strict=True)
                for sample, same in zip(ours, other, strict=True)
                for a, b in zip(sample, same, strict=True)
            )
