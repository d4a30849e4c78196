"""What the autograd functions of the losses over logits have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError

if TYPE_CHECKING:
    from .source import Inputs, LogitSource


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


def save_source(ctx: Any, source: LogitSource, *others: Tensor | None) -> None:
    """Save for backward what :func:`gradients_of_inputs` hands on."""
    tensors, ctx.restore = source.saved()
    ctx.num_source_tensors = len(tensors)
    ctx.save_for_backward(*tensors, *others)


def gradients_of_inputs(ctx: Any, compute: Callable[..., Inputs], *gradients: Tensor | None) -> Inputs:
    """Return the gradients of a source's inputs, which cannot be differentiated; each may be ``None``.

    Args:
        ctx: of :func:`save_source`.
        compute: called as ``compute(ctx, source, other_saved_tensors, *gradients)``, without grad mode.
        gradients: of the results; ``None`` for a result that nobody differentiates.
    """
    saved = saved_tensors(ctx)
    of_source, others = saved[: ctx.num_source_tensors], saved[ctx.num_source_tensors :]
    source = ctx.restore(*of_source)
    if all(gradient is None for gradient in gradients):
        return (None,) * len(source.inputs)
    with torch.no_grad():
        results: Inputs = compute(ctx, source, list(others), *gradients)
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


def all_gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``[tp, k, n]``, the ``[k, n]`` of every rank of the group."""
    if group is None or (size := dist.get_world_size(group)) == 1:
        return values[None]
    gathered = values.new_empty((size * len(values), *values.shape[1:]))
    dist.all_gather_into_tensor(gathered, values, group=group)
    return gathered.view(size, *values.shape)


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return ``ctx.saved_tensors``, or raise an error that names the argument that was overwritten."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        # Autograd's message names the dtype, [torch.LongTensor [5]] or [CPUBoolType [5, 8]]. The logits are
        # the only saved floats that other code can write to.
        if integers := re.search(r"\[[\w.]*(Long|Bool)", str(error)):
            name = "keep_mask" if integers[1] == "Bool" else "rows or indices"
            raise InvalidInputError(
                f"an operation in place overwrote {name} after forward, so that the gradient cannot be "
                f"computed. Autograd says: {error}"
            ) from error
        raise InvalidInputError(
            "the logits, or those of a teacher, were overwritten after forward, so that the gradient cannot "
            "be computed: by an inplace_backward (this is a second backward, or another loss of these "
            f"logits), or by some operation in place. Autograd says: {error}"
        ) from error
