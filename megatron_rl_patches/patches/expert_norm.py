"""The gradient norm, clipping and the count of zeros see every expert, and each parameter once.

Nothing is patched where Megatron reads the expert tensor-parallel group itself, as from 0.19 on and in miles'
fork. What decides is in :mod:`..reentry.expert_norm`.

Not patched: optimizers that are not made by ``get_megatron_optimizer`` or its siblings.
"""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..engine.patch import Patch

_LAYERS = "megatron.core.tensor_parallel.layers"
_COUNTS = ("param_is_not_tensor_parallel_duplicate",)
_COUNTS_EXPERTS = "upstream itself counts experts by their own tensor-parallel group"


patch = Patch(
    name="expert-norm",
    summary="the gradient norm and clipping include every expert, and count each parameter once",
    upstream=("NVIDIA/Megatron-LM#5916", "radixark/Megatron-LM#80", "ROCm/TransformerEngine#715"),
)


@patch.wrap(
    _LAYERS,
    "param_is_not_tensor_parallel_duplicate",
    parameters=("param",),
    skip_if=lambda code: _COUNTS_EXPERTS if code.mentions("expert_tp_group") else None,
)
def counts(call: Call) -> bool:
    from ..reentry import expert_norm

    # It runs for each parameter in each step, and looking up an argument by its name takes microseconds.
    return expert_norm.counts(call.args[0] if call.args else call["param"], call)


@patch.wrap(
    _LAYERS,
    "copy_tensor_model_parallel_attributes",
    parameters=("destination_tensor", "source_tensor"),
    helps=_COUNTS,
)
def copy_attributes(call: Call) -> None:
    from ..reentry import expert_norm

    call()
    expert_norm.copy_note(call["destination_tensor"], call["source_tensor"])


@patch.wrap(
    "megatron.core.optimizer",
    "_get_param_groups",
    parameters=("model_chunks",),
    helps=_COUNTS,
)
def get_param_groups(call: Call) -> Any:
    from ..reentry import expert_norm

    expert_norm.note_parameters(call["model_chunks"])
    return call()
