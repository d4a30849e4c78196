"""A token that is masked, or whose ratio overflows, does not turn gradients into NaN.

=========  =============================  ========================================  =========================
framework  function                       what is around it                         left alone when
=========  =============================  ========================================  =========================
slime      ``policy_loss_function``       masked tokens that would overflow leave   it leaves out masked
                                          the batch                                 tokens itself
slime      ``value_loss_function``        the same                                  the same
slime      ``get_log_probs_and_entropy``  the same for the log-probs in training
slime      ``compute_approx_kl``          the ratio is bounded; no gradient if the  it bounds the exponent
                                          coefficient is 0                          itself
slime      ``compute_policy_loss``        the ratio is bounded                      the same
miles      ``compute_approx_kl``,         the same                                  the same
           ``compute_policy_loss``
core       ``roll_tensor``                counts at least one token, by which MTP   it clamps the number of
                                          divides its loss                          tokens
=========  =============================  ========================================  =========================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. What happens is in
:mod:`..frameworks.finite_losses`.

Not patched: slime's ``compute_cispo_loss``, which takes no gradient of its ratio; the policy loss of miles,
which leaves out masked tokens itself; verl and NeMo-RL.
"""

from __future__ import annotations

import ast

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import SLIME_LIKE

_SLIME = [f"{framework}.backends.megatron_utils.loss" for framework in SLIME_LIKE]
_SLIME_UTILS = [f"{framework}.utils.ppo_utils" for framework in SLIME_LIKE]
_MILES = [f"miles.backends.training_utils.{hub}.math_utils" for hub in ("loss_hub", "loss.hub")]
_ADAPTERS = ".frameworks.finite_losses"


# --- reasons why a site is left alone, judged from the target's code


def _leaves_out_masked_tokens(target: TargetSource) -> str | None:
    selects = [*target.calls("where"), *target.calls("masked_fill"), *target.calls("masked_select")]
    return "it leaves out masked tokens itself" if selects else None


def _bounds_the_exponent(target: TargetSource) -> str | None:
    """Return why the site is left alone; ``None`` if it clamps nothing before the first ``exp``."""
    exponentials = [_end(call.node) for call in target.calls("exp")]
    if not exponentials:
        return "it exponentiates nothing itself"
    clamps = [_end(call.node) for call in target.calls() if "clamp" in call.name or call.name == "clip"]
    return "it bounds the exponent itself" if clamps and min(clamps) < min(exponentials) else None


def _end(node: ast.Call) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


# --- sites

patch = Patch(
    name="finite-loss",
    summary="masked tokens, overflowing ratios and zero coefficients no longer make gradients NaN",
    upstream=("THUDM/slime#2258", "THUDM/slime#2198", "radixark/miles#1363"),
    last=True,  # lean-loss replaces get_log_probs_and_entropy, unless something wraps it already
)

for _name, _parameters in (
    ("policy_loss_function", ("args", "batch", "sum_of_sample_mean")),
    ("value_loss_function", ("batch", "sum_of_sample_mean")),
):
    patch.wrap(
        _SLIME,
        _name,
        f"{_ADAPTERS}:{_name}",
        parameters=_parameters,
        skip_if=_leaves_out_masked_tokens,
        introduced_with=_name,
    )
patch.wrap(
    _SLIME,
    "get_log_probs_and_entropy",
    f"{_ADAPTERS}:get_log_probs_and_entropy",
    helps=("policy_loss_function",),
)
_RATIOS: dict[str, tuple[str, ...]] = {
    "compute_approx_kl": ("log_probs", "log_probs_base", "kl_loss_type"),
    "compute_policy_loss": ("ppo_kl",),
}
for _name, _ratios in _RATIOS.items():
    patch.wrap(
        [*_SLIME_UTILS, *_MILES],
        _name,
        f"{_ADAPTERS}:{_name}",
        parameters=_ratios,
        skip_if=_bounds_the_exponent,
    )


def _divides_by_no_zero(target: TargetSource) -> str | None:
    clamps = [ast.unparse(call.node) for call in target.calls("clamp", in_module=True)]
    return "upstream clamps the number of tokens" if any("num_tokens" in text for text in clamps) else None


_MTP = "megatron.core.transformer.multi_token_prediction"
patch.wrap(_MTP, "roll_tensor", f"{_ADAPTERS}:roll_tensor", skip_if=_divides_by_no_zero)
