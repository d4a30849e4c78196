"""What the output layer of a language model gets, and the layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...common.chunks import as_chunks, unwrap
from ...errors import InvalidInputError
from ...losses import DeferredLogits, OutputHead
from ...losses.output_layer import is_column_parallel


def hidden_states_of(logits_tv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the hidden states ``[n, h]`` whose product some rows of a model's deferred logits are."""
    if not isinstance(logits_tv, DeferredLogits) or logits_tv.divisor != 1 or not logits_tv.is_deferred:
        raise InvalidInputError(
            "the model's logits are not the product of hidden states with Megatron's own output layer, "
            "so that hidden states do not say what they are: use a top-k."
        )
    hidden: torch.Tensor = logits_tv[rows].hidden_states()  # type: ignore[attr-defined]
    return hidden


def output_head(model: torch.nn.Module | Sequence[torch.nn.Module]) -> OutputHead | None:
    """Return this rank's part of a model's output layer; ``None`` on stages other than the last.

    It is the model's own memory, not a copy: see :meth:`.TeacherPool.head` for teachers that are swapped.

    Raises:
        InvalidInputError: the output layer is not Megatron's own.
    """
    chunk = unwrap(as_chunks(model)[-1])
    if not getattr(chunk, "post_process", True):
        return None
    layer = getattr(chunk, "output_layer", None)
    if layer is None or not is_column_parallel(layer):
        raise InvalidInputError(
            f"the output layer of {type(chunk).__name__} is {type(layer).__name__}. Expected: Megatron's "
            "ColumnParallelLinear."
        )
    weight = chunk.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    bias = None if layer.skip_bias_add or layer.bias is None else layer.bias.detach()
    return OutputHead(weight.detach(), bias)
