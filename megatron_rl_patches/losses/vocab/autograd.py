"""What backward needs: saved tensors by name, gradients that refuse a second derivative, sums over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from .sources import Inputs, Source, Tensors


def save_sources(ctx: Any, sources: Sequence[Source], others: Tensors, owners: Sequence[str] = ()) -> None:
    """Save for backward what :func:`gradients_of_inputs` hands on, under names that an error can use.

    ``owners`` say whose the sources behind the first one are, such as "the teacher".
    """
    if torch.is_inference_mode_enabled():
        return  # there is no backward
    named: list[tuple[str, Any]] = []
    ctx.restores, ctx.other_names = [], list(others)
    for source, owner in zip(sources, ("", *owners), strict=True):
        tensors, restore = source.saved()
        named += [(f"{name} of {owner}" if owner else name, tensor) for name, tensor in tensors.items()]
        ctx.restores.append((restore, len(tensors)))
    named += others.items()
    named = [(name, _alias(t) if t is not None and t.is_inference() else t) for name, t in named]
    ctx.save_for_backward(*(tensor for _, tensor in named))
    ctx.versions = [(name, weakref.ref(t), t._version) for name, t in named if t is not None]


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of one that was made under inference mode, which autograd cannot save."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def gradients_of_inputs(
    ctx: Any, compute: Callable[..., Inputs], before: int, *gradients: Tensor | None
) -> Inputs:
    """Return the gradients of the first source's inputs, which cannot be differentiated.

    ``compute`` is such as :meth:`.Loss.gradients`. So many arguments of forward come ``before`` the inputs.
    """
    tensors = iter(_saved(ctx))
    sources = [restore(*islice(tensors, size)) for restore, size in ctx.restores]
    others = dict(zip(ctx.other_names, tensors, strict=True))
    if all(gradient is None for gradient in gradients):
        return (None,) * len(sources[0].inputs)
    with torch.no_grad():
        results: Inputs = compute(sources, others, ctx.needs_input_grad[before:], *gradients)
    if not torch.is_grad_enabled():  # without create_graph=True
        return results
    computed_from = *sources[0].inputs, *gradients
    return tuple(
        None if result is None else _DifferentiableOnce.apply(result, *computed_from)  # type: ignore[no-untyped-call]
        for result in results
    )


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors, or raise an error that names those that were overwritten."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        current = [(name, reference(), version) for name, reference, version in ctx.versions]
        names = [name for name, t, version in current if t is not None and t._version != version]
        if not names:
            raise
        raise InvalidInputError(
            f"no gradient can be computed, since {' and '.join(names)} had been overwritten after forward: "
            "by an inplace_backward (this is a second backward, or another loss of these logits), by an "
            f"optimizer, or by another operation in place. Autograd says: {error}"
        ) from error


class _DifferentiableOnce(torch.autograd.Function):
    """Return a gradient as it is, and refuse to differentiate it.

    With torch's ``once_differentiable`` it is silently wrong to do so if incoming gradients are constants.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *computed_from: Tensor | None) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise InvalidInputError(
            "a gradient that deferred logits or a vocabulary-parallel loss have computed cannot be "
            "differentiated twice: second derivatives need ordinary logits and torch.log_softmax"
        )


# --- ranks that share the hidden states


def sum_gradient(hidden: Tensor, group: dist.ProcessGroup | None, is_split: bool = False) -> Any:
    """Return hidden states ``[s, ..., h]`` whose gradient is summed over the group.

    With ``is_split`` each rank has ``[s / tp, ..., h]``, and gets its part of the sum. So do Megatron's
    ``copy_to_tensor_model_parallel_region`` and ``gather_from_sequence_parallel_region``.
    """
    is_alone = group is None or dist.get_world_size(group) == 1
    return hidden if is_alone else _SumGradient.apply(hidden, group, is_split)  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup, is_split: bool) -> Tensor:
        ctx.group, ctx.is_split = group, is_split
        if not is_split:
            return hidden.view_as(hidden)
        whole = hidden.new_empty((dist.get_world_size(group) * len(hidden), *hidden.shape[1:]))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.contiguous()
        if not ctx.is_split:
            dist.all_reduce(gradient, group=ctx.group)
            return gradient, None, None
        size = len(gradient) // dist.get_world_size(ctx.group)
        part = gradient.new_empty((size, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(part, gradient, group=ctx.group)
        return part, None, None
