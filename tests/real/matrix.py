"""Which models are tested on which layouts, and why the others are not.

``pytest --layers transformer_engine`` tests them with the stand-in of TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import pytest

from tests import layers

if TYPE_CHECKING:  # it imports Megatron, and the page needs only the names
    from megatron_rl_patches.testing import TinyModel

_MOE = {"moe_token_dispatcher_type": "alltoall", "moe_router_topk": 2}
_SHARED_EXPERT = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
_EXPERT_BIAS = {
    "moe_token_dispatcher_type": "allgather",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}
#: Options of :func:`tiny`.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense"},
    "MoE": {"kind": "moe", "config": {**_MOE, **_SHARED_EXPERT}},
    "MoE, expert bias": {"kind": "moe", "config": {**_MOE, **_EXPERT_BIAS}},
    "MLA": {"kind": "mla"},
    "MLA, MoE": {"kind": "mla-moe"},
    "MTP": {"kind": "mtp"},
    "hybrid": {"kind": "hybrid", "config": {**_MOE, **_SHARED_EXPERT}},
    "hybrid, MTP": {
        "kind": "hybrid",
        "config": {**_MOE, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
    },
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "DP 2": (2, {}),
    "TP 2": (2, {"tp": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pp": 2}),
    "PP 2, VPP 2": (2, {"pp": 2, "vpp": 2}),
    "CP 2": (2, {"cp": 2}),
    "EP 2": (2, {"ep": 2}),
    "TP 2, expert TP 1": (2, {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True}),
}
#: Cells that slow tests run, on every release: one half or the other for each promise. Together they are each
#: model and each layout; all others are ``nightly``.
HALVES = (
    {"dense, PP 2, VPP 2", "MoE, expert bias, EP 2", "MLA, MoE, CP 2", "hybrid, 1 rank"},
    {"dense, TP 2", "MoE, TP 2, expert TP 1", "MLA, DP 2", "MTP, PP 2"},
)
_EXPERTS = {"EP 2", "TP 2, expert TP 1"}
_WITH_EXPERTS = ("moe", "mla-moe", "hybrid")


def tiny(kind: str = "dense", **options: Any) -> TinyModel:
    """Return the model of a kind, with the layers that ``--layers`` names.

    Raises:
        Skipped: this megatron-core has no such model.
    """
    from megatron_rl_patches.testing import TinyModel
    from tests.references.tiny_hybrid import HAS_MTP, TinyHybrid

    if kind != "hybrid":
        return TinyModel(kind=kind, layers=layers.chosen(), **options)
    if "mtp_num_layers" in options.get("config", {}) and not HAS_MTP:
        pytest.skip("hybrid models of this release have no multi-token prediction")
    return TinyHybrid(layers=layers.chosen(), **options)


def reason(model: str, layout: str) -> str:
    """Return why a model is not tested on a layout; empty if it is."""
    if layout in _EXPERTS and MODELS[model]["kind"] not in _WITH_EXPERTS:
        return "it has no experts"
    if model.startswith("hybrid") and layout == "PP 2, VPP 2":
        return "up to megatron-core 0.17 it has no virtual stages"
    return ""


def cells(
    slow: Collection[str], always: Collection[str] = (), leave_out: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test with ``ranks`` and ``model``, options of :func:`tiny`, for each cell of the table.

    Args:
        slow: cells that slow tests run: one of :data:`HALVES`, and more.
        always: cells, as "MODEL, LAYOUT", that the default suite runs.
        leave_out: layouts.
    """
    parameters = []
    for model, options in MODELS.items():
        for layout, (ranks, sizes) in LAYOUTS.items():
            if layout not in leave_out and not reason(model, layout):
                name = f"{model}, {layout}"
                mark = pytest.mark.slow if name in slow else pytest.mark.nightly
                marks = [] if name in always else [mark]
                parameters.append(pytest.param(ranks, {**options, **sizes}, id=name, marks=marks))
    return pytest.mark.parametrize(("ranks", "model"), parameters)
