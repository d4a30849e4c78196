"""``forward_log_probs`` on real megatron-core: layouts, DDP or not, nothing left behind."""

from __future__ import annotations

import contextlib
import io
import re
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.losses.logits.deferred_contents import LazyValues
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "TP 2": (2, {"tp": 2}),
    "TP 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "CP 2": (2, {"cp": 2}),
    "PP 2": (2, {"pp": 2}),
    "PP 2, VPP 2": (2, {"pp": 2, "vpp": 2}),
}
TEMPERATURE = 0.7
# Shape of the tokens, lengths, response lengths, and the place of each sample in the result.
MICROBATCHES: list[tuple[tuple[int, int], list[int], list[int], list[int]]] = [
    ((3, 16), [16, 9, 2], [5, 8, 1], [4, 0, 6]),
    ((2, 8), [3, 8], [0, 7], [1, 5]),
    ((2, 12), [12, 7], [11, 3], [2, 3]),
]
RESPONSES = [8, 0, 11, 3, 5, 7, 1]  # of the samples, in the order of the result


def by_speed(layouts: Sequence[str], fast: Sequence[str]) -> list[Any]:
    """Names of layouts for ``parametrize``: all but the fast ones are slow tests."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in layouts]


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout][0]


def microbatches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "tokens": torch.randint(32, shape, generator=generator),
            "lengths": torch.tensor(lengths),
            "response_lengths": responses,
            "indices": indices,
        }
        for shape, lengths, responses, indices in MICROBATCHES
    ]


def filled(options: TinyModel) -> tuple[list[Any], list[Any]]:
    """Return a model in DDP and one that only scores, with weights that are the same on every layout."""
    ddp, _ = options.build()
    for chunk in ddp:
        _fill(chunk)
    model = tiny_gpt.inference_model(options)
    for chunk, trained in zip(model, ddp, strict=True):
        chunk.load_state_dict(trained.module.state_dict())
    return ddp, model


def _fill(chunk: Any) -> None:
    """Give each weight values that follow from its name, cut as Megatron cuts it."""
    group = parallel_state.get_tensor_model_parallel_group()
    chunk = unwrap(chunk)
    numbers = [str(layer.layer_number) for layer in chunk.decoder.layers]
    for local_name, parameter in chunk.named_parameters():
        name = re.sub(r"(?<=layers\.)\d+", lambda local: numbers[int(local[0])], local_name)
        shape, is_cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            shape[parameter.partition_dim] *= group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name and "weight" in name)
        if is_cut:
            whole = whole.chunk(group.size(), parameter.partition_dim)[group.rank()]
        parameter.data.copy_(whole)


def dense_log_probs(model: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield each sample's place in the result, and log-softmax, in float64, and tokens of its response."""
    for batch in microbatches():
        tokens_bs = batch["tokens"]
        with torch.no_grad():
            mask = torch.ones(1, 1, tokens_bs.shape[1], tokens_bs.shape[1], dtype=torch.bool).triu(1)
            logits_bsv = model[0](tokens_bs, torch.arange(tokens_bs.shape[1]).expand_as(tokens_bs), mask)
        log_p_bsv = (logits_bsv.double() / TEMPERATURE).log_softmax(-1)
        samples = zip(batch["indices"], batch["lengths"].tolist(), batch["response_lengths"], strict=True)
        for row, (index, length, response) in enumerate(samples):
            log_p_nv = log_p_bsv[row, length - response - 1 : length - 1]
            yield index, log_p_nv, tokens_bs[row, length - response : length]


def _reference(bf16: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of all responses, from a model that each rank has alone."""
    samples = sorted(dense_log_probs(filled(TinyModel(bf16=bf16))[1]), key=lambda sample: sample[0])
    log_probs = [log_p_nv.gather(1, targets_n[:, None])[:, 0] for _, log_p_nv, targets_n in samples]
    return torch.cat(log_probs), torch.cat([-(log_p.exp() * log_p).sum(1) for _, log_p, _ in samples])


def assert_same_everywhere(tensors: Sequence[torch.Tensor] | None) -> None:
    """On all ranks of the last stage, bit for bit."""
    for other in everywhere(tensors):
        assert tensors is None or other is None or all(map(torch.equal, tensors, other))


def _state(model: Sequence[Any]) -> tuple[Any, ...]:
    modes = [module.training for chunk in model for module in chunk.modules()]
    return modes, dict(vars(get_model_config(model[0]))), torch.get_rng_state().tolist()


@pytest.mark.parametrize("layout", by_speed(list(LAYOUTS), fast=("1 rank", "TP 2")))
@on_ranks(ranks_of)
def test_layouts(layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]
    expected = _reference()
    options = TinyModel(**sizes)
    ddp, model = filled(options)
    score = {"with_entropy": True, "temperature": TEMPERATURE}
    with mock.patch.object(LazyValues, "get", side_effect=AssertionError("the logits were made")):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            scores = forward_log_probs(model, microbatches(), **score)
        of_ddp = forward_log_probs(ddp, microbatches(), progress=False, **score)
    assert ("scoring" in stderr.getvalue()) == (torch.distributed.get_rank() == 0)
    is_last = parallel_state.get_pipeline_model_parallel_rank() == options.pp - 1
    assert (scores is not None) == (of_ddp is not None) == is_last
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if ranks == 1 else {"rtol": 1e-5, "atol": 2e-6}
    for kind, reference in zip(("log_probs", "entropy"), expected, strict=True):
        values = getattr(scores, kind, None)
        assert_same_everywhere(values)
        if values is not None:
            assert [len(sample) for sample in values] == RESPONSES
            assert all(map(torch.equal, values, getattr(of_ddp, kind)))
            torch.testing.assert_close(torch.cat(values).double(), reference, **tolerance)
    del scores, of_ddp
    _check_what_is_left(ddp, score)
    _check_refusal(model, sizes.get("vpp", 1))
    assert _trained(options, scoring=False) == _trained(options, scoring=True)


def _check_what_is_left(ddp: Sequence[Any], score: dict[str, Any]) -> None:
    ddp[0].train()
    next(module for module in ddp[0].modules() if not list(module.children())).eval()
    config = get_model_config(ddp[0])
    config.timers, config.no_sync_func = None, ddp[0].no_sync
    config.grad_sync_func = [chunk.start_grad_sync for chunk in ddp]
    before, bytes_before = _state(ddp), reachable_bytes()
    scores = forward_log_probs(ddp, microbatches(), progress=False, **score)
    assert _state(ddp) == before
    assert all(get_attr_wrapped_model(chunk, "decoder").input_tensor is None for chunk in ddp)
    assert all(group.is_last_microbatch for chunk in ddp for group in chunk.bucket_groups)
    for tensor in [] if scores is None else [*scores.log_probs, *scores.entropy]:
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad and not tensor.is_inference()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        del tensor
    del scores
    assert reachable_bytes() == bytes_before
    config.no_sync_func = config.grad_sync_func = None


def _check_refusal(model: Sequence[Any], chunks: int) -> None:
    """The others are in ``tests/unit/inference/scoring``."""
    before = _state(model)
    another = f"^the model has {chunks + 1} chunks, parallel_state a virtual pipeline size of {chunks}"
    with pytest.raises(InvalidInputError, match=another):
        forward_log_probs([*model, model[0]], microbatches())
    out_of_vocabulary = microbatches()[0] | {"tokens": torch.full((3, 16), 32)}
    with pytest.raises(InvalidInputError, match="microbatch 0:"):
        forward_log_probs(model, [out_of_vocabulary])
    assert _state(model) == before


def _trained(options: TinyModel, scoring: bool) -> str:
    """Weights after two steps, scored by the trained model itself in between or not."""
    model, optimizer = options.build()
    data = tiny_gpt.data_iterators(options)
    with applied("reentrant-train", settings=Settings(train_functions=("tests.references.tiny_gpt:train",))):
        for _ in range(2):
            tiny_gpt.train(model, optimizer, data, [2], options)
            if scoring:
                forward_log_probs(model, microbatches(), progress=False)
    return tiny_gpt.checksum(model, optimizer)


@on_ranks(1)
def test_bfloat16() -> None:
    expected = _reference(bf16=True)
    models = filled(TinyModel(bf16=True))
    of_ddp, scores = (
        forward_log_probs(model, microbatches(), with_entropy=True, temperature=TEMPERATURE)
        for model in models
    )
    assert all(map(torch.equal, scores.log_probs + scores.entropy, of_ddp.log_probs + of_ddp.entropy))
    torch.testing.assert_close(torch.cat(scores.log_probs).double(), expected[0], rtol=1e-5, atol=1e-6)


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
    before = _state(ddp)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with pytest.raises(RuntimeError, match="out of memory"):
            forward_log_probs(ddp, batches, forward=fail)
        assert stderr.getvalue().endswith(" \r"), "the progress bar is still there"
    assert calls[0] is batches[0]
    assert _state(ddp) == before
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
    assert len(held) == len(MICROBATCHES)

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
