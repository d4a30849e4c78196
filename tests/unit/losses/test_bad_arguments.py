"""Each argument of each public function, in turn of a wrong shape, dtype, device or value.

Either an error names it, or the result is right: :data:`RIGHT` lists what may be passed. :data:`TOGETHER` has
each message about several arguments.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from tests.references import dense

N, V = 4, 7


random = partial(dense.random, seed=0, dtype=torch.float32)
IDS = torch.tensor([[0, 3], [1, 2], [6, 5], [4, 0]])
LOG_PROBS, TAIL = losses.vocab_parallel_log_probs_at(random(N, V), IDS, with_tail=True)
TOPK = losses.TopKDistribution(IDS, LOG_PROBS, TAIL)
LAYOUT = losses.SequenceLayout.build([4, 3], [2, 2])
MASKS, VALUES = [torch.ones(2), torch.ones(2)], [random(2), random(2)]  # of two responses of two tokens
META = [value.to("meta") for value in VALUES]
OTHER_LOG_PROBS = dict.fromkeys(("old_log_probs", "ref_log_probs", "rollout_log_probs"), VALUES)
POLICY = {"advantages": VALUES, "loss_masks": MASKS, **OTHER_LOG_PROBS, "group_log_probs": random(2)}
DISTILLATION = {"teachers": [TOPK.split([2, 2])], "loss_masks": MASKS, "old": TOPK.split([2, 2])}
OF_LOGITS = {"logits": random(N, V), "temperature": 1.0, "vocab_size": V, "block_bytes": 8}
OF_MICROBATCH = {"layout": LAYOUT, "temperature": 1.0, "normalizer": 2.0, "vocab_size": V}
BYTES = {"tile_bytes": 8, "keep_bytes": 8}
OF_LAYER = {"hidden": random(N, 3), "weight": random(V, 3), "bias": random(V), **BYTES}
OF_BUCKETS = {"log_probs": LOG_PROBS, "tail_log_prob": TAIL, "teacher": TOPK}
CONSTANT = {"normalization": "constant", "constant_length": 5}


def policy_loss_func(logits: Any, **arguments: Any) -> Any:
    return losses.make_loss_func(**arguments)(logits)


def distillation_loss_func(logits: Any, **arguments: Any) -> Any:
    return losses.make_distillation_loss_func(**arguments)(logits)


TOKENS = [IDS.flatten()[:4], IDS.flatten()[:3]]
OF_STUDENT = {"student": random(N, V), "teacher": random(N, V), "old": random(N, V), "temperature": 1.0}
OF_TEACHERS = {"divergence": "importance_weighted_reverse_kl", "beta": 0.5, "teacher_weights": [1.0]}
OF_ROWS = {"log_probs": list(LOG_PROBS.split(2)), "tail_log_probs": list(TAIL.split(2))}
OPTIONS, DISTILLATION_OPTIONS = losses.PolicyOptions(), losses.DistillationOptions()
KL = {"kl_coef": 0.1, "kl_estimator": "k3"}
TIS = {"tis_clip": 2.0, "tis_clip_low": 0.5, "tis_level": "sequence", "tis_mask_level": "token"}
CLIPS = {"objective": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 2.0, "entropy_coef": 0.1}
LENGTHS = {"total_lengths": [4, 3], "response_lengths": [2, 2], "padded_lengths": [4, 4], "num_rows": 8}
OF_CP = {"cp_rank": 0, "cp_size": 1, "allgather_cp": False, "own_rows": False}
MASK, POLICY_BATCH = torch.ones(N, V, dtype=torch.bool), losses.PolicyBatch(**POLICY)
BATCH, HEAD = losses.DistillationBatch(**DISTILLATION), losses.OutputHead(random(V, 3))
OF_RESPONSES = {"log_probs": VALUES, "entropies": VALUES}
#: Functions whose results are called with logits.
MADE: dict[Callable[..., Any], dict[str, Any]] = {
    losses.make_loss_func: {**OF_MICROBATCH, "tokens": TOKENS, "batch": POLICY_BATCH},
    losses.make_distillation_loss_func: {**OF_MICROBATCH, "batch": BATCH},
}
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (losses.vocab_parallel_log_probs, {**OF_LOGITS, "targets": IDS[:, 0], "ignore_index": -100}),
    (losses.vocab_parallel_log_probs_and_entropy, {**OF_LOGITS, "targets": IDS[:, 0], "keep_mask": MASK}),
    (losses.vocab_parallel_log_probs_at, {**OF_LOGITS, "indices": IDS}),
    (losses.vocab_parallel_topk, {**OF_LOGITS, "k": 2}),
    (losses.deferred_logits, OF_LAYER),
    (losses.full_vocabulary_divergence, {**OF_TEACHERS, "vocab_size": V, **OF_STUDENT}),
    (policy_loss_func, {"logits": random(1, 7, V), **MADE[losses.make_loss_func]}),
    (distillation_loss_func, {"logits": random(1, 7, V), **MADE[losses.make_distillation_loss_func]}),
    (losses.policy_loss, {**OF_RESPONSES, "batch": POLICY_BATCH, "options": OPTIONS}),
    (losses.distillation_loss, {**OF_ROWS, "batch": BATCH, "options": DISTILLATION_OPTIONS}),
    (losses.estimate_kl, {"log_ratio": random(3), "estimator": "k3"}),
    (losses.group_advantages, {"rewards": random(4), "groups": torch.tensor([0, 0, 1, 1]), "eps": 1e-6}),
    (losses.group_log_probs, {"rollout_log_probs": VALUES, "loss_masks": MASKS, "groups": IDS[:2, 0]}),
    (losses.token_weights, {"loss_masks": MASKS, **CONSTANT}),
    (losses.mean_count, {"loss_masks": MASKS, "num_microbatches": 2, "normalization": "token"}),
    (losses.average_metrics, {"reports": [{"loss": torch.ones(2)}] * 2}),
    (losses.mix_teachers, {"teachers": [TOPK, TOPK], "weights": [1.0, 2.0]}),
    (losses.opd_advantages, {"log_probs": random(3), "teacher_log_probs": random(3)}),
    (losses.reverse_kl, OF_BUCKETS),
    (losses.jensen_shannon, {**OF_BUCKETS, "beta": 0.5}),
    (losses.importance_weighted_reverse_kl, {**OF_BUCKETS, "old": TOPK}),
    (losses.TopKDistribution, {**vars(TOPK), "temperature": 1.0, "vocab_size": V}),
    (losses.FullDistribution, {"hidden": (random(N, 3),), "heads": (HEAD,), "weights": (1.0,)}),
    (losses.OutputHead, {"weight": random(V, 3), "bias": random(V)}),
    (losses.PolicyBatch, POLICY),
    (losses.DistillationBatch, DISTILLATION),
    (losses.PolicyOptions, {**CLIPS, **KL, **TIS, **CONSTANT}),
    (losses.DistillationOptions, {**OF_TEACHERS, "teacher_weights": (1.0,), **CONSTANT}),
    (losses.SequenceLayout.build, {**LENGTHS, "qkv_format": "thd", **OF_CP}),
    (LAYOUT.rows_of, {"logits": random(1, 7, V)}),
    (LAYOUT.split_responses, {"values": random(4)}),
    (LAYOUT.local_parts, {"responses": VALUES}),
    (LAYOUT.gather_responses, {"values": VALUES}),
]
#: What may be passed as an argument of a name, or of one function: not a number and dtypes are used as they
#: are, and defaults may be said.
RIGHT = {
    "float16 nan": (
        "logits student old log_probs teacher_log_probs tail_log_prob full_vocabulary_divergence(teacher)"
    ),
    "None": (
        "block_bytes tile_bytes vocab_size teacher_weights normalizer weights padded_lengths num_rows "
        "TopKDistribution(temperature) DistillationBatch(old) tis_mask_level"
    ),
    "-1 0": "ignore_index entropy_coef",
    "None bool": "keep_mask",
    "deeper shorter empty meta nan": "hidden",
    "nan": "weight TopKDistribution(log_probs) TopKDistribution(tail_log_prob)",
    "None nan": "bias",
    "0": "keep_bytes eps clip_low kl_coef cp_rank tis_clip_low",
    "None [int64] [float16] [nan]": "entropies old_log_probs ref_log_probs rollout_log_probs",
    "[float16] [nan]": "tail_log_probs distillation_loss(log_probs)",
    "deeper scalar shorter empty meta float16 nan": "log_ratio",
    "bool int64 float16 nan": "rewards",
    "bool float32 negative large": "groups",
    "shorter [shorter] [empty] [bool] [int64] [float16] [nan]": "loss_masks",
    "None empty shorter": "reports",
    "[scalar] [int64] [float16] [nan]": "advantages",
    "inf 0": "clip_high",
    "None inf": "dual_clip",
    "inf": "tis_clip",
    "None meta int64 float16 nan": "group_log_probs",
    "[int64] [float16] [nan]": "group_log_probs(rollout_log_probs)",
    "bool complex meta int64 float16 nan": "values",
    "[bool] [complex] [int64] [float16] [nan]": "responses SequenceLayout.gather_responses(values)",
    "shorter empty float16 nan": "vocab_parallel_topk(logits)",
    "bool complex int64 float16 nan": "SequenceLayout.rows_of(logits)",
    "negative large": "TopKDistribution(indices)",
    "[shorter] [empty] [meta] [float16] [nan]": "FullDistribution(hidden)",
    "meta nan": "OutputHead(weight)",
    "None meta nan": "OutputHead(bias)",
    "": "importance_weighted_reverse_kl(old) FullDistribution(weights)",
    "[nan]": "policy_loss(log_probs)",
    "[bool] [int64] [float16] [nan]": "PolicyBatch(loss_masks) DistillationBatch(loss_masks)",
    "[bool] [int64] [nan] [float16]": "group_log_probs(loss_masks)",
}


def spoiled(value: Any) -> dict[str, Any]:
    """Return bad values in the place of a good one, by what is bad about them."""
    bad: dict[str, Any] = {"None": None}
    if isinstance(value, Tensor):
        bad |= {"deeper": value[None], "scalar": value.flatten()[0]}
        bad |= {"shorter": value[:-1], "empty": value[:0]}
        bad |= {"bool": value > 0, "complex": value.to(torch.complex64), "meta": value.to("meta")}
        if value.is_floating_point():
            return bad | {"int64": value.long(), "float16": value.half(), "nan": value * math.nan}
        return bad | {"float32": value.float(), "negative": value.long() - 9, "large": value.long() + 9}
    if isinstance(value, (list, tuple)):
        bad |= {"empty": [], "shorter": value[:-1]}
        of_first = {"None": None, "nan": math.nan}
        if isinstance(value[0], Tensor):
            of_first |= spoiled(value[0])
        elif isinstance(value[0], (int, float)):
            of_first |= {str(number): number for number in (math.inf, -1, True)}
        return bad | {f"[{what}]": [first, *value[1:]] for what, first in of_first.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bad |= {str(number): number for number in (math.nan, math.inf, -1, 0, True)}
        return bad | {"tensor": torch.ones(2), "bool tensor": torch.tensor(True), "text": "1"}
    return bad | ({"another": "another"} if isinstance(value, str) else {})


def test_bad_arguments_are_refused_by_name_or_have_a_right_value() -> None:
    right = {place: set(whats.split()) for whats, places in RIGHT.items() for place in places.split()}
    wrong: dict[str, Any] = {}
    for function, arguments in CALLS:
        for name, value in arguments.items():
            place, accepted = f"{function.__qualname__}({name})", set()
            for what, bad in spoiled(value).items():
                try:
                    function(**{**arguments, name: bad})
                    accepted.add(what)
                except InvalidInputError as error:
                    if not any(name.rstrip("s") in str(error).replace(" ", "_") for name in arguments):
                        wrong[f"{place}, {what}, has no name"] = str(error)
                except Exception as error:
                    wrong[f"{place}, {what}, raises"] = error
            if accepted != right.get(place, right.get(name, set())):
                wrong[place] = accepted
    assert not wrong


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
    of_tensors = padded.float(), padded, padded.float()
    batches = losses.PolicyBatch(*of_tensors), losses.PolicyBatch(*map(list, of_tensors))
    loss, of_lists = (losses.policy_loss(torch.zeros(3, 3), batch, OPTIONS)[0] for batch in batches)
    assert torch.equal(loss, of_lists)


ZEROS, TARGETS = torch.zeros(N, V), torch.zeros(N, dtype=torch.int64)
LOG_PROBS_OF, AT = losses.vocab_parallel_log_probs, losses.vocab_parallel_log_probs_at
DEFERRED, DIVERGENCE = losses.deferred_logits, losses.full_vocabulary_divergence
OF_ALL_LOGITS = LOG_PROBS_OF, AT, losses.vocab_parallel_topk, DIVERGENCE
POLICY_OPTIONS, DISTRIBUTION = losses.PolicyOptions, losses.TopKDistribution
OF_TWO_ROWS, IN_PLACE = {"rows": slice(0, 2), "targets": TARGETS[:2]}, {"inplace_backward": True}
OF_FLOAT64 = {"hidden": ZEROS.double(), "weight": ZEROS.double(), "bias": None}
LOSS_FUNC, ROUTE, MIX = losses.make_loss_func, losses.route_teachers, losses.mix_teachers
PACKED_SCORES = partial(losses.packed_log_probs_and_entropy, tokens=TOKENS, layout=LAYOUT)
WITH_ENTROPY, BARE = POLICY_OPTIONS(entropy_coef=0.1), losses.PolicyBatch(VALUES, MASKS)
OF_OTHER_IDS = DISTRIBUTION(IDS.flip(0), LOG_PROBS, TAIL)
OF_TEMPERATURES = [replace(TOPK, temperature=temperature) for temperature in (2.0, 1.0)]
FULL, MASK_OF_N = losses.FullDistribution.from_hidden(random(N, 3), HEAD), {"loss_masks": [torch.ones(N)]}
OF_FULL, NO_OLD = losses.DistillationBatch([[FULL]], **MASK_OF_N), replace(BATCH, old=None)
AT_K, OF_OLD = map(losses.DistillationOptions, ("generalized_kl", "importance_weighted_reverse_kl"))
build, MIXED = losses.SequenceLayout.build, [MIX([FULL, FULL])]
OF_TWO_RANKS = build([4, 3], [2, 2], cp_size=2)
#: What several arguments say together, and what a message says of the value that was found.
TOGETHER: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (LOG_PROBS_OF, {"logits": ZEROS[None]}, r"\[T, vocab / tp\], not \[1, 4, 7\]: flatten"),
    (LOG_PROBS_OF, {"logits": ZEROS[:, :0]}, r"not \[4, 0\]"),
    (LOG_PROBS_OF, {"rows": slice(0, 2)}, r"\[4\], expected torch.int64 \[2\]"),
    (LOG_PROBS_OF, {"targets": TARGETS + V}, r"ids below 7.*found \[7, 7, 7, 7\]"),
    (LOG_PROBS_OF, {"targets": TARGETS - 1}, r"or -100 to ignore a row; found \[-1"),
    (LOG_PROBS_OF, {"targets": TARGETS - 100, "ignore_index": -1}, r"or -1 .*found \[-100"),
    (LOG_PROBS_OF, {"rows": TARGETS.bool()}, r"torch.bool \[4\].*mask.nonzero\(\).squeeze\(1\)"),
    *(
        (LOG_PROBS_OF, {"rows": [slice(0, 1), part]}, r"expected slices of the 4 rows with start and stop")
        for part in (slice(2, 2), slice(0, 2), slice(2, 5), slice(2, None), slice(1, 4, 2), 3)
    ),
    (LOG_PROBS_OF, {"rows": torch.tensor([0, 1, 2, 4])}, r"numbers from 0 to 3; found \[4\]"),
    (LOG_PROBS_OF, {"rows": torch.tensor([0, 1, 2, -1])}, r"found \[-1\]"),
    (LOG_PROBS_OF, {"rows": torch.tensor([0, 3, 2, 3])}, r"each at most once.*found \[3\]"),
    (LOG_PROBS_OF, {"rows": TARGETS.to("meta")}, "rows on meta"),
    (LOG_PROBS_OF, {**OF_TWO_ROWS, "keep_mask": ZEROS.bool()}, r"\[4, 7\], .* \[2, 7\]: a line per selected"),
    (LOG_PROBS_OF, {"temperature": 1e39}, r"is 1e\+39, expected a positive number in the range"),
    (LOG_PROBS_OF, {"temperature": 1e-46}, "temperature is 1e-46, .* range of float32"),
    (LOG_PROBS_OF, {"fused": "always"}, "fused is 'always'"),
    (AT, {"indices": TARGETS}, r"expected torch.int64 \[4, K\]"),
    (AT, {"indices": IDS[:, :0]}, "K at least 1"),
    (losses.vocab_parallel_topk, {"k": V + 1}, f"k is {V + 1}, expected from 1 to {V}"),
    (DEFERRED, {"weight": random(V, 2)}, r"hidden is \[4, 3\] and weight \[7, 2\]"),
    (DEFERRED, {"sequence_parallel": True}, "without tp_group"),
    (DIVERGENCE, {"divergence": "kl"}, "divergence must be one of .*'reverse_kl'.*, not 'kl'"),
    (DIVERGENCE, {"teacher": []}, "no teachers"),
    (DIVERGENCE, {"teacher_weights": [1, 2]}, "for 1 teacher"),
    *((of_logits, {"vocab_size": 8}, "vocab_size is 8, expected from 1 to 7") for of_logits in OF_ALL_LOGITS),
    (LOG_PROBS_OF, {"vocab_size": 5, "targets": TARGETS + 5}, r"ids below 5.*found \[5, 5"),
    (losses.vocab_parallel_topk, {"k": 6, "vocab_size": 5}, "k is 6, expected from 1 to 5"),
    (DIVERGENCE, {"rows": slice(0, 2)}, r"teacher 0 is \[4, 7\] on cpu, expected 2 rows of 7 logits"),
    (losses.reverse_kl, {"teacher": DISTRIBUTION(IDS[:, :1], LOG_PROBS[:, :1], TAIL)}, r"\[4, 2\].*\[4, 1\]"),
    (POLICY_OPTIONS, {"clip_low": 1.1}, "clip_low"),
    (POLICY_OPTIONS, {"dual_clip": 1.0}, "dual_clip must be greater than 1"),
    (POLICY_OPTIONS, {"objective": "cispo"}, "leave it None"),
    (POLICY_OPTIONS, {"tis_clip": None}, "tis_level and tis_mask_level need tis_clip, which is None"),
    (POLICY_OPTIONS, {"tis_clip_low": 3.0}, "tis_clip_low must be from 0 to tis_clip, not 3.0"),
    (POLICY_OPTIONS, {"tis_clip": math.inf, "tis_clip_low": math.inf}, "tis_clip_low must be .* not inf"),
    (losses.PolicyBatch, {"group_log_probs": VALUES}, "a number per token, expected one per response"),
    (losses.group_log_probs, dict.fromkeys(("rollout_log_probs", "loss_masks"), META), "expected one device"),
    (DISTRIBUTION, {"log_probs": torch.zeros(N, 1)}, r"\[4, 1\]"),
    (DISTRIBUTION, {"tail_log_prob": TAIL.double()}, "float64"),
    (DISTRIBUTION, {"log_probs": LOG_PROBS.clone().requires_grad_()}, "require grad"),
    (losses.checkpointed, {"loss_fn": None}, "loss_fn is None, expected a function"),
    (LOG_PROBS_OF, {"rows": {0}}, "rows are a set, expected slices or a tensor of numbers"),
    (DEFERRED, {"logit_dtype": torch.float16}, "logit_dtype is torch.float16"),
    (DEFERRED, {**OF_FLOAT64, "logit_dtype": torch.float32}, "hidden is torch.float64: leave it out"),
    (losses.DeferredLogits.data.fset, {"self": DEFERRED(ZEROS, ZEROS), "value": 0}, "write to the logits"),
    (DIVERGENCE, {"divergence": "generalized_kl"}, "is over k ids: use 'reverse_kl'"),
    (DIVERGENCE, {"student": ZEROS, "teacher": ZEROS, **IN_PLACE}, "pass a copy"),
    (DIVERGENCE, {"student": ZEROS, "teacher": ZEROS[:2], "rows": IDS[0], **IN_PLACE}, "in the memory"),
    (DIVERGENCE, {"teacher": random(N, V + 2), "vocab_size": None}, "need vocab_size"),
    (LOSS_FUNC, {"layout": build([4, 3], [2, 1])}, "lengths .*; pass the full responses"),
    (LOSS_FUNC, {"layout": OF_TWO_RANKS}, "pass cp_group"),
    (LOSS_FUNC, {"layout": build([4, 3], [2, 2], device="meta")}, "layout on meta .* expected one device"),
    (LOSS_FUNC, {"normalizer": 0.0}, "normalizer is 0.0, expected a positive"),
    (LOSS_FUNC, {"options": WITH_ENTROPY, "with_entropy": False}, "needs with_entropy=True"),
    (LOSS_FUNC, {"batch": BARE, "options": POLICY_OPTIONS(kl_coef=0.1)}, "ref_log_probs are needed"),
    (LOSS_FUNC, {"batch": BARE, "options": POLICY_OPTIONS(tis_clip=2)}, "rollout_log_probs are needed"),
    (LOSS_FUNC, {"batch": BARE, "options": POLICY_OPTIONS(tis_clip=2, tis_level="group")}, "group_log_probs"),
    (losses.policy_loss, {"options": WITH_ENTROPY, "entropies": None}, "entropies are needed, and missing"),
    (losses.group_advantages, dict.fromkeys(("rewards", "groups"), ZEROS.to("meta")), "device meta"),
    (losses.group_advantages, {"groups": torch.full((4,), math.nan)}, "groups are .*nan.* an integer"),
    (losses.group_log_probs, {"groups": torch.tensor([7.5, 7])}, r"groups are \[7.5, 7.0\]; .* an integer"),
    (ROUTE, {"names": ["math"], "values": None}, "values a mapping from these names"),
    (ROUTE, {"names": ["math"], "values": {"code": [1]}}, r"\['math'\], expected some of \['code'\]"),
    (MIX, {"teachers": [TOPK, OF_OTHER_IDS]}, "0 and 1 have different indices .*: score every teacher at"),
    (MIX, {"teachers": [TOPK, FULL]}, "FullDistribution and TopKDistribution; pass one kind"),
    (MIX, {"teachers": OF_TEMPERATURES}, "scores differ in temperature, 2 and 1: pass the same to the loss"),
    (losses.DistillationBatch, {"teachers": [[FULL]], "old": MIXED, **MASK_OF_N}, "old is a mixture: pass"),
    (losses.DistillationBatch, {"teachers": [None]}, "off the last pipeline stage"),
    (losses.DistillationBatch, {"teachers": [3]}, "expected a list of distributions for each"),
    (losses.distillation_loss, {"batch": OF_FULL}, "use make_distillation_loss_func"),
    (losses.distillation_loss, {"batch": NO_OLD, "options": OF_OLD}, "old is needed, and missing"),
    (losses.make_distillation_loss_func, {"batch": OF_FULL, "options": AT_K}, "over k ids: use 'reverse_kl'"),
    (LAYOUT.response_targets, {"tokens": TOKENS[1:]}, r"tokens have the shapes \[\[3\]\], but \[4, 3\] are"),
    (LAYOUT.response_targets, {"tokens": [torch.ones(4), torch.ones(3)]}, "tokens are torch.float32"),
    (LAYOUT.local_parts, {"responses": MASKS[1:]}, r"responses have the shapes \[\[2\]\], but \[2, 2\] are"),
    (PACKED_SCORES, {"logits": random(1, 6, V)}, r"logits are \[1, 6, 7\], but their layout is \[1, 7\]"),
    (PACKED_SCORES, {"logits": random(7, 1, V)}, r"logits are \[7, 1, 7\], but"),
    (PACKED_SCORES, {"logits": random(1, 7, V).to("meta")}, r"on meta.*pass device=logits\.device"),
    (LAYOUT.split_responses, {"values": random(5)}, r"\[\[5\]\], but \[4\] are .* rank 0 of 1; pass values"),
    (OF_TWO_RANKS.gather_responses, {"values": random(2)}, "cp_group is None, .* of 2 .*; pass cp_group"),
]


@pytest.mark.parametrize(("function", "changes", "message"), TOGETHER)
def test_refused(function: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    arguments = next((arguments for one, arguments in [*CALLS, *MADE.items()] if one == function), {})
    functions = [function, losses.vocab_parallel_log_probs_and_entropy]
    for one in functions[: 1 + (function == LOG_PROBS_OF)]:
        with pytest.raises(InvalidInputError, match=message):
            one(**{**arguments, **changes})


PADDED_ROWS = {"qkv_format": "bshd", "max_seq_lens": [8, 8]}
#: Of samples of six and five tokens, with responses of two and three, on two ranks.
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({**PADDED_ROWS, "allgather_cp": True}, "all-gather CP .* qkv_format 'thd'"),
    ({"qkv_format": "bshd"}, "needs max_seq_lens"),
    ({**PADDED_ROWS, "max_seq_lens": [8, 7]}, "pass the same length for every sample"),
    ({**PADDED_ROWS, "max_seq_lens": [5, 5]}, "no less than the longest"),
    ({**PADDED_ROWS, "max_seq_lens": [8]}, "for every sample"),
    ({**PADDED_ROWS, "padded_lengths": [8, 8]}, "takes no padded_lengths"),
    ({**PADDED_ROWS, "num_rows": 8}, "and no num_rows"),
    ({"max_seq_lens": [8, 8]}, "pass padded_lengths"),
    ({"padded_lengths": [8, 4]}, "no less than its tokens"),
    ({"padded_lengths": [8, 10]}, "a multiple of 4"),
    ({"padded_lengths": [8]}, "pass one per sample"),
    ({"num_rows": 7}, "num_rows is 7, but .* take 8 rows on each of 2"),
    ({"num_rows": 5, "allgather_cp": True}, "take 6 rows on each of 2"),
    ({"response_lengths": [6, 3]}, "sample 0 has 6 tokens and a response of 6"),
    ({"response_lengths": [2, 6]}, "sample 1 has 5 tokens and a response of 6"),
    ({"response_lengths": [2]}, "there are 2 samples and 1 response_lengths"),
    ({"total_lengths": [], "response_lengths": []}, "at least one sample"),
    ({"cp_rank": 2, "cp_size": 2}, "0 <= cp_rank < cp_size"),
    ({"qkv_format": "sbhd"}, "pass 'thd' .* or 'bshd'"),
]


@pytest.mark.parametrize(("wrong", "message"), LAYOUTS)
def test_layouts_are_refused_by_every_rank(wrong: dict[str, Any], message: str) -> None:
    arguments = {"total_lengths": [6, 5], "response_lengths": [2, 3], "cp_size": 2} | wrong
    for rank in range(2):
        with pytest.raises(InvalidInputError, match=message):
            build(**{"cp_rank": rank, **arguments})


def test_accepted() -> None:
    """Whole numbers of numpy, too."""
    one, four = np.int64(1), np.int32(4)
    of_integers = {"logits": ZEROS, "targets": TARGETS.int(), "temperature": 2}
    for changes in ({}, {"rows": slice(-9, 99)}, {"fused": False}):
        assert losses.vocab_parallel_log_probs(**of_integers, **changes).shape == (N,)
    assert not losses.vocab_parallel_log_probs(ZEROS, TARGETS.int() - 1, ignore_index=-1).any()
    assert losses.vocab_parallel_topk(ZEROS, four).k == 4
    assert not losses.full_vocabulary_divergence(ZEROS, ZEROS, vocab_size=four).any()
    logits = losses.deferred_logits(ZEROS, ZEROS, tile_bytes=four, keep_bytes=one)
    assert losses.vocab_parallel_log_probs(logits, TARGETS, block_bytes=four).shape == (N,)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_are_refused_by_name(transform: Any) -> None:
    def loss(logits: Tensor) -> Tensor:
        return losses.vocab_parallel_log_probs(logits, IDS[:, 0]).sum()

    def deferred_loss(hidden: Tensor) -> Tensor:
        return losses.vocab_parallel_log_probs(losses.deferred_logits(hidden, ZEROS), IDS[:, 0]).sum()

    for function in (loss, deferred_loss):
        with pytest.raises(InvalidInputError, match=r"torch\.func"):
            transform(function)(ZEROS[None] if transform is torch.func.vmap else ZEROS)
