"""How the losses over logits read them: options that are handed on as one object."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInputError


@dataclass(frozen=True)
class VocabParallelOptions:
    """How to read logits ``[T, V / tp]`` and where to put their gradient.

    Attributes:
        tp_group: see :func:`.vocab_parallel_log_probs`, as for all that is not explained here.
        ignore_index: target, or entry of ``indices``, that stands for no token.
        with_entropy: compute entropies beside log-probabilities.
        entropy_grad: entropies require grad.
        others_overwrite: other ranks may have ``inplace_backward`` though this one has not.
        divisor: what the logits that are read must be divided by to be those that the caller passed. Ranks
            may differ in it, so they exchange it.
    """

    tp_group: dist.ProcessGroup | None = None
    temperature: float = 1.0
    inplace_backward: bool = False
    block_bytes: int | None = None
    fused: bool | str = "auto"
    ignore_index: int = -100
    with_entropy: bool = False
    entropy_grad: bool = False
    others_overwrite: bool = False
    divisor: float = 1.0

    def __post_init__(self) -> None:
        temperature: Any = self.temperature  # numpy's numbers count
        if not (isinstance(temperature, numbers.Real) and in_float32(float(temperature) * self.divisor)):
            raise InvalidInputError(
                f"temperature is {self.temperature!r}, expected a positive number in the range of float32"
            )
        if self.block_bytes is not None:
            check_integer("block_bytes", self.block_bytes, 1, "a positive number or None")
        if self.fused not in (True, False, "auto"):
            raise InvalidInputError(f'fused is {self.fused!r}, expected True, False or "auto"')
        check_group(self.tp_group)

    @property
    def scale(self) -> float:
        """What the logits that are read are divided by."""
        return self.temperature * self.divisor

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp_group is None else dist.get_rank(self.tp_group)

    @property
    def tp_size(self) -> int:
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)


def in_float32(number: float) -> bool:
    """Return whether a positive number is in the range of float32."""
    return torch.finfo(torch.float32).tiny <= number <= torch.finfo(torch.float32).max


def check_integer(name: str, value: Any, lowest: int, expected: str, *, highest: int | None = None) -> int:
    """Return an integer, which may be one of numpy's, or refuse what is none or out of bounds."""
    is_integer = isinstance(value, numbers.Integral)
    if not is_integer or int(value) < lowest or (highest is not None and int(value) > highest):
        raise InvalidInputError(f"{name} is {value!r}, expected {expected}")
    return int(value)


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Refuse a tensor-parallel group that this rank is not in."""
    if tp_group is not None and dist.get_rank(tp_group) < 0:
        raise InvalidInputError(
            "this rank is not in tp_group: pass the group that holds its part of the vocabulary"
        )


DEFAULT = VocabParallelOptions()
