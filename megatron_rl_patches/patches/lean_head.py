"""Logits that are never materialized: the output layer's product is computed inside the loss, in tiles.

The replacements are in :mod:`..losses.output_layer`. Losses that ``lean-loss`` patches take deferred logits
as they are; any other code that reads their values gets the logits that the layer would have returned.

Not patched: value and reward heads, which are no language model's output layer, T5, BERT, and Megatron's
schedule that overlaps the communication of experts, which does not call ``forward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ..engine.patch import Patch
from ..engine.statuses import SiteStatus
from ..errors import PatchError
from ..frameworks import own_options


@dataclass(frozen=True)
class LeanHeadOptions:
    """Options of the patch.

    Attributes:
        lean_head_tile_bytes: the memory of the logits of one tile; 0: 64 MiB on a CPU; 512 MiB on a GPU, and
            1 GiB where all logits take 2 GiB or more.
        lean_head_keep_bytes: the most memory that each call of a loss may take to keep logits, so that
            backward does not compute them again.

    Raises:
        PatchError: a number is negative.
    """

    lean_head_tile_bytes: int = 0
    lean_head_keep_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("lean_head_tile_bytes", "lean_head_keep_bytes"):
            value = getattr(self, name)
            if value < 0:
                raise PatchError(f"{name} is {value}: expected a number of bytes, 0 or more")


#: Functions of frameworks' losses that take deferred logits if `lean-loss` patches them.
_LOG_PROB_FUNCTIONS = ("get_log_probs_and_entropy", "vocab_parallel_log_probs_from_logits")
_MATERIALIZED = "the logits are materialized"
_MODELS = (
    ("gpt.gpt_model", "GPTModel"),
    ("mamba.mamba_model", "MambaModel"),
    ("hybrid.hybrid_model", "HybridModel"),
)


def _notes(statuses: Sequence[SiteStatus]) -> list[str]:
    """Return for each framework whether its losses take deferred logits, or why logits are materialized."""
    sites = [status for status in statuses if status.state not in ("absent", "not needed")]
    models = [s for s in sites if s.target.endswith((".GPTModel.forward", ".ColumnParallelLinear.forward"))]
    losses = [s for s in sites if s.patch == "lean-loss" and s.target.endswith(_LOG_PROB_FUNCTIONS)]
    if models and not losses:
        if any(status.patch == "lean-loss" for status in statuses):
            tiles = "losses of this package compute the logits in tiles; other code gets all of them"
            return [f"lean-head: {tiles}"]
        return [f"{_MATERIALIZED} for losses of frameworks: `lean-loss` is not selected"]
    notes = []
    for loss in losses:
        against = next((status for status in (*models, loss) if status.state != "fits"), None)
        way = f"{_MATERIALIZED}: {against}" if against else "its losses compute the logits in tiles"
        notes.append(f"{loss.framework}: {way}")
    return notes


patch = Patch(
    name="lean-head",
    summary="the logits are never in memory: the loss computes them tile by tile",
    upstream=("THUDM/slime#2253", "THUDM/slime#2383", "radixark/miles#1068", "radixark/miles#1136"),
    options=LeanHeadOptions,
    notes=_notes,
    selected_by="all",  # no GPU has run it
)


for _module, _model_class in _MODELS:
    patch.wrap(
        f"megatron.core.models.{_module}",
        f"{_model_class}.forward",
        ".frameworks.log_probs:model_forward",
        parameters=("labels",),
        optional_module=_model_class != "GPTModel",
        detail=partial(own_options.get, f"{_model_class}.forward", ""),
        # From megatron-core 0.18 on, mamba_model.py only gives HybridModel its old name MambaModel. It has no
        # output_layer then, and the site is not needed.
        introduced_with="output_layer",
    )
patch.wrap(
    "megatron.core.tensor_parallel.layers",
    "ColumnParallelLinear.forward",
    ".frameworks.log_probs:column_parallel_forward",
    parameters=("input_", "weight", "runtime_gather_output"),
    requires_names=("_forward_impl", "sequence_parallel"),
    helps=tuple(f"{name}.forward" for _, name in _MODELS),
)
patch.wrap(
    "megatron.core.models.common.language_module.language_module",
    "LanguageModule.compute_language_model_loss",
    ".frameworks.log_probs:loss_of_labels",
    parameters=("labels", "logits"),
    helps=tuple(f"{name}.forward" for _, name in _MODELS),
)
