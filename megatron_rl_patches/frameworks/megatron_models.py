"""Megatron's language models, whose output layer defers its logits."""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..losses import output_layer
from . import own_options


def forward(call: Call) -> Any:
    """Run a model's forward, whose output layer defers its logits where the call returns them."""
    if call.get("output_processor") is not None:
        reason = "not needed in calls with an output_processor (of verl with use_fused_kernels)"
        own_options[call.function.__qualname__] = reason
    return output_layer.language_model_forward(
        call,
        call.instance,
        call.arguments,
        tile_bytes=call.options.lean_head_tile_bytes or None,
        keep_bytes=call.options.lean_head_keep_bytes,
    )


def column_parallel_forward(call: Call) -> Any:
    """Return deferred logits where the layer is to defer them and can."""
    return output_layer.column_parallel_forward(call, call.instance, *call.args, **call.kwargs)


def loss_of_labels(call: Call) -> Any:
    """Return the cross entropy, of deferred logits in tiles."""
    layer = getattr(call.instance, "output_layer", None)
    return output_layer.loss_of_labels(call, layer, call["labels"], call["logits"])
