"""The judgements of ``lean-loss``; what takes the place of the functions is in ``tests/unit/frameworks``."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_rl_patches.engine.judge import judge
from megatron_rl_patches.patches.lean_loss import patch

from .judging import judged

verdict = partial(judged, patch)

LOSS = "slime.backends.megatron_utils.loss"
PPO_UTILS = "slime.utils.ppo_utils"
MILES = "miles.backends.training_utils"


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
    assert verdict(target, f"def loss_function(args, batch, logits):\n    {body}")[0] == state


def test_checkpointing_by_another_option_has_drifted() -> None:
    source = "def loss_function(args, batch, logits): return checkpoint(func, args) if args.recompute else 0"
    assert verdict(f"{LOSS}.loss_function", source) == (
        "drifted",
        "its body no longer uses recompute_loss_function",
    )


@pytest.mark.parametrize(
    ("placeholder", "state"),
    [
        ("torch.zeros(length, requires_grad=True)", "fits"),
        ("torch.zeros(length, requires_grad=value.requires_grad)", "not needed"),
    ],
)
@pytest.mark.parametrize(
    "target", [f"{LOSS}._allgather_cp_redistribute", f"{MILES}.cp_utils.allgather_cp_redistribute"]
)
def test_redistribution(target: str, placeholder: str, state: str) -> None:
    name = target.rpartition(".")[2]
    source = f"def {name}(res, *, args):\n    dist.nn.all_reduce({placeholder})"
    assert verdict(target, source)[0] == state


def test_frameworks_without_all_gather_cp() -> None:
    state, reason = verdict(f"{LOSS}._allgather_cp_redistribute", "def loss_function(args): ...")
    assert (state, "does not contain allgather_cp" in reason) == ("not needed", True)


def test_the_first_slime_scores_in_the_module_of_its_loss() -> None:
    state, _ = verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", "def compute_log_probs(logits): ...")
    assert state == "not needed"


ERAS = {
    "one, three": "with_entropy=False, chunk_size=-1",
    "two": "with_entropy=False, chunk_size=-1, need_entropy_grad=False",
    "four": "with_entropy=False, chunk_size=-1, log_prob_keep_mask=None, with_entropy_grad=True",
}


@pytest.mark.parametrize("options", ERAS.values(), ids=list(ERAS))
def test_every_era_fits(options: str) -> None:
    source = f"def calculate_log_probs_and_entropy(logits, tokens, tp_group, {options}): ..."
    assert verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", source)[0] == "fits"


def test_a_function_without_its_arguments_has_drifted() -> None:
    source = "def calculate_log_probs_and_entropy(hidden, weight, tokens): ..."
    assert verdict(f"{PPO_UTILS}.calculate_log_probs_and_entropy", source)[0] == "drifted"


@pytest.mark.parametrize(
    ("body", "state"),
    [("return -fused_vocab_parallel_cross_entropy(logits, tokens)", "fits"), ("return 0", "drifted")],
)
def test_candidates(body: str, state: str) -> None:
    source = f"""
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        def compute_log_probs(logits, tokens, process_group):
            {body}
        other = fused_vocab_parallel_cross_entropy
    """
    assert verdict(f"{PPO_UTILS}.compute_log_probs", source)[0] == state


ENGINE = "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead._lm_head_logits_processor"


def test_verl_before_its_engine_has_nothing_to_clone() -> None:
    [site] = [site for site in patch.sites if site.target == ENGINE]
    assert judge(site, None).state == "not needed"


@pytest.mark.parametrize(("kept", "state"), [("logits.clone()", "fits"), ("logits", "not needed")])
def test_verl_clones(kept: str, state: str) -> None:
    source = f"""
        def _lm_head_logits_processor(self, logits, label, *, calculate_entropy, distillation_only):
            return vocab_parallel_log_probs_from_logits({kept}, label)
    """
    assert verdict(ENGINE, source)[0] == state
