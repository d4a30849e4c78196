"""Log-probabilities and entropy at the memory floor in frameworks' losses, without reentrant checkpointing.

============  ========================================  ===========================  =========================
framework     function                                  in its place                 left alone when
============  ========================================  ===========================  =========================
slime, miles  ``loss_function``                         not reentrant                it is not reentrant
slime, miles  ``get_log_probs_and_entropy``             rows are named, not copied   the module computes
                                                                                     log-probs itself
slime, miles  ``calculate_log_probs_and_entropy``       one pass for all samples
slime, miles  ``allgather_cp_redistribute``             entropy metric: no backward  its placeholder already
                                                        collective                   follows the values
slime         ``compute_log_probs``                     logits stay as they are
verl          ``vocab_parallel_log_probs_from_logits``  written in backward only
verl          ``vocab_parallel_entropy``                keeps no softmax
verl          ``vocab_parallel_entropy_with_chunking``  keeps no softmax
verl          ``_lm_head_logits_processor``             one pass, no clone           it does not clone
============  ========================================  ===========================  =========================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. The replacements are
in :mod:`..frameworks.slime_losses` and :mod:`..frameworks.verl_losses`, under the same names.

Not patched: NeMo-RL, AReaL, SkyRL, ROLL and ms-swift, which compute in chunks already, verl's fused kernels,
and miles' ``true_on_policy_mode``, which reproduces the bits of its inference engine. No site is a function
that a framework compiles: ``torch.compile`` would look through the wrapper.
"""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

from ..engine.spec import Patch
from ..frameworks import SLIME_LIKE
from ..frameworks.arguments import calls

if TYPE_CHECKING:
    from ..engine.target_source import TargetSource

_SLIME = tuple(f"{framework}.backends.megatron_utils.loss" for framework in SLIME_LIKE)
_SLIME_UTILS = tuple(f"{framework}.utils.ppo_utils" for framework in SLIME_LIKE)
_MILES = "miles.backends.training_utils"
_VERL = "verl.utils.megatron.tensor_parallel"
_CALCULATE = "calculate_log_probs_and_entropy"
_VERL_LOG_PROBS = "vocab_parallel_log_probs_from_logits"


# --- reasons why a site is left alone, judged from the target's code


def _checkpoints_without_reentrance(target: TargetSource) -> str | None:
    calls = [node for node in _walk(target.function) if isinstance(node, ast.Call)]
    checkpoints = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "checkpoint"]
    if not checkpoints:
        return "it does not checkpoint the loss"
    passes = all(any(keyword.arg == "use_reentrant" for keyword in call.keywords) for call in checkpoints)
    return "it passes use_reentrant itself" if passes else None


def _placeholder_follows_values(target: TargetSource) -> str | None:
    """Return why the site is left alone; ``None`` if a placeholder for missing values always requires grad.

    That placeholder's backward starts a collective that the other ranks may not start.
    """
    always = any(
        isinstance(node, ast.keyword)
        and node.arg == "requires_grad"
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for node in _walk(target.function)
    )
    return None if always else "its placeholder requires grad when the values do"


def _computes_itself(target: TargetSource) -> str | None:
    """Return why the site is left alone if the module itself defines the function, as in slime up to v0.1.

    That function has no ``tp_group``.
    """
    assert target.module is not None
    own = any(isinstance(node, ast.FunctionDef) and node.name == _CALCULATE for node in target.module.body)
    return f"the module has a {_CALCULATE} of its own" if own else None


def _does_not_clone(target: TargetSource) -> str | None:
    return None if "clone" in target.names else "it does not clone the logits"


def _walk(tree: ast.AST | None) -> list[ast.AST]:
    return [] if tree is None else list(ast.walk(tree))


# --- sites

patch = Patch(
    name="lean-loss",
    summary="log-probs and entropy of policy losses at the memory floor, without reentrant checkpointing",
    upstream=("THUDM/slime#1788", "THUDM/slime#1822", "THUDM/slime#2123", "THUDM/slime#2152"),
)

for _module in (*_SLIME, f"{_MILES}.loss"):
    patch.wrap(
        _module,
        "loss_function",
        parameters=("args",),
        requires_names=("recompute_loss_function",),
        skip_if=_checkpoints_without_reentrance,
    )(calls("slime_losses.loss_function"))

for _module in (*_SLIME, f"{_MILES}.loss_hub.logit_processors"):
    patch.wrap(
        _module,
        "get_log_probs_and_entropy",
        parameters=("logits", "args"),
        requires_names=(_CALCULATE,),
        skip_if=_computes_itself,
    )(calls("slime_losses.get_log_probs_and_entropy"))

for _module in (*_SLIME_UTILS, f"{_MILES}.loss_hub.math_utils"):
    patch.wrap(
        _module,
        _CALCULATE,
        parameters=("logits", "tokens", "tp_group", "with_entropy"),
        introduced_with=_CALCULATE,
    )(calls("slime_losses.calculate_log_probs_and_entropy"))

for _module, _qualname in (
    *((module, "_allgather_cp_redistribute") for module in _SLIME),
    (f"{_MILES}.cp_utils", "allgather_cp_redistribute"),
):
    patch.wrap(
        _module,
        _qualname,
        parameters=("res",),
        requires_names=("all_reduce",),
        skip_if=_placeholder_follows_values,
        introduced_with="allgather_cp",
    )(calls("slime_losses.allgather_cp_redistribute"))

for _module in _SLIME_UTILS:
    patch.wrap(
        _module,
        "compute_log_probs",
        parameters=("logits", "tokens", "process_group"),
        requires_names=("fused_vocab_parallel_cross_entropy",),
        introduced_with="fused_vocab_parallel_cross_entropy",
    )(calls("slime_losses.compute_log_probs"))

patch.wrap(
    _VERL,
    _VERL_LOG_PROBS,
    parameters=("logits", "labels"),
    requires_names=("vocab_parallel_cross_entropy",),
)(calls("verl_losses.vocab_parallel_log_probs_from_logits"))

patch.wrap(
    _VERL,
    "vocab_parallel_entropy",
    parameters=("vocab_parallel_logits",),
    requires_names=("_VocabParallelEntropy",),
)(calls("verl_losses.vocab_parallel_entropy"))

patch.wrap(
    _VERL,
    "vocab_parallel_entropy_with_chunking",
    parameters=("vocab_parallel_logits",),
    requires_names=("_VocabParallelEntropy",),
    introduced_with="vocab_parallel_entropy_with_chunking",
)(calls("verl_losses.vocab_parallel_entropy_with_chunking"))


@patch.wrap(
    "verl.workers.engine.megatron.transformer_impl",
    "MegatronEngineWithLMHead._lm_head_logits_processor",
    parameters=("logits", "calculate_entropy", "distillation_only"),
    requires_names=(_VERL_LOG_PROBS,),
    skip_if=_does_not_clone,
    introduced_with="_lm_head_logits_processor",
)
def verl_logits_processor(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _is_ours(inspect.unwrap(wrapped).__globals__.get(_VERL_LOG_PROBS)):
        return wrapped(*args, **kwargs)
    from ..frameworks import verl_losses

    return verl_losses.lm_head_logits_processor(wrapped, instance, args, kwargs)


def _is_ours(function: Any) -> bool:
    """Return whether the function is this patch's wrapper, without another wrapper around it."""
    from ..engine.wrapper import SwitchableWrapper  # here, since `check` and `doctor` work without wrapt

    return type(function) is SwitchableWrapper and function.is_on and function.path[0] == patch.name
