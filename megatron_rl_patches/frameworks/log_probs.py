"""Log-probs and entropies by the conventions that slime, miles and verl share; models that defer logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.call import Call
from ..losses import output_layer
from ..losses.vocab import log_probs
from ..losses.vocab.arguments import Rows, VocabParallelOptions, in_float32
from ..losses.vocab.deferred import DeferredLogits
from . import own_options

_NO_TOKEN = -100
_HAS_ENTROPY = "_loss_has_entropy"


def log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    rows: Rows = None,
    entropy_grad: bool | None = None,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of the tokens, and entropies or ``None``, in float32 and the tokens' shape.

    :func:`.vocab_parallel_log_probs` explains the arguments that are not named here. A temperature beyond
    the range of float32, such as 0, counts as 1.

    Args:
        logits: ``[..., V / tp]``.
        tokens: ``[...]``, or one for each of the ``rows`` of ``logits`` ``[T, V / tp]``. Ids outside of the
            vocabulary get 0: frameworks look up prompts and padding, too.
        tp_group: tensor-parallel group; ``None`` means the default group if there is one, as in
            ``torch.distributed``.
        entropy_grad: whether entropies have a gradient; ``None``: there are no entropies.
        inplace_backward: let the gradient overwrite the logits where nobody else may need them.
    """
    if tp_group is None and dist.is_available() and dist.is_initialized():
        tp_group = dist.group.WORLD
    vocab_size = logits.shape[-1] * (1 if tp_group is None else dist.get_world_size(tp_group))
    targets = tokens.reshape(-1).long()
    targets = torch.where((targets >= 0) & (targets < vocab_size), targets, _NO_TOKEN)
    logits_tv = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    options = VocabParallelOptions(
        tp_group=tp_group,
        temperature=temperature if in_float32(temperature) else 1.0,
        inplace_backward=inplace_backward and _may_be_overwritten(logits_tv),
        others_overwrite=inplace_backward,
        ignore_index=_NO_TOKEN,
        with_entropy=entropy_grad is not None,
        entropy_grad=bool(entropy_grad),
    )
    values, entropies = log_probs.log_probs_and_entropy(logits_tv, targets, rows, keep_mask, options)
    return values.view(tokens.shape), None if entropies is None else entropies.view(tokens.shape)


def entropy(logits: Tensor, tp_group: dist.ProcessGroup | None) -> Tensor:
    """Return entropies ``[...]`` of logits ``[..., V / tp]``, in float32."""
    any_token = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _, entropies = log_probs_and_entropy(logits, any_token, tp_group, entropy_grad=True)
    assert entropies is not None
    if entropies.requires_grad and not isinstance(logits, DeferredLogits):
        setattr(logits.untyped_storage(), _HAS_ENTROPY, True)
    return entropies


def _may_be_overwritten(logits: Tensor) -> bool:
    """Return whether the gradient may overwrite the logits.

    They must be an intermediate result with a storage of its own, in the dtype that Megatron overwrites, and
    no entropy of them may be waiting for its backward.
    """
    if isinstance(logits, DeferredLogits):
        return False
    base = logits if logits._base is None else logits._base
    storage = logits.untyped_storage()
    is_whole = storage.nbytes() == logits.numel() * logits.element_size()
    is_leaf = base.is_leaf and base.requires_grad
    return logits.dtype == torch.float32 and is_whole and not is_leaf and not hasattr(storage, _HAS_ENTROPY)


# --- Megatron's language models


def model_forward(call: Call) -> Any:
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
