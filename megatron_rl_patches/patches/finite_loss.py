"""A token that is masked, or whose ratio overflows, does not turn gradients into NaN.

No site of slime and miles is left alone because of a bound or a mask in their code: where nothing overflows,
a site does nothing, as in miles' ``compute_policy_loss``, which bounds its ratio itself. A framework's own
``where(mask, kl, 0)`` behind the exponential repairs the value, and the gradient is still 0 times infinity.
``roll_tensor`` is left alone where megatron-core clamps the number of tokens, as from 0.17 on.

What happens is in :mod:`..frameworks.finite_losses`.

Not patched: slime's ``compute_cispo_loss``, which takes no gradient of its ratio; verl and NeMo-RL.
"""

from __future__ import annotations

import ast

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import SLIME_LOSSES, SLIME_MATH, miles_losses

_LOSSES, _MATH = [*SLIME_LOSSES, *miles_losses("losses")], [*SLIME_MATH, *miles_losses("math_utils")]
_ADAPTERS = ".frameworks.finite_losses"

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
    patch.wrap(_LOSSES, _name, f"{_ADAPTERS}:{_name}", parameters=_parameters, introduced_with=_name)
patch.wrap(
    [*SLIME_LOSSES, *miles_losses("logit_processors")],
    "get_log_probs_and_entropy",
    f"{_ADAPTERS}:get_log_probs_and_entropy",
    helps=("policy_loss_function",),
)
_RATIOS: dict[str, tuple[str, ...]] = {
    "compute_approx_kl": ("log_probs", "log_probs_base", "kl_loss_type"),
    "compute_policy_loss": ("ppo_kl",),
}
for _name, _ratios in _RATIOS.items():
    patch.wrap(_MATH, _name, f"{_ADAPTERS}:{_name}", parameters=_ratios)


def _divides_by_no_zero(target: TargetSource) -> str | None:
    clamps = [ast.unparse(call.node) for call in target.calls("clamp", in_module=True)]
    return "upstream clamps the number of tokens" if any("num_tokens" in text for text in clamps) else None


_MTP = "megatron.core.transformer.multi_token_prediction"
patch.wrap(_MTP, "roll_tensor", f"{_ADAPTERS}:roll_tensor", skip_if=_divides_by_no_zero)
