"""Log-probabilities and entropy at the memory floor in frameworks' losses, without reentrant checkpointing.

The replacements are in :mod:`..frameworks.slime_losses` and :mod:`..frameworks.verl_losses`, under the same
names. Whether a fork's ``get_log_probs_and_entropy`` can be replaced is tried the first time it is called.

Not patched: NeMo-RL, AReaL, SkyRL, ROLL and ms-swift, which compute in chunks already, verl's fused kernels,
and miles' ``true_on_policy_mode``, which reproduces the bits of its inference engine. No site is a function
that a framework compiles: ``torch.compile`` would look through the wrapper.
"""

from __future__ import annotations

from functools import partial

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import SLIME_LOSSES, SLIME_MATH, miles_losses, own_options

_MILES = "miles.backends.training_utils"
_VERL = "verl.utils.megatron.tensor_parallel"
_CALCULATE = "calculate_log_probs_and_entropy"
_VERL_LOG_PROBS = "vocab_parallel_log_probs_from_logits"


# --- reasons why a site is left alone, judged from the target's code


def _checkpoints_without_reentrance(target: TargetSource) -> str | None:
    checkpoints = target.calls("checkpoint")
    if not target.mentions("checkpoint"):
        return "it does not checkpoint the loss"
    passes = checkpoints and all(call.keywords.get("use_reentrant") is False for call in checkpoints)
    return "it passes use_reentrant itself" if passes else None


def _placeholder_follows_values(target: TargetSource) -> str | None:
    # A placeholder that always requires grad starts a collective in backward, and other ranks may start none.
    passed = {call.keywords.get("requires_grad") for call in target.calls()}
    follows = ... in passed and True not in passed
    return "its placeholder requires grad when the values do" if follows else None


# --- sites

patch = Patch(
    name="lean-loss",
    summary="log-probs and entropy take less memory; recomputed losses get the right gradients",
    upstream=("THUDM/slime#1788", "THUDM/slime#1822", "THUDM/slime#2123", "THUDM/slime#2152"),
)

patch.wrap(
    [*SLIME_LOSSES, f"{_MILES}.loss", f"{_MILES}.loss.objective"],
    "loss_function",
    ".frameworks.slime_losses:loss_function",
    parameters=("args",),
    requires_names=("recompute_loss_function",),
    skip_if=_checkpoints_without_reentrance,
)
patch.wrap(
    [*SLIME_LOSSES, *miles_losses("logit_processors")],
    "get_log_probs_and_entropy",
    ".frameworks.slime_losses:get_log_probs_and_entropy",
    parameters=("logits", "args"),
    helps=(_CALCULATE,),
    detail=partial(own_options.get, "get_log_probs_and_entropy", ""),
)
patch.wrap(
    [*SLIME_MATH, *miles_losses("math_utils")],
    _CALCULATE,
    ".frameworks.slime_losses:calculate_log_probs_and_entropy",
    parameters=("logits", "tokens", "tp_group", "with_entropy"),
    introduced_with=_CALCULATE,
)
for _modules, _qualname in (
    (SLIME_LOSSES, "_allgather_cp_redistribute"),
    ([f"{_MILES}.cp_utils", f"{_MILES}.data.context_parallel"], "allgather_cp_redistribute"),
):
    patch.wrap(
        _modules,
        _qualname,
        ".frameworks.slime_losses:allgather_cp_redistribute",
        parameters=("res",),
        requires_names=("all_reduce",),
        skip_if=_placeholder_follows_values,
        introduced_with="allgather_cp",
        optional_module=_modules is not SLIME_LOSSES,
    )
patch.wrap(
    SLIME_MATH,
    "compute_log_probs",
    ".frameworks.slime_losses:compute_log_probs",
    parameters=("logits", "tokens", "process_group"),
    requires_names=("fused_vocab_parallel_cross_entropy",),
    introduced_with="fused_vocab_parallel_cross_entropy",
)
patch.wrap(
    _VERL,
    _VERL_LOG_PROBS,
    ".frameworks.verl_losses:vocab_parallel_log_probs_from_logits",
    parameters=("logits", "labels"),
    requires_names=("vocab_parallel_cross_entropy",),
)
for _qualname in ("vocab_parallel_entropy", "vocab_parallel_entropy_with_chunking"):
    patch.wrap(
        _VERL,
        _qualname,
        f".frameworks.verl_losses:{_qualname}",
        parameters=("vocab_parallel_logits",),
        requires_names=("_VocabParallelEntropy",),
        introduced_with=_qualname if "chunking" in _qualname else "",
    )
patch.wrap(
    "verl.workers.engine.megatron.transformer_impl",
    "MegatronEngineWithLMHead._lm_head_logits_processor",
    ".frameworks.verl_losses:lm_head_logits_processor",
    parameters=("logits", "calculate_entropy", "distillation_only"),
    requires_names=(_VERL_LOG_PROBS,),
    skip_if=lambda target: None if target.mentions("clone") else "it does not clone the logits",
    introduced_with="_lm_head_logits_processor",
    optional_module=True,
)
