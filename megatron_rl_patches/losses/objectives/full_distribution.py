"""Next-token distributions over the whole vocabulary, known by hidden states and output layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.arguments import check_integer
from ..logits.autograd import all_gather
from ..logits.deferred import DeferredLogits, deferred_logits
from ..logits.distributions import Distribution


@dataclass(frozen=True, eq=False)
class OutputHead:
    """This rank's part of a model's output layer.

    Attributes:
        weight: ``[V / tp, h]``.
        bias: ``[V / tp]``.
    """

    weight: Tensor
    bias: Tensor | None = None

    def copied_to(self, device: torch.device | str) -> OutputHead:
        """Return a copy on the device; what comes from a GPU goes to pinned host memory."""
        return self._mapped(lambda tensor: copied_to(tensor, device))

    def resharded(self, width: int, tp_group: dist.ProcessGroup) -> OutputHead:
        """Return a copy with ``width`` rows on each rank, as many as the student's output layer has there.

        It is for a teacher whose vocabulary is padded to another size than the student's: under tensor
        parallelism, a rank's rows stand for other ids in the two. Rows that the teacher lacks are zero, and
        rows that are too many are left out: say with ``num_ids`` which ids count.

        Args:
            width: ``V / tp`` of the student.
            tp_group: ranks that hold the other rows. Each rank has all of them while this runs, on the device
                of the weight; with NCCL that is a GPU.

        Raises:
            InvalidInputError: ``width`` is not a positive integer.
        """
        width = check_integer("width", width, 1, "the rows of the student's output layer on a rank")
        start = dist.get_rank(tp_group) * width

        def shard_of(tensor: Tensor) -> Tensor:
            mine = all_gather(tensor.contiguous(), tp_group).flatten(0, 1)[start : start + width]
            return torch.cat([mine, mine.new_zeros(width - len(mine), *mine.shape[1:])])

        return self._mapped(shard_of)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> OutputHead:
        return OutputHead(function(self.weight), None if self.bias is None else function(self.bias))

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def copied_to(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a copy without a graph on the device; what comes from a GPU goes to pinned host memory."""
    tensor = tensor.detach()
    if not tensor.is_cuda or torch.device(device).type != "cpu":
        return tensor.to(device, copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


@dataclass(frozen=True, eq=False)
class FullDistribution(Distribution):
    """Next-token distributions at ``n`` positions, exact: those of one teacher, or a mixture of several.

    It takes ``2 * h`` bytes per position and teacher in bfloat16, while logits take ``2 * V``. ::

        head = output_head(teacher)
        hidden = forward_hidden_states(teacher, microbatches)
        distributions = [FullDistribution.of(hidden_lh, head) for hidden_lh in hidden]

    Attributes:
        hidden: for each teacher what its output layer gets, ``[n, h]``, after the final norm.
        heads: the output layer of each teacher; samples of the same teacher share one object.
        weights: weight of each teacher in the mixture; they are divided by their sum.
    """

    hidden: tuple[Tensor, ...]
    heads: tuple[OutputHead, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.hidden) == len(self.heads) == len(self.weights) > 0:
            raise InvalidInputError(
                f"there are {len(self.hidden)} hidden states, {len(self.heads)} heads and "
                f"{len(self.weights)} weights; pass one each per teacher, and at least one teacher"
            )
        for hidden, head in zip(self.hidden, self.heads, strict=True):
            fits = hidden.dim() == 2 and hidden.shape[1:] == head.weight.shape[1:]
            if not fits or len(hidden) != len(self.hidden[0]):
                raise InvalidInputError(
                    f"hidden states are {list(hidden.shape)}, expected [{len(self.hidden[0])}, h] for an "
                    f"output layer {list(head.weight.shape)} of [V / tp, h]"
                )

    @staticmethod
    def of(hidden: Tensor, head: OutputHead) -> FullDistribution:
        """Return the distributions of one teacher from its hidden states ``[n, h]``."""
        return FullDistribution((hidden,), (head,), (1.0,))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.hidden

    def with_tensors(self, tensors: Sequence[Tensor]) -> FullDistribution:
        """Return distributions of the same teachers; the output layers stay where they are.

        A loss brings one tile's part of an output layer at a time to the device of the hidden states.
        """
        return FullDistribution(tuple(tensors), self.heads, self.weights)

    @property
    def source(self) -> tuple[object, ...]:
        return *map(id, self.heads), *self.weights

    @classmethod
    def mixture(cls, distributions: Sequence[FullDistribution], weights: Sequence[float]) -> FullDistribution:
        hidden: list[Tensor] = []
        heads: list[OutputHead] = []
        shares: list[float] = []
        for distribution, weight in zip(distributions, weights, strict=True):
            hidden += distribution.hidden
            heads += distribution.heads
            total = sum(distribution.weights)
            shares += [weight * share / total for share in distribution.weights]
        return FullDistribution(tuple(hidden), tuple(heads), tuple(shares))

    def logits(self) -> list[DeferredLogits]:
        """Return the deferred logits ``[n, V / tp]`` of each teacher."""
        pairs = zip(self.hidden, self.heads, strict=True)
        return [
            deferred_logits(hidden.to(head.weight.dtype), head.weight.detach(), bias=head.bias)
            for hidden, head in pairs
        ]
