"""Each argument of each public function, in turn of a wrong shape, dtype, device or value.

Either an error names it, or the result is right: :data:`RIGHT` lists what may be passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import (
    DistillationBatch,
    DistillationOptions,
    FullDistribution,
    OutputHead,
    PolicyBatch,
    PolicyOptions,
    SequenceLayout,
    TopKDistribution,
    vocab_parallel_log_probs_at,
)

N, V = 4, 7


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def both(make: Callable[[], Any]) -> list[Any]:
    """One for each of two responses of two tokens."""
    return [make(), make()]


IDS = torch.tensor([[0, 3], [1, 2], [6, 5], [4, 0]])
LOG_PROBS, TAIL = vocab_parallel_log_probs_at(random(N, V), IDS, with_tail=True)
TOPK = TopKDistribution(IDS, LOG_PROBS, TAIL)
LAYOUT = SequenceLayout.build([4, 3], [2, 2])
MASKS, VALUES = both(lambda: torch.ones(2)), both(lambda: random(2))
POLICY = {
    "advantages": VALUES,
    "loss_masks": MASKS,
    **dict.fromkeys(("old_log_probs", "ref_log_probs", "rollout_log_probs"), VALUES),
}
DISTILLATION = {"teachers": [TOPK.split([2, 2])], "loss_masks": MASKS, "old": TOPK.split([2, 2])}
OF_LOGITS = {"logits": random(N, V), "temperature": 1.0, "block_bytes": 8}
OF_MICROBATCH = {"logits": random(1, 7, V), "layout": LAYOUT, "temperature": 1.0, "normalizer": 2.0}
OF_BUCKETS = {"log_probs": LOG_PROBS, "tail_log_prob": TAIL, "teacher": TOPK}
CONSTANT = {"normalization": "constant", "constant_length": 5}


def policy_loss_func(logits: Any, **arguments: Any) -> Any:
    return losses.make_loss_func(**arguments)(logits)


def distillation_loss_func(logits: Any, **arguments: Any) -> Any:
    return losses.make_distillation_loss_func(**arguments)(logits)


CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (losses.vocab_parallel_log_probs, {**OF_LOGITS, "targets": IDS[:, 0], "ignore_index": -100}),
    (
        losses.vocab_parallel_log_probs_and_entropy,
        {**OF_LOGITS, "targets": IDS[:, 0], "keep_mask": torch.ones(N, V, dtype=torch.bool)},
    ),
    (losses.vocab_parallel_log_probs_at, {**OF_LOGITS, "indices": IDS}),
    (losses.vocab_parallel_topk, {**OF_LOGITS, "k": 2}),
    (
        losses.deferred_logits,
        {"hidden": random(N, 3), "weight": random(V, 3), "bias": random(V), "tile_bytes": 8, "keep_bytes": 8},
    ),
    (
        losses.full_vocabulary_divergence,
        {
            "student": random(N, V),
            "teacher": random(N, V),
            "old": random(N, V),
            "beta": 0.5,
            "divergence": "importance_weighted_reverse_kl",
            "temperature": 1.0,
            "num_ids": V,
            "teacher_weights": [1.0],
        },
    ),
    (
        policy_loss_func,
        {**OF_MICROBATCH, "tokens": [IDS.flatten()[:4], IDS.flatten()[:3]], "batch": PolicyBatch(**POLICY)},
    ),
    (distillation_loss_func, {**OF_MICROBATCH, "batch": DistillationBatch(**DISTILLATION)}),
    (
        losses.policy_loss,
        {
            "log_probs": VALUES,
            "batch": PolicyBatch(**POLICY),
            "options": PolicyOptions(),
            "entropies": VALUES,
        },
    ),
    (
        losses.distillation_loss,
        {
            "log_probs": list(LOG_PROBS.split(2)),
            "tail_log_probs": list(TAIL.split(2)),
            "batch": DistillationBatch(**DISTILLATION),
            "options": DistillationOptions(),
        },
    ),
    (losses.estimate_kl, {"log_ratio": random(3), "estimator": "k3"}),
    (losses.group_advantages, {"rewards": random(4), "groups": torch.tensor([0, 0, 1, 1]), "eps": 1e-6}),
    (losses.token_weights, {"loss_masks": MASKS, **CONSTANT, "dtype": torch.float32}),
    (losses.mean_count, {"loss_masks": MASKS, "num_microbatches": 2, "normalization": "token"}),
    (losses.average_metrics, {"reports": [{"loss": torch.ones(2)}] * 2}),
    (losses.mix_teachers, {"teachers": [TOPK, TOPK], "weights": [1.0, 2.0]}),
    (losses.opd_advantages, {"log_probs": random(3), "teacher_log_probs": random(3)}),
    (losses.reverse_kl, OF_BUCKETS),
    (losses.jensen_shannon, {**OF_BUCKETS, "beta": 0.5}),
    (losses.importance_weighted_reverse_kl, {**OF_BUCKETS, "old": TOPK}),
    (TopKDistribution, {"indices": IDS, "log_probs": LOG_PROBS, "tail_log_prob": TAIL, "temperature": 1.0}),
    (FullDistribution, {"hidden": (random(N, 3),), "heads": (OutputHead(random(V, 3)),), "weights": (1.0,)}),
    (OutputHead, {"weight": random(V, 3), "bias": random(V)}),
    (PolicyBatch, POLICY),
    (DistillationBatch, DISTILLATION),
    (
        PolicyOptions,
        {
            "objective": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 2.0,
            "entropy_coef": 0.1,
            "kl_coef": 0.1,
            "kl_estimator": "k3",
            "tis_clip": 2.0,
            **CONSTANT,
        },
    ),
    (
        DistillationOptions,
        {"divergence": "forward_kl", "beta": 0.5, "teacher_weights": (1.0,), "num_ids": 3, **CONSTANT},
    ),
    (
        SequenceLayout.build,
        {
            "total_lengths": [4, 3],
            "response_lengths": [2, 2],
            "qkv_format": "thd",
            "num_rows": 8,
            "padded_lengths": [4, 4],
            "cp_rank": 0,
            "cp_size": 1,
            "allgather_cp": False,
            "own_rows": False,
        },
    ),
    (LAYOUT.rows_of, {"logits": random(1, 7, V)}),
    (LAYOUT.split_responses, {"values": random(4)}),
    (LAYOUT.local_parts, {"responses": VALUES}),
    (LAYOUT.gather_responses, {"values": VALUES}),
]
#: What may be passed: not a number and dtypes are used as they are, and defaults may be said.
RIGHT = {
    "vocab_parallel_log_probs(logits)": "float16 nan",
    "vocab_parallel_log_probs(block_bytes)": "None",
    "vocab_parallel_log_probs(ignore_index)": "-1 0",
    "vocab_parallel_log_probs_and_entropy(logits)": "float16 nan",
    "vocab_parallel_log_probs_and_entropy(block_bytes)": "None",
    "vocab_parallel_log_probs_and_entropy(keep_mask)": "None bool",
    "vocab_parallel_log_probs_at(logits)": "float16 nan",
    "vocab_parallel_log_probs_at(block_bytes)": "None",
    "vocab_parallel_topk(logits)": "shorter empty float16 nan",
    "vocab_parallel_topk(block_bytes)": "None",
    "deferred_logits(hidden)": "deeper shorter empty meta nan",
    "deferred_logits(weight)": "nan",
    "deferred_logits(bias)": "None nan",
    "deferred_logits(tile_bytes)": "None",
    "deferred_logits(keep_bytes)": "0",
    "full_vocabulary_divergence(student)": "float16 nan",
    "full_vocabulary_divergence(teacher)": "float16 nan",
    "full_vocabulary_divergence(old)": "float16 nan",
    "full_vocabulary_divergence(num_ids)": "None",
    "full_vocabulary_divergence(teacher_weights)": "None",
    "policy_loss_func(logits)": "float16 nan",
    "policy_loss_func(normalizer)": "None",
    "distillation_loss_func(logits)": "float16 nan",
    "distillation_loss_func(normalizer)": "None",
    "policy_loss(log_probs)": "[nan]",
    "policy_loss(entropies)": "None [int64] [float16] [nan]",
    "distillation_loss(log_probs)": "[float16] [nan]",
    "distillation_loss(tail_log_probs)": "[float16] [nan]",
    "estimate_kl(log_ratio)": "deeper scalar shorter empty meta float16 nan",
    "group_advantages(rewards)": "bool int64 float16 nan",
    "group_advantages(groups)": "bool float32 negative large",
    "group_advantages(eps)": "0",
    "token_weights(loss_masks)": "shorter [shorter] [empty] [bool] [int64] [float16] [nan]",
    "mean_count(loss_masks)": "shorter [shorter] [empty] [bool] [int64] [float16] [nan]",
    "average_metrics(reports)": "None empty shorter",
    "mix_teachers(weights)": "None",
    "opd_advantages(log_probs)": "float16 nan",
    "opd_advantages(teacher_log_probs)": "float16 nan",
    "reverse_kl(log_probs)": "float16 nan",
    "reverse_kl(tail_log_prob)": "float16 nan",
    "jensen_shannon(log_probs)": "float16 nan",
    "jensen_shannon(tail_log_prob)": "float16 nan",
    "importance_weighted_reverse_kl(log_probs)": "float16 nan",
    "importance_weighted_reverse_kl(tail_log_prob)": "float16 nan",
    "TopKDistribution(indices)": "negative large",
    "TopKDistribution(log_probs)": "nan",
    "TopKDistribution(tail_log_prob)": "nan",
    "TopKDistribution(temperature)": "None",
    "FullDistribution(hidden)": "[shorter] [empty] [meta] [float16] [nan]",
    "OutputHead(weight)": "meta nan",
    "OutputHead(bias)": "None meta nan",
    "PolicyBatch(advantages)": "[scalar] [int64] [float16] [nan]",
    "PolicyBatch(loss_masks)": "[bool] [int64] [float16] [nan]",
    "PolicyBatch(old_log_probs)": "None [int64] [float16] [nan]",
    "PolicyBatch(ref_log_probs)": "None [int64] [float16] [nan]",
    "PolicyBatch(rollout_log_probs)": "None [int64] [float16] [nan]",
    "DistillationBatch(loss_masks)": "[bool] [int64] [float16] [nan]",
    "DistillationBatch(old)": "None",
    "PolicyOptions(clip_low)": "0",
    "PolicyOptions(clip_high)": "inf 0",
    "PolicyOptions(dual_clip)": "None inf",
    "PolicyOptions(entropy_coef)": "-1 0",
    "PolicyOptions(kl_coef)": "0",
    "PolicyOptions(tis_clip)": "None inf",
    "DistillationOptions(teacher_weights)": "None",
    "DistillationOptions(num_ids)": "None",
    "SequenceLayout.build(num_rows)": "None",
    "SequenceLayout.build(padded_lengths)": "None",
    "SequenceLayout.build(cp_rank)": "0",
    "SequenceLayout.rows_of(logits)": "bool complex int64 float16 nan",
    "SequenceLayout.split_responses(values)": "bool complex meta int64 float16 nan",
    "SequenceLayout.local_parts(responses)": "[bool] [complex] [int64] [float16] [nan]",
    "SequenceLayout.gather_responses(values)": "[bool] [complex] [int64] [float16] [nan]",
}


def spoiled(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield bad values in the place of a good one, with what is bad about them."""
    yield "None", None
    if isinstance(value, Tensor):
        yield from {"deeper": value[None], "scalar": value.flatten()[0], "shorter": value[:-1]}.items()
        yield from {"empty": value[:0], "bool": value > 0, "complex": value.to(torch.complex64)}.items()
        yield "meta", value.to("meta")
        if value.is_floating_point():
            yield from {"int64": value.long(), "float16": value.half(), "nan": value * math.nan}.items()
        else:
            yield from {
                "float32": value.float(),
                "negative": value.long() - 9,
                "large": value.long() + 9,
            }.items()
    elif isinstance(value, (list, tuple)):
        yield from {"empty": [], "shorter": value[:-1], "[None]": [None, *value[1:]]}.items()
        yield "[nan]", [math.nan, *value[1:]]
        if isinstance(value[0], Tensor):
            yield from ((f"[{name}]", [bad, *value[1:]]) for name, bad in spoiled(value[0]))
        elif isinstance(value[0], (int, float)):
            yield from ((f"[{bad}]", [bad, *value[1:]]) for bad in (math.inf, -1, True))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from ((str(bad), bad) for bad in (math.nan, math.inf, -1, 0, True))
        yield from {"tensor": torch.ones(2), "bool tensor": torch.tensor(True), "text": "1"}.items()
    elif isinstance(value, str):
        yield "another", "another"


def cases() -> Iterator[tuple[str, str, Callable[[], Any], set[str]]]:
    for function, arguments in CALLS:
        for name, value in arguments.items():
            for what, bad in spoiled(value):
                call = partial(function, **{**arguments, name: bad})
                yield f"{function.__qualname__}({name})", what, call, set(arguments)


def test_the_good_ones_are() -> None:
    for function, arguments in CALLS:
        function(**arguments)


def test_bad_arguments_are_refused_by_name_or_have_a_right_value() -> None:
    found: dict[str, list[str]] = {}
    for place, what, call, names in cases():
        try:
            call()
        except InvalidInputError as error:
            if not any(name.rstrip("s") in str(error).replace(" ", "_") for name in names):
                found.setdefault(f"{place} has no name", []).append(f"{what}: {error}")
        except Exception as error:
            found.setdefault(f"{place} raises", []).append(f"{what}: {type(error).__name__}: {error}"[:90])
        else:
            found.setdefault(place, []).append(what)
    assert {place: " ".join(whats) for place, whats in found.items()} == RIGHT


def test_numbers_may_be_of_numpy_or_tensors() -> None:
    """Alone or in a list: the result is that of Python's numbers."""
    for function, arguments in CALLS:
        for name, value in arguments.items():
            one = value[0] if isinstance(value, (list, tuple)) else value
            is_divisor = name in ("num_microbatches", "constant_length") and not isinstance(function, type)
            if isinstance(one, float) or is_divisor:
                expected = repr(function(**arguments))
                for like in (np.array(value), torch.tensor(value, dtype=torch.float64), np.array(value)[()]):
                    assert repr(function(**{**arguments, name: like})) == expected, (function, name, like)


def test_masks_may_be_padded() -> None:
    padded = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    for normalization in ("token", "sequence"):
        weights, count = losses.token_weights(padded, normalization)
        of_each = losses.token_weights([padded[0, :2], padded[1, :1]], normalization)
        assert torch.equal(weights[padded.flatten() != 0], of_each[0]) and count == of_each[1]
        assert not weights[padded.flatten() == 0].any()
    assert losses.mean_count(padded, 2, "token") == 1.5
    batch = PolicyBatch(padded.float(), padded, padded.float())
    values = losses.policy_loss(list(torch.zeros(3, 3)), batch, PolicyOptions())
    in_list = PolicyBatch(list(padded.float()), list(padded), list(padded.float()))
    assert torch.equal(values[0], losses.policy_loss(list(torch.zeros(3, 3)), in_list, PolicyOptions())[0])


def test_equal_rewards_have_no_advantage_without_eps() -> None:
    advantages = losses.group_advantages(
        torch.tensor([2.0, 2.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), eps=0.0
    )
    assert advantages[:2].tolist() == [0, 0] and advantages[2] == -advantages[3]
