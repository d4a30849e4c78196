"""``forward_log_probs`` on real megatron-core: layouts, DDP or not, nothing left behind."""

from __future__ import annotations

import contextlib
import inspect
import io
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.losses.logits.deferred_contents import LazyValues
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, on_ranks
from tests.references.live_bytes import reachable_bytes
from tests.worlds import scoring
from tests.worlds.scoring import LAYOUTS, TEMPERATURE, filled, microbatches

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])
SCORE: dict[str, Any] = {"with_entropy": True, "temperature": TEMPERATURE}


def _reference(bf16: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies of all responses."""
    samples = scoring.dense_log_probs(filled(TinyModel(bf16=bf16))[1])
    log_probs = [log_p_nv.gather(1, targets_n[:, None])[:, 0] for log_p_nv, targets_n in samples]
    return torch.cat(log_probs), torch.cat([-(log_p.exp() * log_p).sum(1) for log_p, _ in samples])


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("1 rank", "TP 2")))
@on_ranks(scoring.ranks_of)
def test_layouts(layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    expected = _reference()
    ddp, model = filled(TinyModel(**sizes))
    with mock.patch.object(LazyValues, "get", side_effect=AssertionError("the logits were made")):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            scores = forward_log_probs(model, microbatches(), **SCORE)
        of_ddp = forward_log_probs(ddp, microbatches(), progress=False, **SCORE)
    assert ("scoring" in stderr.getvalue()) == (torch.distributed.get_rank() == 0)
    assert (scores is not None) == (of_ddp is not None) == scoring.is_last_stage()
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if ranks == 1 else {"rtol": 1e-5, "atol": 2e-6}
    for kind, reference in zip(("log_probs", "entropy"), expected, strict=True):
        values = getattr(scores, kind, None)
        scoring.assert_same_everywhere(values)
        if values is not None:
            assert [len(sample) for sample in values] == scoring.RESPONSES
            assert all(map(torch.equal, values, getattr(of_ddp, kind)))
            torch.testing.assert_close(torch.cat(values).double(), reference, **tolerance)
    del scores, of_ddp
    _check_what_is_left(ddp)


def _check_what_is_left(ddp: Sequence[Any]) -> None:
    ddp[0].train()
    next(module for module in ddp[0].modules() if not list(module.children())).eval()
    config = get_model_config(ddp[0])
    config.timers, config.no_sync_func = None, ddp[0].no_sync
    config.grad_sync_func = [chunk.start_grad_sync for chunk in ddp]
    before, bytes_before = scoring.state_of(ddp), reachable_bytes()
    scores = forward_log_probs(ddp, microbatches(), progress=False, **SCORE)
    assert scoring.state_of(ddp) == before
    assert all(get_attr_wrapped_model(chunk, "decoder").input_tensor is None for chunk in ddp)
    assert all(group.is_last_microbatch for chunk in ddp for group in chunk.bucket_groups)
    for tensor in [] if scores is None else [*scores.log_probs, *scores.entropy]:
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad and not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        del tensor
    del scores
    assert reachable_bytes() == bytes_before


@on_ranks(1)
def test_bfloat16() -> None:
    """The model's outputs stay in that dtype where Megatron allows it."""
    expected, _ = _reference(bf16=True)
    forward, models = Float16Module.forward, filled(TinyModel(bf16=True))
    with mock.patch.object(Float16Module, "forward", autospec=True, side_effect=forward) as watched:
        of_ddp, scores = (forward_log_probs(model, microbatches(), **SCORE) for model in models)
    allowed = "fp32_output" in inspect.signature(forward).parameters
    assert {call.kwargs.get("fp32_output") for call in watched.mock_calls} == {False if allowed else None}
    assert all(map(torch.equal, scores.log_probs + scores.entropy, of_ddp.log_probs + of_ddp.entropy))
    torch.testing.assert_close(torch.cat(scores.log_probs).double(), expected, rtol=1e-5, atol=1e-6)


def _positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens_bs.shape[1])[None]


def _forward(chunk: Any, microbatch: Any) -> torch.Tensor:
    return chunk(microbatch["tokens"], _positions(microbatch["tokens"]), None)


@on_ranks(1)
def test_a_forward_that_raises() -> None:
    ddp, _ = filled(TinyModel())
    calls: list[Any] = []

    def fail(chunk: Any, microbatch: Any) -> torch.Tensor:
        assert not chunk.training and not torch.is_grad_enabled()
        calls.append(microbatch)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return _forward(chunk, microbatch)

    batches = microbatches()
    ddp[0].train()
    ddp[0].module.config.timers = timers = mock.MagicMock()
    before = scoring.state_of(ddp)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with pytest.raises(RuntimeError, match="out of memory"):
            forward_log_probs(ddp, batches, forward=fail)
        assert stderr.getvalue().endswith(" \r"), "the progress bar is still there"
    assert calls[0] is batches[0]
    assert scoring.state_of(ddp) == before
    assert torch.is_grad_enabled()
    timers.assert_not_called()


@on_ranks(1)
def test_custom_forwards() -> None:
    _, model = filled(TinyModel())
    held: list[weakref.ref[torch.Tensor]] = []

    def watch(chunk: Any, microbatch: Any) -> torch.Tensor:
        assert not [logits for logits in held if logits() is not None]
        logits = _forward(chunk, microbatch)
        held.append(weakref.ref(logits))
        return logits

    forward_log_probs(model, microbatches(), forward=watch, progress=False)
    assert len(held) == len(microbatches())

    def one_after_the_other(chunk: Any, microbatch: Any) -> torch.Tensor:
        """What an attention kernel for packed sequences would compute."""
        pieces = microbatch["tokens"].split(microbatch["lengths"], dim=1)
        return torch.cat([chunk(piece, _positions(piece), None) for piece in pieces], dim=1)

    tokens = torch.randint(32, (1, 11), generator=torch.Generator().manual_seed(0))
    packed = [{"tokens": tokens, "lengths": [4, 7]}]
    padded = [{"tokens": tokens[:, :4], "lengths": [4]}, {"tokens": tokens[:, 4:], "lengths": [7]}]
    from_packed = forward_log_probs(model, packed, forward=one_after_the_other, progress=False)
    from_padded = forward_log_probs(model, padded, progress=False)
    assert from_padded.entropy is None
    assert [len(sample) for sample in from_padded.log_probs] == [3, 6]
    # The joined pieces were materialized, one product each; the products of tiles may round otherwise.
    torch.testing.assert_close(from_packed.log_probs, from_padded.log_probs, rtol=1e-6, atol=1e-6)
    # Megatron's own cross entropy, over labels, says the same.
    losses = model[0](tokens[:, 4:10], torch.arange(6)[None], None, labels=tokens[:, 5:])
    torch.testing.assert_close(-losses[0], from_padded.log_probs[1], rtol=1e-5, atol=1e-6)

    with pytest.raises(InvalidInputError, match=r"microbatch 0: lengths \[4, 7\] do not fit"):
        forward_log_probs(model, packed, progress=False)
    with pytest.raises(InvalidInputError, match=r"returned \[1, 4, 32\] on the last stage. Expected"):
        forward_log_probs(model, packed, forward=lambda chunk, _: torch.zeros(1, 4, 32), progress=False)


@on_ranks(1)
def test_padding_of_the_vocabulary_has_no_probability() -> None:
    """On ranks, see ``test_padded_vocabulary.py``."""
    _, model = filled(TinyModel())
    tokens = torch.randint(20, (1, 11), generator=torch.Generator().manual_seed(0))
    alone = [{"tokens": tokens, "lengths": [11]}]
    [of_20] = forward_log_probs(model, alone, vocab_size=np.int64(20), progress=False).log_probs
    log_p_sv = model[0](tokens, _positions(tokens), None)[0, :-1, :20].double().log_softmax(-1)
    expected = log_p_sv.gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(of_20.double(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(InvalidInputError, match=r"vocab_size is 33\. Expected: 1 to 32"):
        forward_log_probs(model, alone, vocab_size=33)
    with pytest.raises(InvalidInputError, match="microbatch 0: token id"):
        forward_log_probs(model, alone, vocab_size=3)

    # Who only scores need not have seeded Megatron's generators.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    [unseeded] = forward_log_probs(model, alone, vocab_size=20, progress=False).log_probs
    assert torch.equal(unseeded, of_20) and not tracker.get_states()
