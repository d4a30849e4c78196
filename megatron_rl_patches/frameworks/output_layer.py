"""What the patch ``lean-head`` puts in the place of functions of Megatron."""

from __future__ import annotations

from typing import Any

from ..engine.call import Call
from ..losses import output_layer


def model_forward(call: Call) -> Any:
    options = call.options
    sizes = {"tile_bytes": options.lean_head_tile_bytes or None, "keep_bytes": options.lean_head_keep_bytes}
    return output_layer.language_model_forward(call, call.instance, call.arguments, **sizes)


def layer_forward(call: Call) -> Any:
    return output_layer.column_parallel_forward(call.wrapped, call.instance, call.args, call.kwargs)


def loss_of_labels(call: Call) -> Any:
    layer = getattr(call.instance, "output_layer", None)
    return output_layer.loss_of_labels(call.wrapped, layer, call["labels"], call["logits"])
