"""Routes that are replayed belong to one model and to one step.

What happens is in :mod:`..reentry.router_replay` and :mod:`..frameworks.routing_replay`. Where the router of
megatron-core replays nothing, none of its functions is patched. That a model that only scores is left out of
the list is part of :func:`..inference.models.model.freeze`, and that a ``train()`` that raised leaves
nothing, of ``TrainGuard``.
"""

from __future__ import annotations

from typing import Any

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import megatron_utils

_ROUTER = ("TopKRouter.__init__",)
_BLOCKS = (
    ("megatron.core.transformer.transformer_block", "TransformerBlock"),
    ("megatron.core.models.hybrid.hybrid_block", "HybridStack"),
    ("megatron.core.ssm.mamba_block", "MambaStack"),
    ("megatron.core.transformer.multi_token_prediction", "MultiTokenPredictionBlock"),
)
_SCHEDULES = ("no_pipelining", "pipelining_with_interleaving", "pipelining_without_interleaving")


def _clears_routes(target: TargetSource) -> str | None:
    names = ("clear_all", "clear_global_indices")
    if not any(map(target.mentions, names)):
        return "it replays no routes"
    return "it clears its routes when it raises" if any(map(target.cleans_up, names)) else None


patch = Patch(
    name="router-replay",
    summary="MoE routing replay uses only the routes of its own model and step",
    upstream=("NVIDIA/Megatron-LM#4168", "NVIDIA/Megatron-LM#2693", "verl-project/verl#7106"),
)

for _module, _block in _BLOCKS:
    _options: dict[str, Any] = {
        "optional_module": _block != "TransformerBlock",
        # From megatron-core 0.18 on, mamba_block.py only gives HybridStack its old name.
        "introduced_with": "hidden_states" if _block == "MambaStack" else "",
        "helps": _ROUTER,
    }
    patch.wrap(_module, f"{_block}.forward", ".frameworks.routing_replay:forward", **_options)
    if _block != "MultiTokenPredictionBlock":
        _options["parameters"] = ("config",)
        patch.wrap(_module, f"{_block}.__init__", ".frameworks.routing_replay:initialize_block", **_options)
patch.wrap(
    "megatron.core.transformer.moe.router",
    "TopKRouter.__init__",
    ".frameworks.routing_replay:initialize_router",
    skip_if=lambda code: None if code.mentions("router_replay") else "it replays no routes",
)
for _schedule in _SCHEDULES:
    patch.wrap(
        "megatron.core.pipeline_parallel.schedules",
        f"forward_backward_{_schedule}",
        ".frameworks.routing_replay:forward_backward",
        parameters=("model",),
        helps=_ROUTER,
    )
patch.wrap(
    megatron_utils("actor"),
    "MegatronTrainRayActor.train_actor",
    ".frameworks.routing_replay:train_actor",
    skip_if=_clears_routes,
    introduced_with="clear_all",
)
patch.wrap(
    "verl.workers.engine.megatron.transformer_impl",
    "MegatronEngine.forward_backward_batch",
    ".frameworks.routing_replay:verl_forward_backward_batch",
    skip_if=_clears_routes,
    optional_module=True,
)
