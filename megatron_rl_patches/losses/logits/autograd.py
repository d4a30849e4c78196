"""What the losses share: one autograd function, and the collectives of ranks that share a vocabulary."""

from __future__ import annotations

import functools
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from .arguments import VocabParallelOptions
from .overwriting import StorageClaim
from .rows import Inputs, LogitSource

P = ParamSpec("P")
R = TypeVar("R")
Tensors = dict[str, Any]  # by the names that errors use; some may be None


class LogitFunction(ABC):
    """A function of rows of logits, with a gradient of its own; one object for each call.

    An object has no tensors as attributes: autograd saves those that backward needs, and alone decides how
    long they live.
    """

    def __init__(self, claim: StorageClaim | None = None) -> None:
        self.claim = claim or StorageClaim(False)

    @abstractmethod
    def forward(self, source: Any, tensors: Tensors) -> tuple[Sequence[Tensor | None], Tensors]:
        """Return the results, and the tensors that :meth:`gradients` needs."""

    @abstractmethod
    def gradients(
        self, source: Any, saved: Tensors, needed: Sequence[bool], *gradients: Tensor | None
    ) -> Inputs:
        """Return the gradients of the source's inputs; ``None`` for one that needs none.

        Args:
            gradients: of the results; ``None`` for a result that nobody differentiates.
        """

    def apply(self, source: LogitSource, **tensors: Tensor | None) -> tuple[Any, ...]:
        """Return the results, with a graph to the source's inputs."""
        return _Function.apply(self, source, tensors, *source.inputs)  # type: ignore[no-untyped-call]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: LogitFunction, source: LogitSource, tensors: Tensors, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        results, others = without_autocast(function.forward)(source, tensors)
        ctx.function = function
        save_source(ctx, source, others)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *gradients_of_inputs(ctx, ctx.function.gradients, 3, *gradients)


def save_source(ctx: Any, source: LogitSource, others: Tensors) -> None:
    """Save for backward what :func:`gradients_of_inputs` hands on, under names that an error can use."""
    of_source, ctx.restore = source.saved()
    ctx.other_names = list(others)
    if torch.is_inference_mode_enabled():
        return  # there is no backward
    tensors = {
        name: _alias(tensor) if tensor is not None and tensor.is_inference() else tensor
        for name, tensor in {**of_source, **others}.items()
    }
    ctx.save_for_backward(*tensors.values())
    ctx.versions = [(name, weakref.ref(t), t._version) for name, t in tensors.items() if t is not None]


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor in the memory of one that was made under inference mode, which autograd cannot save."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def gradients_of_inputs(
    ctx: Any, compute: Callable[..., Inputs], before: int, *gradients: Tensor | None
) -> Inputs:
    """Return the gradients of a source's inputs, which cannot be differentiated.

    Args:
        ctx: of :func:`save_source`.
        compute: as :meth:`LogitFunction.gradients`; it is called without grad mode.
        before: how many arguments of forward come before the inputs.
    """
    tensors = _saved(ctx)
    size = len(tensors) - len(ctx.other_names)
    source, others = ctx.restore(*tensors[:size]), dict(zip(ctx.other_names, tensors[size:], strict=True))
    if all(gradient is None for gradient in gradients):
        return (None,) * len(source.inputs)
    with torch.no_grad():
        needed = ctx.needs_input_grad[before:]
        results: Inputs = without_autocast(compute)(source, others, needed, *gradients)
    if not torch.is_grad_enabled():  # without create_graph=True
        return results
    sources = *source.inputs, *gradients
    return tuple(
        None if result is None else _DifferentiableOnce.apply(result, *sources)  # type: ignore[no-untyped-call]
        for result in results
    )


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors, or raise an error that names those that were overwritten."""
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


class _DifferentiableOnce(torch.autograd.Function):
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
            "a gradient that deferred logits or a vocabulary-parallel loss have computed cannot be "
            "differentiated twice: second derivatives need ordinary logits and torch.log_softmax"
        )


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, run with autocast switched off.

    Forward and backward, which may differ in what autocast says, must read the same numbers.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


# --- collectives


def all_gather(values: Tensor, group: dist.ProcessGroup | None, claim: StorageClaim | None = None) -> Tensor:
    """Return ``[tp, k, n]``, the ``[k, n]`` of every rank of the group.

    With a claim, check that all ranks can overwrite their logits.
    """
    return _gathered(values, values.new_empty(0), group, claim)[0]


def all_gather_statistics(
    values: Tensor, options: VocabParallelOptions, claim: StorageClaim | None = None
) -> tuple[Tensor, Tensor]:
    """Return statistics ``[tp, k, n]`` of every rank, and the ranks' divisors, float64 ``[tp]``.

    The logits among the statistics are those that a rank reads. Divided by the divisor, they are in the units
    of the logits that the caller passed, which all ranks have in common.
    """
    gathered, notes = _gathered(values, divisor_note(options, values), options.tp_group, claim)
    return gathered, divisors_of(notes)


def divisor_note(options: VocabParallelOptions, like: Tensor) -> Tensor:
    """Return this rank's divisor as two numbers in a dtype that may hold half of its digits."""
    rounded = options.divisor
    if like.dtype != torch.float64:
        [rounded] = struct.unpack("f", struct.pack("f", rounded))
    return torch.cat([like.new_full((1,), rounded), like.new_full((1,), options.divisor - rounded)])


def divisors_of(notes: Tensor) -> Tensor:
    """Return the divisors of the ranks, float64 ``[tp]``, from what they have noted, ``[tp, 2 or more]``."""
    return notes[:, :2].double().sum(1)


def _gathered(
    values: Tensor, notes: Tensor, group: dist.ProcessGroup | None, claim: StorageClaim | None
) -> tuple[Tensor, Tensor]:
    """Return ``[tp, k, n]`` of the ranks' values, and ``[tp, m]`` or more of their notes."""
    if claim is not None and claim.asked_for:
        notes = torch.cat([notes, claim.marker(values, 1)])
    if group is None or (size := dist.get_world_size(group)) == 1:
        gathered, notes = values[None], notes[None]
    else:
        sent = torch.cat([values.flatten(), notes]) if len(notes) else values
        received = sent.new_empty((size * len(sent), *sent.shape[1:]))
        dist.all_gather_into_tensor(received, sent, group=group)
        received = received.view(size, *sent.shape)
        gathered, notes = received, received[:, :0]
        if sent is not values:
            gathered, notes = torch.split(received, [values.numel(), len(sent) - values.numel()], 1)
            gathered = gathered.view(size, *values.shape)
    if claim is not None and claim.asked_for:
        claim.check(notes[:, -1])
    return gathered, notes


def sum_gradient(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the hidden states; their gradient is summed over the group.

    So does Megatron's ``copy_to_tensor_model_parallel_region``.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _SumGradient.apply(hidden, group)  # type: ignore[no-untyped-call]


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``[s, ..., h]`` of all ranks' ``[s / tp, ..., h]``; the gradient is summed and scattered.

    So does Megatron's ``gather_from_sequence_parallel_region``.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _GatherSequence.apply(hidden, group)  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        whole = hidden.new_empty((size * len(hidden), *hidden.shape[1:]))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        part = gradient.new_empty((len(gradient) // size, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None
