"""The judgements of ``lean-loss``; what takes the place of the functions is in ``tests/unit/frameworks``."""

from __future__ import annotations

import pytest

from megatron_rl_patches.engine.judge import judge
from megatron_rl_patches.patches.lean_loss import patch

from .judging import assert_judged

LOSS = "slime.backends.megatron_utils.loss"
MILES = "miles.backends.training_utils"
PPO_UTILS = "slime.utils.ppo_utils"
SCORES = f"{PPO_UTILS}.calculate_log_probs_and_entropy"
ENGINE = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead._lm_head_logits_processor"


@pytest.mark.parametrize("target", [f"{LOSS}.loss_function", f"{MILES}.loss.loss_function"])
@pytest.mark.parametrize(
    ("call", "state"),
    [
        ("checkpoint(func, args, batch, logits)", "fits"),
        ("torch.utils.checkpoint.checkpoint(func, args, batch, logits)", "fits"),
        ("checkpoint(func, args, batch, logits, use_reentrant=False)", "not needed"),
        ("func(args, batch, logits)", "not needed"),
    ],
)
def test_checkpointing(target: str, call: str, state: str) -> None:
    body = f"if args.recompute_loss_function:\n        return {call}"
    assert_judged(patch, target, f"def loss_function(args, batch, logits):\n    {body}", state)


@pytest.mark.parametrize(
    ("requires_grad", "state"), [("True", "fits"), ("value.requires_grad", "not needed")]
)
@pytest.mark.parametrize(
    "target", [f"{LOSS}._allgather_cp_redistribute", f"{MILES}.cp_utils.allgather_cp_redistribute"]
)
def test_redistribution(target: str, requires_grad: str, state: str) -> None:
    body = f"dist.nn.all_reduce(torch.zeros(length, requires_grad={requires_grad}))"
    assert_judged(patch, target, f"def {target.rpartition('.')[2]}(res, *, args): {body}", state)


SCORING = "def calculate_log_probs_and_entropy({}): ..."
OPTIONS = "logits, tokens, tp_group, with_entropy=False, chunk_size=-1"
LOG_PROBS = "def compute_log_probs(logits, tokens, process_group):\n    return "
CLONING = """
def _lm_head_logits_processor(self, logits, label, *, calculate_entropy, distillation_only):
    return vocab_parallel_log_probs_from_logits({}, label)
"""
CROSS_ENTROPY = "fused_vocab_parallel_cross_entropy"


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        (
            f"{LOSS}.loss_function",
            "def loss_function(args, batch, logits): return checkpoint(func, args) if args.recompute else 0",
            "drifted: its body no longer uses recompute_loss_function",
        ),
        (
            f"{LOSS}._allgather_cp_redistribute",
            "def loss_function(args): ...",
            "not needed: does not contain allgather_cp",
        ),
        # The first slime scores in the module of its loss; then come three eras.
        (SCORES, "def compute_log_probs(logits): ...", "not needed"),
        (SCORES, SCORING.format(OPTIONS), "fits"),
        (SCORES, SCORING.format(f"{OPTIONS}, need_entropy_grad=False"), "fits"),
        (SCORES, SCORING.format(f"{OPTIONS}, log_prob_keep_mask=None, with_entropy_grad=True"), "fits"),
        (SCORES, SCORING.format("hidden, weight, tokens"), "drifted"),
        (f"{PPO_UTILS}.compute_log_probs", f"{LOG_PROBS}-{CROSS_ENTROPY}(logits, tokens)", "fits"),
        (f"{PPO_UTILS}.compute_log_probs", f"{LOG_PROBS}0\nother = {CROSS_ENTROPY}", "drifted"),
        (ENGINE, CLONING.format("logits.clone()"), "fits"),
        (ENGINE, CLONING.format("logits"), "not needed"),
    ],
)
def test_other_shapes(target: str, source: str, expected: str) -> None:
    assert_judged(patch, target, source, expected)


def test_verl_before_its_engine_has_nothing_to_clone() -> None:
    [site] = [site for site in patch.sites if site.target == ENGINE]
    assert judge(site, None).state == "not needed"
