"""Log-probabilities and entropies in verl's Megatron engine; the functions have the names of verl's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..common.scopes import Scope
from ..engine.call import Call
from ..engine.wrapper import is_patched
from ..losses import DeferredLogits
from . import log_probs

# Where it is entered, the pass over the logits for log-probabilities appends the entropy, too.
_entropies: Scope[list[Tensor]] = Scope("verl_entropy")


def vocab_parallel_log_probs_from_logits(call: Call) -> Tensor:
    """Return log-probabilities; the gradient may overwrite the logits, as verl's own forward does."""
    entropies = _entropies.get()
    log_probs_n, entropy = log_probs.log_probs_and_entropy(
        call["logits"],
        call["labels"],
        tensor_parallel_group(),
        entropy_grad=None if entropies is None else True,
        inplace_backward=True,
    )
    if entropies is not None and entropy is not None:
        entropies.append(entropy)
    return log_probs_n


def vocab_parallel_entropy(call: Call) -> Tensor:
    """Return entropies in the dtype of the logits."""
    return vocab_parallel_entropy_with_chunking(call).to(call["vocab_parallel_logits"].dtype)


def vocab_parallel_entropy_with_chunking(call: Call) -> Tensor:
    """Return entropies in float32 for logits of any dtype, as verl does for its chunks."""
    return log_probs.entropy(call["vocab_parallel_logits"], tensor_parallel_group())


def lm_head_logits_processor(call: Call) -> dict[str, Any]:
    """Take entropy and log-probabilities in one pass, from logits that need not be cloned in between.

    Where the log-probabilities are not those of :func:`vocab_parallel_log_probs_from_logits`, since another
    function is in its place, the method runs as it is.
    """
    log_probs_of_verl = inspect.unwrap(call.function).__globals__.get("vocab_parallel_log_probs_from_logits")
    if not is_patched(log_probs_of_verl, "lean-loss"):
        return call()
    changes = {}
    if isinstance(call["logits"], DeferredLogits):
        changes["temperature"] = _also_for_padding(call["temperature"])
    if not call["calculate_entropy"] or call["distillation_only"]:
        return call(**changes)
    with _entropies.enter([]) as entropies:
        result = call(**changes, calculate_entropy=False)
    in_float32 = getattr(call.instance.engine_config, "entropy_from_logits_with_chunking", False)
    entropy = entropies[-1]
    return {**result, "entropy": entropy if in_float32 else entropy.to(call["logits"].dtype)}


def _also_for_padding(temperature: Tensor) -> Tensor:
    """Return temperatures in which padding has that of the tokens, if they have all the same.

    verl gives padding a temperature of zero, makes it 1e-8, and drops what comes of it. Deferred logits stay
    deferred if all rows are divided by the same number.
    """
    is_token = temperature > 0
    if is_token.all() or not is_token.any():
        return temperature
    lowest, highest = torch.aminmax(temperature[is_token])
    return torch.where(is_token, temperature, lowest) if lowest == highest else temperature


def tensor_parallel_group() -> torch.distributed.ProcessGroup | None:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
