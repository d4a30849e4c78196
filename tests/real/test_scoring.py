"""Scores on real megatron-core: on each layout those of dense formulas, and nothing is left behind."""

import contextlib
import inspect
import io
import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch.testing import assert_close

from megatron_rl_patches import losses
from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import (
    forward_hidden_states,
    forward_log_probs,
    forward_topk,
    forward_values,
    output_head,
)
from megatron_rl_patches.losses.vocab.deferred import OutputLayer
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real import matrix
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.worlds.model import critic, fill_by_name

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])
K, TEMPERATURE = 5, 0.7
QUIET: dict[str, Any] = {"progress": False}
SCORE: dict[str, Any] = {"with_entropy": True, "temperature": TEMPERATURE}
ON_RANKS: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6, "check_dtype": False}
#: Options of the model.
NAMES = ("1 rank", "TP 2", "CP 2", "PP 2", "PP 2, VPP 2")
LAYOUTS: dict[str, dict[str, Any]] = {name: matrix.LAYOUTS[name][1] for name in NAMES}
LAYOUTS["EP 2"] = {"kind": "moe", "ep": 2}


def microbatches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    sizes = (3, 16), (2, 8), (2, 12)
    wide, narrow, other = (torch.randint(32, size, generator=generator) for size in sizes)
    of_wide: dict[str, Any] = {"total_lengths": torch.tensor([16, 9, 2]), "response_lengths": [5, 8, 1]}
    return [
        {"tokens": wide, **of_wide},
        {"tokens": narrow, "total_lengths": torch.tensor([3, 8]), "response_lengths": [0, 7]},
        {"tokens": other, "total_lengths": torch.tensor([12, 7]), "response_lengths": [11, 3]},
    ]


def filled(options: TinyModel) -> tuple[list[Any], list[Any]]:
    """Return a model in DDP and one that only scores, with the same weights on every layout."""
    ddp, _ = options.build()
    model = tiny_gpt.inference_model(options)
    fill_by_name([*ddp, *model])
    return ddp, model


def _forward(chunk: Any, batch: Any) -> torch.Tensor:
    output: torch.Tensor = chunk(batch["tokens"], torch.arange(batch["tokens"].shape[1])[None], None)
    return output


def dense_log_probs(model: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-softmax, in float64, and tokens of each response, of a model that each rank has alone."""
    samples = []
    for batch in microbatches():
        with torch.no_grad():
            log_p_bsv = (_forward(model[0], batch).double() / TEMPERATURE).log_softmax(-1)
        lengths = zip(batch["total_lengths"].tolist(), batch["response_lengths"], strict=True)
        for row, (end, response) in enumerate(lengths):
            start = end - response
            samples.append((log_p_bsv[row, start - 1 : end - 1], batch["tokens"][row, start:end]))
    return samples


def is_last_stage() -> bool:
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def state_of(model: Sequence[Any]) -> tuple[Any, ...]:
    modes = [module.training for chunk in model for module in chunk.modules()]
    return modes, dict(vars(get_model_config(model[0]))), torch.get_rng_state().tolist()


def assert_on_last_stage(tensors: Sequence[torch.Tensor] | None) -> bool:
    """Assert that ranks of the last stage, and only they, have these, bit for bit; return whether it is."""
    assert (tensors is not None) == is_last_stage()
    for other in everywhere(tensors):
        assert tensors is None or other is None or all(map(torch.equal, tensors, other))
    return is_last_stage()


def _other_weights(options: TinyModel) -> list[Any]:
    teacher = tiny_gpt.inference_model(options)
    fill_by_name(teacher)
    for parameter in (parameter for chunk in teacher for parameter in chunk.parameters()):
        parameter.data.mul_(0.7)
    return teacher


def _log_probs_and_entropy(samples: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    log_probs = [log_p_nv.gather(1, targets_n[:, None])[:, 0] for log_p_nv, targets_n in samples]
    return log_probs, [-(log_p_nv.exp() * log_p_nv).sum(1) for log_p_nv, _ in samples]


@pytest.mark.parametrize("layout", by_speed(LAYOUTS, fast=("TP 2", "PP 2", "CP 2")))
@on_ranks(lambda layout: 1 + (layout != "1 rank"))
def test_layouts(layout: str) -> None:
    options = TinyModel(**LAYOUTS[layout])
    alone = TinyModel(kind=options.kind)
    student = filled(alone)[1]
    samples, values = dense_log_probs(student), _dense_values(alone)
    of_teacher = dense_log_probs(_other_weights(alone))
    ddp, student = filled(options)
    teacher = _other_weights(options)
    with mock.patch.object(OutputLayer, "values", side_effect=AssertionError("the logits were made")):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            scores = forward_log_probs(student, microbatches(), **SCORE)
        of_ddp = forward_log_probs(ddp, microbatches(), **QUIET, **SCORE)
    assert ("scoring" in stderr.getvalue()) == (torch.distributed.get_rank() == 0)
    exact: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7, "check_dtype": False}
    for kind, reference in zip(("log_probs", "entropy"), _log_probs_and_entropy(samples), strict=True):
        found = getattr(scores, kind, None)
        if assert_on_last_stage(found):
            assert all(map(torch.equal, found, getattr(of_ddp, kind)))
            assert_close(found, reference, **(exact if layout == "1 rank" else ON_RANKS))
    del scores, of_ddp, found
    _check_what_is_left(ddp)
    _check_distributions(student, teacher, samples, of_teacher)
    model = critic(options)
    fill_by_name(model)
    found = forward_values(model, microbatches(), **QUIET)
    if assert_on_last_stage(found):
        assert_close(found, values, **ON_RANKS)


def _check_what_is_left(ddp: Sequence[Any]) -> None:
    ddp[0].train()
    next(module for module in ddp[0].modules() if not list(module.children())).eval()
    config = get_model_config(ddp[0])
    config.timers, config.no_sync_func = None, ddp[0].no_sync
    config.grad_sync_func = [chunk.start_grad_sync for chunk in ddp]
    before, bytes_before = state_of(ddp), reachable_bytes()
    scores = forward_log_probs(ddp, microbatches(), **QUIET, **SCORE)
    assert state_of(ddp) == before
    assert all(get_attr_wrapped_model(chunk, "decoder").input_tensor is None for chunk in ddp)
    assert all(group.is_last_microbatch for chunk in ddp for group in chunk.bucket_groups)
    for value in [*scores.log_probs, *scores.entropy] if scores is not None else ():
        assert value.dtype == torch.float32 and not (value.requires_grad or value.is_inference())
        # A value that is sent elsewhere takes no other one along.
        assert value.untyped_storage().nbytes() == value.nbytes
    scores = value = None
    assert reachable_bytes() == bytes_before


def _check_distributions(student: Any, teacher: Any, samples: Any, of_teacher: Any) -> None:
    """The student's top-k, the teacher at the student's ids, and the teacher's hidden states."""
    options = {"temperature": TEMPERATURE, **QUIET}
    own = forward_topk(student, microbatches(), np.int64(K), **options)
    at_own = forward_topk(teacher, microbatches(), at=own, **options)
    ids = None if own is None else [distribution.indices for distribution in own]
    by_ids = forward_topk(teacher, microbatches(), at=ids, **options)
    layer = getattr(unwrap(student[-1]), "output_layer", None)  # which only the last stage has
    adapter = nullcontext() if layer is None else mock.patch.object(layer, "forward", layer.forward)
    with adapter, pytest.raises(InvalidInputError, match="not the product of hidden states"):
        forward_hidden_states(student, microbatches(), **QUIET)
    for name in ("indices", "log_probs", "tail_log_prob"):
        for found in (own, at_own, by_ids):
            assert_on_last_stage(None if found is None else [getattr(one, name) for one in found])

    before = reachable_bytes()
    hidden = forward_hidden_states(teacher, microbatches(), **QUIET)
    # Nothing of a microbatch is left but the results: h numbers for each response token.
    size = teacher[-1].config.hidden_size
    assert reachable_bytes() - before == sum(4 * len(hidden_lh) * size for hidden_lh in hidden or ())
    if not assert_on_last_stage(hidden):
        return
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(at_own, by_ids, strict=True))
    for ours, dense in ((own, samples), (at_own, of_teacher)):
        for one, (log_p_nv, _), (of_student, _) in zip(ours, dense, samples, strict=True):
            ids_nk = of_student.topk(K).indices
            assert torch.equal(one.indices, ids_nk) and one.log_probs.dtype == torch.float32
            assert_close(one.log_probs, log_p_nv.gather(1, ids_nk), **ON_RANKS)
            tail = log_p_nv.scatter(1, ids_nk, float("-inf")).logsumexp(1)
            assert_close(one.tail_log_prob, tail, **ON_RANKS)
    # With the output layer, hidden states are the same distributions.
    head, group = output_head(teacher), parallel_state.get_tensor_model_parallel_group()
    how: dict[str, Any] = {"tp_group": group, "temperature": TEMPERATURE}
    for hidden_lh, of_sample in zip(hidden, at_own, strict=True):
        (logits,) = losses.FullDistribution.from_hidden(hidden_lh, head).logits()
        log_probs = losses.vocab_parallel_log_probs_at(logits, of_sample.indices, **how)
        assert_close(log_probs, of_sample.log_probs, **ON_RANKS)


def _dense_values(alone: TinyModel) -> list[torch.Tensor]:
    """Return the values of all tokens of each sample, of a model that each rank has alone."""
    model = critic(alone)
    fill_by_name(model)
    expected = []
    for batch in microbatches():
        outputs = _forward(model[0], batch)[..., 0]
        expected += [output[:length] for output, length in zip(outputs, batch["total_lengths"], strict=True)]
    return expected


@on_ranks(1)
def test_bfloat16() -> None:
    """The model's outputs stay in that dtype where Megatron allows it."""
    forward, models = Float16Module.forward, filled(TinyModel(bf16=True))
    expected, _ = _log_probs_and_entropy(dense_log_probs(models[1]))
    with mock.patch.object(Float16Module, "forward", autospec=True, side_effect=forward) as watched:
        of_ddp, scores = (forward_log_probs(model, microbatches(), **SCORE) for model in models)
    allowed = "fp32_output" in inspect.signature(forward).parameters
    assert {call.kwargs.get("fp32_output") for call in watched.mock_calls} == {False if allowed else None}
    assert all(map(torch.equal, scores.log_probs + scores.entropy, of_ddp.log_probs + of_ddp.entropy))
    assert_close(scores.log_probs, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


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
    before = state_of(ddp)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        with pytest.raises(RuntimeError, match="out of memory"):
            forward_log_probs(ddp, batches, forward=fail)
        assert stderr.getvalue().endswith(" \r"), "the progress bar is still there"
    assert calls[0] is batches[0]
    assert state_of(ddp) == before
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

    forward_log_probs(model, microbatches(), forward=watch, **QUIET)
    assert len(held) == len(microbatches())

    def one_after_the_other(chunk: Any, microbatch: Any) -> torch.Tensor:
        """What an attention kernel for packed sequences would compute."""
        pieces = microbatch["tokens"].split(microbatch["total_lengths"], dim=1)
        return torch.cat([_forward(chunk, {"tokens": piece}) for piece in pieces], dim=1)

    tokens = torch.randint(32, (1, 11), generator=torch.Generator().manual_seed(0))
    packed = [{"tokens": tokens, "total_lengths": [4, 7]}]
    padded = [{"tokens": part, "total_lengths": [part.shape[1]]} for part in tokens.split([4, 7], 1)]
    from_packed = forward_log_probs(model, packed, forward=one_after_the_other, **QUIET)
    from_padded = forward_log_probs(model, padded, **QUIET)
    assert from_padded.entropy is None
    assert [len(sample) for sample in from_padded.log_probs] == [3, 6]
    with pytest.warns(DeprecationWarning, match="'lengths' of a microbatch is now 'total_lengths'") as warned:
        of_old_name = forward_log_probs(model, [{"tokens": tokens[:, :4], "lengths": [4]}], **QUIET)
    assert warned[0].filename == __file__ and of_old_name.log_probs[0].equal(from_padded.log_probs[0])
    # The joined pieces were materialized, one product each; the products of tiles may round otherwise.
    assert_close(from_packed.log_probs, from_padded.log_probs, rtol=1e-6, atol=1e-6)
    # Megatron's own cross entropy, over labels, says the same.
    of_labels = model[0](tokens[:, 4:10], torch.arange(6)[None], None, labels=tokens[:, 5:])
    assert_close(-of_labels[0], from_padded.log_probs[1], rtol=1e-5, atol=1e-6)

    with pytest.raises(InvalidInputError, match=r"microbatch 0: total_lengths \[4, 7\] do not fit"):
        forward_log_probs(model, packed, **QUIET)
    with pytest.raises(InvalidInputError, match=r"returned \[1, 4, 32\] on the last stage. Expected"):
        forward_log_probs(model, packed, forward=lambda chunk, _: torch.zeros(1, 4, 32), **QUIET)

    # Who only scores need not have seeded Megatron's generators.
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    unseeded = forward_log_probs(model, padded, **QUIET)
    assert all(map(torch.equal, unseeded.log_probs, from_padded.log_probs)) and not tracker.get_states()

    def values(numbers: int) -> Any:
        output = torch.arange(11.0).view(1, 11, 1).expand(1, 11, numbers)
        return forward_values(model, packed, forward=lambda *_: output, **QUIET)

    assert [one.tolist() for one in values(1)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    with pytest.raises(InvalidInputError, match=r"2 numbers per token\. Expected: one"):
        values(2)
    with pytest.raises(InvalidInputError, match=r"`forward` returned NoneType\. Expected"):
        forward_values(model, packed, forward=lambda *_: None, **QUIET)
    for score in (LOG_PROBS, HIDDEN, TOPK):
        with pytest.raises(InvalidInputError, match=r"one number per token, .* call forward_values"):
            score(model, packed, forward=lambda *_: torch.zeros(1, 11, 1), **QUIET)


def _scores_without_padding(tp: int, size: int) -> list[torch.Tensor]:
    _, model = filled(TinyModel(tp=tp))
    group = parallel_state.get_tensor_model_parallel_group()
    tokens = torch.randint(size, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = [{"tokens": tokens, "total_lengths": [9, 6]}]
    how: dict[str, Any] = {"vocab_size": np.int64(size), **QUIET}
    scores = forward_log_probs(model, batch, with_entropy=True, **how)
    topk = forward_topk(model, batch, K, **how)
    at = forward_topk(model, batch, at=[of_sample.indices for of_sample in topk], **how)
    hidden = torch.cat(forward_hidden_states(model, batch, **QUIET))
    (logits,) = losses.FullDistribution.from_hidden(hidden, output_head(model)).logits()
    turned = logits[torch.arange(len(logits)).flip(0)]
    results = [*scores.log_probs, *scores.entropy]
    results.append(losses.full_vocabulary_divergence(logits, turned, vocab_size=size, tp_group=group))
    results.append(_policy_loss(model, tokens, scores.log_probs[:], size))
    with pytest.raises(InvalidInputError, match=f"differ in vocab_size, 32 and {size}:"):
        _policy_loss(model, tokens, scores.log_probs[:], None)
    with pytest.raises(InvalidInputError, match=f"differ in vocab_size, {size} and 32:"):
        _policy_loss(model, tokens, forward_log_probs(model, batch, **QUIET).log_probs, size)
    for distribution in (*topk, *at):
        results += [distribution.indices, distribution.log_probs, distribution.tail_log_prob]
    if tp == 1:
        log_p_sv = _forward(model[0], batch[0])[0, :-1, :size].double().log_softmax(-1)
        expected = log_p_sv.gather(1, tokens[0, 1:, None])[:, 0]
        assert_close(scores.log_probs[0].double(), expected, rtol=1e-6, atol=1e-6)
    for wrong, message in ((33, r"vocab_size is 33\. Expected: 1 to 32"), (3, "microbatch 0: token id")):
        with pytest.raises(InvalidInputError, match=message):
            forward_log_probs(model, batch, vocab_size=wrong)
    return results


def _policy_loss(model: Any, tokens: Any, old: Any, size: int | None) -> torch.Tensor:
    """Return the loss of the same weights: all ratios are one."""
    layout = losses.SequenceLayout.build([9, 6], [8, 5], qkv_format="bshd", max_seq_lens=[9, 9])
    logits = _forward(model[0], {"tokens": tokens})
    how: dict[str, Any] = {"tp_group": parallel_state.get_tensor_model_parallel_group(), "vocab_size": size}
    policy = losses.PolicyBatch([torch.tensor(1.0)] * 2, [torch.ones(8), torch.ones(5)], old_log_probs=old)
    loss, _, metrics = losses.make_loss_func([tokens[0], tokens[1, :6]], layout, policy, **how)(logits)
    assert_close(metrics["ratio"][0], metrics["ratio"][1], rtol=1e-5, atol=0)
    return loss


@on_ranks(2)
def test_padding_of_the_vocabulary_has_no_probability() -> None:
    """It begins on the first of two tensor-parallel ranks, on the second, and between the two."""
    for size in (7, 16, 20):
        pairs = zip(_scores_without_padding(2, size), _scores_without_padding(1, size), strict=True)
        for mine, whole in pairs:
            assert_close(mine, whole, rtol=1e-5, atol=2e-6, msg=f"vocab_size={size}")


# --- What one rank alone passes wrong is refused by name on every rank, before any of them waits for another.

#: Changes of the microbatch, and what the error says.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": None}, "there is no 'tokens' in it"),
    ({"tokens": torch.zeros(2, 6)}, r"tokens are torch.float32 \[2, 6\]. Expected: an int64 tensor"),
    ({"total_lengths": [9, 4]}, r"lengths \[9, 4\] do not fit tokens of shape \[2, "),
    ({"lengths": [6, 4]}, "lengths is the former name of total_lengths, and both are in it"),
    ({"total_lengths": [6, 0]}, r"lengths \[6, 0\] do not fit"),
    ({"response_lengths": [6, 3]}, "sample 0 has 6 tokens and a response of 6"),
    ({"response_lengths": [1]}, "there are 2 samples and 1 response_lengths"),
    ({"position_ids": torch.zeros(2, 4)}, "position_ids would not be read: pass a `forward`"),
    ({"indices": [1, 0]}, "results are in the order of the microbatches"),
    ({"tokens": torch.full((2, 8), 32)}, "token ids are 32 to 32. Expected: 0 to 31"),
    ({"total_lengths": [3.9, 4]}, "lengths is 3.9, expected integers"),
    ({"total_lengths": 4}, "lengths are 4, expected a list of integers"),
    ({"response_lengths": ["1", 1]}, "response_lengths is '1', expected integers"),
    ({"tokens": torch.zeros(2, 20, dtype=torch.int64)}, "tokens are 20 wide. Expected: at most 16"),
]
SCORES: list[Any] = [forward_log_probs, forward_values, forward_hidden_states, partial(forward_topk, k=1)]
LOG_PROBS, VALUES, HIDDEN, TOPK = SCORES
#: Functions, their arguments, and what the error says.
ARGUMENTS: list[tuple[Sequence[Any], dict[str, Any], str]] = [
    (SCORES[:3], {"output_device": "gpu"}, "output_device is 'gpu'"),
    (SCORES[:3], {"forward": 1}, "forward is 1"),
    (SCORES, {"model": None}, "the model has 0 chunks"),
    (SCORES, {"model": torch.nn.Linear(1, 1)}, "the model is a Linear. Expected: a model of Megatron's"),
    (SCORES[::3], {"vocab_size": 20.5}, r"vocab_size is 20\.5"),
    (SCORES[::3], {"vocab_size": "20"}, "vocab_size is '20'"),
    *(
        (SCORES[::3], {"temperature": bad}, "temperature is .*, expected a positive number")
        for bad in (0.0, -1.0, math.inf, math.nan, "1", torch.ones(2))
    ),
]
IDS = [torch.zeros(length, 1, dtype=torch.int64) for length in (5, 3)]
#: Arguments of ``forward_topk`` that the last stage alone reads.
OF_TOPK: list[tuple[dict[str, Any], str]] = [
    ({"k": 0}, "k is 0"),
    ({"k": 33}, "k is 33. Expected: 1 to 32"),
    ({"k": 2.5}, r"k is 2\.5"),
    ({"k": 1, "at": []}, "k is 1"),
    ({"k": None}, "pass k or `at`"),
    ({"k": None, "at": 3}, "`at` is a int"),
    ({"k": None, "at": IDS[:1]}, "ids for 1 samples, and the microbatches have 2"),
    ({"k": None, "at": [IDS[0], IDS[1][:2]]}, r"sample 1 is torch.int64 \[2, 1\]. Expected: int64 \[3, K\]"),
    ({"k": None, "at": [IDS[0][0], IDS[1]]}, r"sample 0 is torch.int64 \[1\]. Expected: int64 \[5, K\]"),
    ({"k": None, "at": [IDS[0] + 32, IDS[1]]}, "Expected: 0 to 31"),
]


class Unreadable(list[Any]):
    def __iter__(self) -> Any:
        raise OSError("no such file")


def microbatch(width: int = 6, **changes: Any) -> dict[str, Any]:
    return {"tokens": torch.arange(2 * width).reshape(2, width), "total_lengths": [6, 4], **changes}


@pytest.mark.parametrize("layout", by_speed(("PP 2", "TP 2", "CP 2"), ("PP 2",), ("CP 2",)))
@on_ranks(2)
def test_what_one_rank_passes_wrong(layout: str) -> None:
    options = TinyModel(**LAYOUTS[layout])
    options.initialize()
    model = tiny_gpt.inference_model(options)
    rank = torch.distributed.get_rank()
    good = partial(microbatch, 6 if options.cp == 1 else 8)  # with context parallelism, a multiple of four

    def refused(message: str, bad_rank: int, score: Any, batch: Any, **arguments: Any) -> None:
        own = rank == bad_rank
        with pytest.raises(InvalidInputError, match=message if own else f"rank {bad_rank}: .*{message}"):
            score(arguments.pop("model", model), batch, **QUIET, **arguments)
        torch.distributed.barrier()

    two_chunks = "the model has 2 chunks, parallel_state a virtual pipeline size of 1"
    before = state_of(model)
    for bad_rank in (0, 1):
        is_bad = rank == bad_rank
        for changes, message in FIELDS:
            refused(message, bad_rank, LOG_PROBS, [good(**changes if is_bad else {})])
        refused("microbatches are a dict", bad_rank, LOG_PROBS, good() if is_bad else [good()])
        refused("it is a str", bad_rank, LOG_PROBS, ["tokens" if is_bad else good()])
        for scores, arguments, message in (*ARGUMENTS, (SCORES, {"model": [*model, *model]}, two_chunks)):
            for score in scores:
                refused(message, bad_rank, score, [good()], **arguments if is_bad else {})
    for arguments, message in OF_TOPK:
        refused(message, 1, forward_topk, [good()], **arguments if rank == 1 else {"k": 1})
    # What ranks that score the same samples pass differently.
    for message, others, arguments in (
        (r"tokens of microbatch 0, \[2, \d\] with checksum", [good(tokens=good()["tokens"].flip(0))], {}),
        (r"tokens of microbatch 0, \[2, \d+\] with", [good(tokens=good()["tokens"].repeat(1, 2))], {}),
        (r"total_lengths of microbatch 0, \(6, \d\) and \(6, \d\)", [good(total_lengths=[6, 3])], {}),
        ("response_lengths of microbatch 0", [good(response_lengths=[1, 1])], {}),
        ("the number of microbatches, [12] and [12]", [good()] * 2, {}),
        ("temperature", [good()], {"temperature": 0.7}),
        ("vocab_size", [good()], {"vocab_size": 31}),
    ):
        scores = SCORES[:1] if arguments or "response" in message else SCORES
        for bad_rank, score in product((0, 1), scores):
            own = (others, arguments) if rank == bad_rank else ([good()], {})
            with pytest.raises(InvalidInputError, match=f"ranks 0 and 1 differ in {message}"):
                score(model, own[0], **QUIET, **own[1])
    for message, mine in {"k": {"k": 1 + rank}, "ids of `at`": {"at": [ids + rank for ids in IDS]}}.items():
        if layout != "PP 2":  # both ranks are on the last stage
            with pytest.raises(InvalidInputError, match=f"ranks 0 and 1 differ in {message}"):
                forward_topk(model, [good()], **QUIET, **mine)
    for mine, other in ((VALUES, HIDDEN), (LOG_PROBS, VALUES), (HIDDEN, TOPK)):
        with pytest.raises(InvalidInputError, match="ranks 0 and 1 differ in function, forward_"):
            (mine if rank else other)(model, [good()], **QUIET)

    def forgets(who: tuple[int, ...], chunk: Any, batch: Any) -> Any:
        logits = torch.zeros(*batch["tokens"].shape, 32) if layout == "CP 2" else _forward(chunk, batch)
        return None if rank in who else logits

    for who, score in product(((0,), (1,), (0, 1)), SCORES[::3]):
        message = rf"rank {who[0]}: `forward` returned NoneType\. Expected: what the"
        with pytest.raises(InvalidInputError, match=message.partition(": ")[2] if rank in who else message):
            score(model, [good()], forward=partial(forgets, who), **QUIET)
    # What is no wrong argument is raised as it is where it happened.
    with pytest.raises(OSError if rank else InvalidInputError, match="no such file"):
        forward_log_probs(model, Unreadable([good()]) if rank else [good()], **QUIET)
    assert state_of(model) == before


@on_ranks(4, timeout=60)
def test_last_stages_that_differ_are_named_on_all_stages() -> None:
    options = TinyModel(pp=2, cp=2)
    options.initialize()
    model = tiny_gpt.inference_model(options)
    k = 1 + (torch.distributed.get_rank() == 3)  # on the last stage
    with pytest.raises(InvalidInputError, match="differ in k, "):
        forward_topk(model, [microbatch(8)], k=k, **QUIET)
