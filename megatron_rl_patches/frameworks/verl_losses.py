"""Log-probabilities and entropies in verl's Megatron engine; the functions have the names of verl's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.scopes import Scope
from ..losses import DeferredLogits
from . import log_probs
from .arguments import bind, call


@dataclass
class EntropyRequest:
    """Asks the pass of the log-probabilities over the logits for the entropy, too."""

    entropy: Tensor | None = None


_request: Scope[EntropyRequest] = Scope("verl_entropy")


def vocab_parallel_log_probs_from_logits(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return log-probabilities; the gradient may overwrite the logits, as verl's own forward does."""
    arguments, request = bind(wrapped, args, kwargs, defaults=True).arguments, _request.get()
    log_probs_n, entropy = log_probs.log_probs_and_entropy(
        arguments["logits"],
        arguments["labels"],
        _tensor_parallel_group(),
        with_entropy=request is not None,
        inplace_backward=True,
    )
    if request is not None:
        request.entropy = entropy
    return log_probs_n


def vocab_parallel_entropy(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return entropies in the dtype of the logits."""
    logits = bind(wrapped, args, kwargs, defaults=True).arguments["vocab_parallel_logits"]
    return log_probs.entropy(logits, _tensor_parallel_group()).to(logits.dtype)


def vocab_parallel_entropy_with_chunking(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return entropies in float32 for logits of any dtype, as verl does for its chunks."""
    logits = bind(wrapped, args, kwargs, defaults=True).arguments["vocab_parallel_logits"]
    return log_probs.entropy(logits, _tensor_parallel_group())


def lm_head_logits_processor(
    wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Take entropy and log-probabilities in one pass, from logits that need not be cloned in between.

    The log-probabilities must come from :func:`vocab_parallel_log_probs_from_logits`.
    """
    bound = bind(wrapped, args, kwargs, defaults=True)
    arguments = bound.arguments
    if isinstance(arguments["logits"], DeferredLogits):
        arguments["temperature"] = _also_for_padding(arguments["temperature"])
    if not arguments["calculate_entropy"] or arguments["distillation_only"]:
        result: dict[str, Any] = call(wrapped, bound)
        return result
    with _request.enter(EntropyRequest()) as request:
        result = call(wrapped, bound, calculate_entropy=False)
    assert request.entropy is not None
    in_float32 = getattr(engine.engine_config, "entropy_from_logits_with_chunking", False)
    entropy = request.entropy if in_float32 else request.entropy.to(arguments["logits"].dtype)
    return {**result, "entropy": entropy}


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


def _tensor_parallel_group() -> torch.distributed.ProcessGroup | None:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
