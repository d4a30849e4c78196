"""How the losses over logits read them: options that are handed on as one object."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
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
        divisor: the caller's logits are the stored ones divided by this number, a division that deferred
            logits have not carried out. It may differ between ranks, so they exchange it.
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
        if not (is_number(self.temperature) and in_float32(float(self.temperature) * self.divisor)):
            raise InvalidInputError(
                f"temperature is {self.temperature!r}, expected a positive number in the range of float32"
            )
        object.__setattr__(self, "temperature", float(self.temperature))
        if self.block_bytes is not None:
            check_integer("block_bytes", self.block_bytes, 1, "a positive number or None")
        if self.fused not in (True, False, "auto"):
            raise InvalidInputError(f'fused is {self.fused!r}, expected True, False or "auto"')
        check_integer("ignore_index", self.ignore_index, -(2**63), "an integer")
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
    if not is_integer(value) or int(value) < lowest or (highest is not None and int(value) > highest):
        raise InvalidInputError(f"{name} is {value!r}, expected {expected}")
    return int(value)


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, which may be one of numpy's; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether ``float`` takes a value, such as a number of numpy or a tensor without dimensions.

    A bool or a string is no number. A tensor on a GPU is none either: the CPU would wait for its value.
    """
    dtype = str(getattr(value, "dtype", "float")).removeprefix("torch.")
    is_real = dtype.startswith(("float", "bfloat", "int", "uint")) and getattr(value, "ndim", 0) == 0
    if not is_real or isinstance(value, bool | str | bytes):
        return False
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def check_positive(name: str, value: Any) -> float:
    """Return a positive, finite number, or refuse what is none."""
    if not (is_number(value) and 0 < value < math.inf):
        raise InvalidInputError(f"{name} is {value!r}, expected a positive, finite number")
    return float(value)


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse what is no tensor."""
    check_instance(name, tensor, torch.Tensor)


def check_floats(**tensors: Any) -> None:
    """Refuse what is no tensor of a floating dtype."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if not tensor.dtype.is_floating_point:
            raise InvalidInputError(f"{name} is {tensor.dtype}, expected a floating dtype")


def check_list(name: str, values: Any) -> list[torch.Tensor]:
    """Return tensors as a list, those of a padded tensor ``[B, L]`` too; refuse what is none."""
    is_list = isinstance(values, Sequence) or (isinstance(values, torch.Tensor) and values.dim() > 0)
    if not is_list:
        raise InvalidInputError(f"{name}: expected a list of tensors, not {_shown(values)}")
    tensors = list(values)
    for number, tensor in enumerate(tensors):
        check_tensor(f"{name}[{number}]", tensor)
    check_one_device(**{f"{name}[{number}]": tensor for number, tensor in enumerate(tensors)})
    return tensors


def check_one_device(**tensors: torch.Tensor) -> None:
    """Refuse tensors on several devices."""
    devices = {str(tensor.device): name for name, tensor in tensors.items()}
    if len(devices) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise InvalidInputError(f"{places}: expected one device")


def check_instance(name: str, value: Any, kind: type) -> None:
    """Refuse what is no object of a class."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}: expected a {kind.__name__}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Refuse a tensor-parallel group that this rank is not in."""
    if tp_group is not None and dist.get_rank(tp_group) < 0:
        raise InvalidInputError(
            "this rank is not in tp_group: pass the group that holds its part of the vocabulary"
        )


def check_no_transform(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors of a transform of torch.func, in which tensors have no storage."""
    if any(t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise InvalidInputError(
            "logits are those of a transform of torch.func, such as grad or vmap, which sees no storage: use "
            "torch.autograd.grad"
        )


DEFAULT = VocabParallelOptions()
