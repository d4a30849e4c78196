"""``forward_log_probs`` on real megatron-core: layouts, DDP or not, nothing left behind."""

from __future__ import annotations

import contextlib
import io
import re
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses.logits.deferred_contents import LazyValues
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.real.live_bytes import live_bytes
from tests.real.small_models import by_speed

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


# -- on a rank


@dataclass
class Run:
    """One rank's account; scores are ``(log-probs, entropies)``, ``None`` off the last stage."""

    scores: tuple[list[torch.Tensor], list[torch.Tensor]] | None
    ddp_scores: tuple[list[torch.Tensor], list[torch.Tensor]] | None
    reference: tuple[list[torch.Tensor], list[torch.Tensor]] | None
    left_behind: dict[str, Any] = field(default_factory=dict)
    progress: str = ""
    refused: list[str] = field(default_factory=list)
    checksums: tuple[str, str] = ("", "")


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


def _global_number(numbers: list[int], local: re.Match[str]) -> str:
    return str(numbers[int(local[0])])


def _fill(model: Sequence[Any], tp: tuple[int, int]) -> None:
    """Give every layout the same weights: each from its name, cut as Megatron cuts it."""
    tp_rank, tp_size = tp
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        numbers = [layer.layer_number for layer in chunk.decoder.layers]
        for local_name, parameter in chunk.named_parameters():
            name = re.sub(r"(?<=layers\.)\d+", partial(_global_number, numbers), local_name)
            shape = list(parameter.shape)
            cut = getattr(parameter, "tensor_model_parallel", False)
            if cut:
                shape[parameter.partition_dim] *= tp_size
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name and "weight" in name)
            with torch.no_grad():
                parameter.copy_(whole.chunk(tp_size, parameter.partition_dim)[tp_rank] if cut else whole)


def _inference_model(options: Any, ddp: Sequence[Any]) -> list[Any]:
    from tests.real import tiny_gpt

    model = tiny_gpt.inference_model(options)
    for chunk, trained in zip(model, ddp, strict=True):
        chunk.load_state_dict(trained.module.state_dict())
    return model


def _state(model: Sequence[Any]) -> tuple[Any, ...]:
    from megatron.core.utils import get_model_config

    modes = [module.training for chunk in model for module in chunk.modules()]
    return modes, dict(vars(get_model_config(model[0]))), torch.get_rng_state().tolist()


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


def _reference(model: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    log_probs: dict[int, torch.Tensor] = {}
    entropies: dict[int, torch.Tensor] = {}
    for index, log_p_nv, targets_n in dense_log_probs(model):
        log_probs[index] = log_p_nv.gather(1, targets_n[:, None])[:, 0]
        entropies[index] = -(log_p_nv.exp() * log_p_nv).sum(1)
    return [log_probs[i] for i in sorted(log_probs)], [entropies[i] for i in sorted(entropies)]


def _plain(scores: Any) -> Any:
    return None if scores is None else (scores.log_probs, scores.entropy)


def _score(sizes: dict[str, Any], bf16: bool = False) -> Run:
    with cpu_backend():
        from megatron.core import parallel_state

        from megatron_rl_patches.inference import forward_log_probs
        from tests.real import tiny_gpt

        options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(**sizes), bf16=bf16)
        ddp, _ = tiny_gpt.build(options)
        tp = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        _fill(ddp, tp)
        model = _inference_model(options, ddp)
        score = {"with_entropy": True, "temperature": TEMPERATURE}

        with mock.patch.object(LazyValues, "get", side_effect=AssertionError("the logits were made")):
            run = Run(
                _plain(forward_log_probs(model, microbatches(), **score)),
                _plain(forward_log_probs(ddp, microbatches(), progress=False, **score)),
                None,
            )
        run.reference = _reference(model) if options.parallelism == tiny_gpt.Parallelism() else None
        _record_what_is_left(run, ddp, score)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            forward_log_probs(model, microbatches(), **score)
        run.progress = stderr.getvalue()
        _record_refusals(run, model)
        if not bf16:
            run.checksums = (_trained(options, scoring=False), _trained(options, scoring=True))
        return run


def _score_in_both_dtypes() -> tuple[Run, Run]:
    return _score({}), _score({}, bf16=True)


def _record_what_is_left(run: Run, ddp: Sequence[Any], score: dict[str, Any]) -> None:
    from megatron.core.utils import get_attr_wrapped_model, get_model_config

    from megatron_rl_patches.inference import forward_log_probs

    ddp[0].train()
    next(module for module in ddp[0].modules() if not list(module.children())).eval()
    config = get_model_config(ddp[0])
    config.timers, config.no_sync_func = None, ddp[0].no_sync
    config.grad_sync_func = [chunk.start_grad_sync for chunk in ddp]
    before = _state(ddp)
    bytes_before = live_bytes()
    scores = forward_log_probs(ddp, microbatches(), progress=False, **score)
    tensors = [] if scores is None else [*scores.log_probs, *scores.entropy]
    run.left_behind = {
        "same state": _state(ddp) == before,
        "inputs": [get_attr_wrapped_model(chunk, "decoder").input_tensor for chunk in ddp],
        "grad": any(tensor.requires_grad or tensor.is_inference() for tensor in tensors),
        "own memory": all(t.untyped_storage().nbytes() == t.nbytes for t in tensors),
        "float32": all(tensor.dtype == torch.float32 for tensor in tensors),
        "reducing": all(group.is_last_microbatch for chunk in ddp for group in chunk.bucket_groups),
    }
    del scores, tensors
    run.left_behind["bytes"] = live_bytes() - bytes_before
    config.no_sync_func = config.grad_sync_func = None


def _record_refusals(run: Run, model: Sequence[Any]) -> None:
    from megatron_rl_patches.inference import forward_log_probs

    too_long = [*microbatches()[:-1], microbatches()[-1] | {"lengths": [13, 7]}]
    out_of_vocabulary = microbatches()[0] | {"tokens": torch.full((3, 16), 32)}
    for given, options in (
        (([*model, model[0]], microbatches()), {}),
        ((model, []), {}),
        ((model, too_long), {}),
        ((model, [out_of_vocabulary]), {}),
        ((model, microbatches()), {"temperature": float("inf")}),
    ):
        before = _state(model)
        with pytest.raises(InvalidInputError) as refused:
            forward_log_probs(*given, **options)
        assert _state(model) == before
        run.refused.append(str(refused.value))


def _trained(options: Any, scoring: bool) -> str:
    """Weights after two steps, scored by the trained model itself in between or not."""
    from megatron_rl_patches import Settings, applied
    from megatron_rl_patches.inference import forward_log_probs
    from tests.real import tiny_gpt

    model, optimizer = tiny_gpt.build(options)
    data = tiny_gpt.data_iterators(options)
    with applied("reentrant-train", settings=Settings(train_functions=("tests.real.tiny_gpt:train",))):
        for _ in range(2):
            tiny_gpt.train(model, optimizer, data, [2], options)
            if scoring:
                forward_log_probs(model, microbatches(), progress=False)
    return tiny_gpt.checksum(model, optimizer)


def _fail_and_plug_in() -> None:
    """On one rank: a `forward` that raises, packed sequences, defaults, bad logits, context parallelism."""
    with cpu_backend():
        from unittest import mock

        from megatron.core import tensor_parallel

        from megatron_rl_patches.inference import forward_log_probs
        from tests.real import tiny_gpt

        options = tiny_gpt.Options()
        ddp, _ = tiny_gpt.build(options)
        model = _inference_model(options, ddp)
        calls: list[Any] = []

        def fail(chunk: Any, microbatch: Any) -> torch.Tensor:
            assert not chunk.training and not torch.is_grad_enabled()
            calls.append(microbatch)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return chunk(microbatch["tokens"], torch.arange(microbatch["tokens"].shape[1])[None], None)

        given = microbatches()
        ddp[0].train()
        ddp[0].module.config.timers = timers = mock.MagicMock()
        before = _state(ddp)
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            with pytest.raises(RuntimeError, match="out of memory"):
                forward_log_probs(ddp, given, forward=fail)
            assert stderr.getvalue().endswith(" \r"), "the progress bar is still there"
        assert calls[0] is given[0]
        assert _state(ddp) == before
        assert torch.is_grad_enabled()
        timers.assert_not_called()

        held: list[weakref.ref[torch.Tensor]] = []

        def watch(chunk: Any, microbatch: Any) -> torch.Tensor:
            assert not [logits for logits in held if logits() is not None]
            logits = chunk(microbatch["tokens"], torch.arange(microbatch["tokens"].shape[1])[None], None)
            held.append(weakref.ref(logits))
            return logits

        forward_log_probs(model, given, forward=watch, progress=False)
        assert len(held) == len(given)

        def one_after_the_other(chunk: Any, microbatch: Any) -> torch.Tensor:
            """What an attention kernel for packed sequences would compute."""
            pieces = microbatch["tokens"].split(microbatch["lengths"], dim=1)
            logits = [chunk(piece, torch.arange(piece.shape[1])[None], None) for piece in pieces]
            return torch.cat(logits, dim=1)

        tokens = torch.randint(32, (1, 11), generator=torch.Generator().manual_seed(0))
        # Padding of the vocabulary has no probability.
        alone = [{"tokens": tokens % 20, "lengths": [11]}]
        [of_20] = forward_log_probs(model, alone, vocab_size=20, progress=False).log_probs
        logits_bsv = model[0](tokens % 20, torch.arange(11)[None], None)[..., :20].double()
        expected = logits_bsv.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None] % 20)[:, 0]
        torch.testing.assert_close(of_20.double(), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(InvalidInputError, match=r"vocab_size is 33\. Expected: 1 to 32"):
            forward_log_probs(model, alone, vocab_size=33)
        with pytest.raises(InvalidInputError, match="microbatch 0: token id"):
            forward_log_probs(model, alone, vocab_size=3)

        # Who only scores need not have seeded Megatron's generators.
        tracker = tensor_parallel.get_cuda_rng_tracker()
        seeded = tracker.get_states()
        tracker.reset()
        [unseeded] = forward_log_probs(model, alone, vocab_size=20, progress=False).log_probs
        assert torch.equal(unseeded, of_20) and not tracker.get_states()
        tracker.set_states(seeded)

        packed = [{"tokens": tokens, "lengths": [4, 7]}]
        padded = [{"tokens": tokens[:, :4], "lengths": [4]}, {"tokens": tokens[:, 4:], "lengths": [7]}]
        from_packed = forward_log_probs(model, packed, forward=one_after_the_other, progress=False)
        from_padded = forward_log_probs(model, padded, progress=False)
        assert from_padded.entropy is None
        assert [len(sample) for sample in from_padded.log_probs] == [3, 6]
        _assert_equal(from_packed.log_probs, from_padded.log_probs)
        # Megatron's own cross entropy, over labels, says the same.
        labels = tokens[:, 5:]
        losses = model[0](tokens[:, 4:10], torch.arange(6)[None], None, labels=labels)
        torch.testing.assert_close(-losses[0], from_padded.log_probs[1], rtol=1e-5, atol=1e-6)

        with pytest.raises(InvalidInputError, match=r"microbatch 0: lengths \[4, 7\] do not fit"):
            forward_log_probs(model, packed, progress=False)
        with pytest.raises(InvalidInputError, match=r"returned \[1, 4, 32\] on the last stage. Expected"):
            forward_log_probs(model, packed, forward=lambda chunk, _: torch.zeros(1, 4, 32), progress=False)


# -- in the test


def _assert_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(*pair) for pair in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def float32_and_bfloat16() -> tuple[Run, Run]:
    return spawn_ranks(_score_in_both_dtypes, 1, timeout=120)[0]


@pytest.fixture(scope="module")
def one_rank(float32_and_bfloat16: tuple[Run, Run]) -> Run:
    return float32_and_bfloat16[0]


def test_one_rank_equals_a_float64_reference(one_rank: Run) -> None:
    assert one_rank.scores is not None and one_rank.reference is not None
    responses = {
        index: response
        for _, _, response_lengths, indices in MICROBATCHES
        for index, response in zip(indices, response_lengths, strict=True)
    }
    assert [len(sample) for sample in one_rank.scores[0]] == [responses[i] for i in range(len(responses))]
    for scores, reference in zip(one_rank.scores, one_rank.reference, strict=True):
        torch.testing.assert_close(torch.cat(scores).double(), torch.cat(reference), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("1 rank", "TP 2")))
def test_layouts(layout: str, one_rank: Run) -> None:
    ranks, sizes = LAYOUTS[layout]
    runs = spawn_ranks(_score, ranks, sizes, timeout=120) if ranks > 1 else [one_rank]
    on_last_stage = [run for run in runs if run.scores is not None]
    assert len(on_last_stage) == sizes.get("tp", 1) * sizes.get("cp", 1) and runs[-1].scores is not None
    for run in on_last_stage:
        for kind in (0, 1):
            _assert_equal(run.scores[kind], run.ddp_scores[kind])
            _assert_equal(run.scores[kind], on_last_stage[0].scores[kind])
            torch.testing.assert_close(run.scores[kind], one_rank.scores[kind], rtol=1e-5, atol=2e-6)
    for rank, run in enumerate(runs):
        assert run.left_behind == {
            "same state": True,
            "inputs": [None] * sizes.get("vpp", 1),
            "grad": False,
            "own memory": True,
            "float32": True,
            "reducing": True,
            "bytes": 0,
        }
        assert ("scoring" in run.progress) == (rank == 0)
        assert run.checksums[0] == run.checksums[1] != ""
        assert [message.split(":")[0] for message in run.refused] == [
            f"the model has {sizes.get('vpp', 1) + 1} chunks, parallel_state a virtual pipeline size of "
            f"{sizes.get('vpp', 1)}",
            "there are no microbatches to score",
            "microbatch 2",
            "microbatch 0",
            "temperature is inf, expected a positive number in the range of float32",
        ]


def test_bfloat16(float32_and_bfloat16: tuple[Run, Run]) -> None:
    run = float32_and_bfloat16[1]
    for kind in (0, 1):
        _assert_equal(run.scores[kind], run.ddp_scores[kind])
    torch.testing.assert_close(
        torch.cat(run.scores[0]).double(), torch.cat(run.reference[0]), rtol=1e-5, atol=1e-6
    )


def test_failures_and_custom_forwards() -> None:
    spawn_ranks(_fail_and_plug_in, 1, timeout=120)
