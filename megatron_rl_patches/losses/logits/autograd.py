"""What the autograd functions of the losses over logits have in common."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .rows import Inputs, LogitSource

P = ParamSpec("P")
R = TypeVar("R")


class DifferentiableOnce(torch.autograd.Function):
    """Return a gradient as it is, and refuse to differentiate it.

    torch's ``once_differentiable`` is not enough: if the incoming gradients are constants, it returns a
    gradient that does not require grad, and a second derivative is silently wrong.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        """``sources`` are the tensors that the gradient was computed from."""
        return gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidInputError(
            "the gradient of a vocabulary-parallel loss cannot be differentiated twice: second "
            "derivatives need torch.log_softmax"
        )


def save(ctx: Any, tensors: Mapping[str, Tensor | None]) -> None:
    """Save tensors for backward, under names that an error can use; :func:`saved` returns them."""
    if torch.is_inference_mode_enabled():
        return  # there is no backward
    savable = {name: _alias(t) if t is not None and t.is_inference() else t for name, t in tensors.items()}
    ctx.save_for_backward(*savable.values())
    ctx.versions = [(name, weakref.ref(t), t._version) for name, t in savable.items() if t is not None]


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of one that was made under inference mode, which autograd cannot save."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors of :func:`save`, or raise an error that names those that were overwritten."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        current = [(name, reference(), version) for name, reference, version in ctx.versions]
        names = [
            name for name, tensor, version in current if tensor is not None and tensor._version != version
        ]
        if not names:
            raise
        raise InvalidInputError(
            f"no gradient can be computed, since {' and '.join(names)} had been overwritten after forward: "
            "by an inplace_backward (this is a second backward, or another loss of these logits), by an "
            f"optimizer, or by another operation in place. Autograd says: {error}"
        ) from error


def save_source(ctx: Any, source: LogitSource, others: Mapping[str, Tensor | None] | None = None) -> None:
    """Save for backward what :func:`gradients_of_inputs` hands on."""
    tensors, ctx.restore = source.saved()
    ctx.other_names = list(others or ())
    save(ctx, {**tensors, **(others or {})})


def gradients_of_inputs(ctx: Any, compute: Callable[..., Inputs], *gradients: Tensor | None) -> Inputs:
    """Return the gradients of a source's inputs, which cannot be differentiated; each may be ``None``.

    Args:
        ctx: of :func:`save_source`.
        compute: called as ``compute(ctx, source, others, *gradients)`` without grad mode; ``others`` are the
            other saved tensors by name.
        gradients: of the results; ``None`` for a result that nobody differentiates.
    """
    tensors = saved(ctx)
    size = len(tensors) - len(ctx.other_names)
    source, others = ctx.restore(*tensors[:size]), dict(zip(ctx.other_names, tensors[size:], strict=True))
    if all(gradient is None for gradient in gradients):
        return (None,) * len(source.inputs)
    with torch.no_grad():
        results: Inputs = without_autocast(compute)(ctx, source, others, *gradients)
    return once_differentiable(results, (*source.inputs, *gradients))


def once_differentiable(results: Inputs, sources: Inputs) -> Inputs:
    """Return gradients that refuse to be differentiated, if autograd asks for such (``create_graph=True``).

    Args:
        sources: the tensors that the gradients were computed from.
    """
    if not torch.is_grad_enabled():
        return results
    return tuple(
        None if result is None else DifferentiableOnce.apply(result, *sources)  # type: ignore[no-untyped-call]
        for result in results
    )


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, run with autocast switched off.

    Logits that are not materialized have the dtype of the hidden states, whatever autocast says when a loss
    reads them: forward and backward, which may differ in that, must read the same numbers.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run
