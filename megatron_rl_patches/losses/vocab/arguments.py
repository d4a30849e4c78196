"""Options of the losses over logits, and checks, which run alike on every rank, before it sends anything."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from ...common.devices import on_device
from ...errors import InvalidInputError

#: Slices with step 1, none empty, each behind the end of the one before it.
Runs = tuple[slice, ...]
#: Distinct rows: a slice with step 1 or several, which are read without a copy, or row numbers (int64).
RowIndex = slice | Runs | Tensor
#: The same as callers pass them.
Rows = Tensor | slice | Sequence[slice] | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)
_SHORTEST_RUN = 16  # rows, on average: it takes longer to read shorter ones apart than to copy all


@dataclass(frozen=True)
class VocabParallelOptions:
    """How to read logits ``[T, V / tp]``; :func:`.vocab_parallel_log_probs` explains those that it takes."""

    tp_group: dist.ProcessGroup | None = None
    temperature: float = 1.0
    inplace_backward: bool = False
    block_bytes: int | None = None
    vocab_size: int | None = None
    fused: bool | str = "auto"
    ignore_index: int = -100
    with_entropy: bool = False  # beside log-probabilities
    entropy_grad: bool = False  # entropies require grad
    others_overwrite: bool = False  # other ranks may have inplace_backward though this one has not
    # Deferred logits are read undivided: the caller's are these over a number, which ranks may differ in.
    divisor: float = 1.0
    scale: float = field(init=False)  # of the logits that are read: temperature * divisor
    tp_rank: int = field(init=False)
    tp_size: int = field(init=False)

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and in_float32(float(self.temperature) * self.divisor)):
            raise InvalidInputError(
                f"temperature is {self.temperature!r}, expected a positive number in the range of float32"
            )
        if self.block_bytes is not None:
            check_integer("block_bytes", self.block_bytes, 1, "a positive number or None")
        if self.fused not in (True, False, "auto"):
            raise InvalidInputError(f'fused is {self.fused!r}, expected True, False or "auto"')
        check_integer("ignore_index", self.ignore_index, -(2**63), "an integer")
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, "the number of token ids, or None")
        check_group(group := self.tp_group)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        vars(self).update(temperature=float(self.temperature), tp_rank=rank, tp_size=size)
        vars(self)["scale"] = self.temperature * self.divisor

    def num_ids(self, width: int) -> int:
        """Return how many token ids there are; refuse more than logits of so many columns per rank have."""
        most = width * self.tp_size
        if self.vocab_size is None:
            return most
        expected = f"from 1 to {most}, the columns of the logits"
        return check_integer("vocab_size", self.vocab_size, 1, expected, highest=most)

    def divided(self, divisor: float) -> VocabParallelOptions:
        """Return the options for logits that have to be divided by a number, too."""
        if divisor == 1:
            return self
        if self.tp_size > 1:  # ranks may have other divisors
            return replace(self, divisor=divisor)
        return replace(self, temperature=self.temperature * divisor)


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


def integers(name: str, lengths: Any) -> tuple[int, ...]:
    """Convert lengths, which may be tensors, to a tuple of ``int``; refuse what are no integers."""
    values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise InvalidInputError(f"{name} are {lengths!r}, expected a list of integers")
    numbers = tuple(values)
    if set(map(type, numbers)) <= {int}:
        return numbers
    numbers = tuple(x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for x in numbers)
    if wrong := [number for number in numbers if not is_integer(number)]:
        raise InvalidInputError(f"{name} is {wrong[0]!r}, expected integers")
    return tuple(map(int, numbers))


def is_number(value: Any) -> bool:
    """Return whether ``float`` takes a value, such as a number of numpy or a tensor without dimensions.

    A bool or a string is no number. A tensor on a GPU is none either: the CPU would wait for its value.
    """
    dtype = str(getattr(value, "dtype", "float")).removeprefix("torch.")
    is_real = dtype.startswith(("float", "bfloat", "int", "uint")) and getattr(value, "ndim", 0) == 0
    if not is_real or isinstance(value, bool | str | bytes):
        return False
    if isinstance(value, Tensor):
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


def check_floats(**tensors: Any) -> None:
    """Refuse what is no tensor of a floating dtype."""
    for name, tensor in tensors.items():
        check_instance(name, tensor)
        if not tensor.dtype.is_floating_point:
            raise InvalidInputError(f"{name} is {tensor.dtype}, expected a floating dtype")


def check_layer(weight: Tensor, bias: Tensor | None) -> None:
    """Refuse what is no weight ``[V / tp, h]`` and bias ``[V / tp]`` of an output layer."""
    check_floats(weight=weight)
    if weight.dim() != 2:
        raise InvalidInputError(f"weight is {list(weight.shape)}, expected [V / tp, h]")
    if bias is not None:
        check_floats(bias=bias)
        shape = list(weight.shape[:1])
        if list(bias.shape) != shape or bias.dtype != weight.dtype:
            raise InvalidInputError(f"bias is {bias.dtype} {list(bias.shape)}, not {weight.dtype} {shape}")


def check_list(name: str, values: Any) -> list[Tensor]:
    """Return tensors as a list, those of a padded tensor ``[B, L]`` too; refuse what is none."""
    if not (isinstance(values, Sequence) or (isinstance(values, Tensor) and values.dim())):
        raise InvalidInputError(f"{name}: expected a list of tensors, not {_shown(values)}")
    tensors = list(values)
    for number, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.device != tensors[0].device:
            check_instance(f"{name}[{number}]", tensor)
            check_one_device(**{f"{name}[0]": tensors[0], f"{name}[{number}]": tensor})
    return tensors


def check_lengths(
    name: str, values: Any, lengths: Sequence[int], whose: str, *, most: int = 9, scalars: bool = False
) -> list[Tensor]:
    """Return tensors ``[length, ...]`` of ``most`` dimensions or fewer as a list; refuse other lengths.

    The error says ``whose`` lengths these are. With ``scalars`` a tensor may also be ``[]``.
    """
    tensors, fits = check_list(name, values), len(values) == len(lengths)
    for tensor, length in zip(tensors, lengths, strict=False):
        fits &= (tensor.shape[:1] == (length,) and tensor.dim() <= most) or (scalars and not tensor.dim())
    if not fits:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise InvalidInputError(f"{name} have the shapes {shapes}, but {list(lengths)} are those of {whose}")
    return tensors


def check_one_device(**tensors: Any) -> None:
    """Refuse tensors, or other objects with a device, on several devices."""
    devices = {tensor.device: name for name, tensor in tensors.items()}
    if len(devices) > 1:
        places = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise InvalidInputError(f"{places}: expected one device")


def check_instance(name: str, value: Any, kind: type = Tensor) -> None:
    """Refuse what is no object of a class, by default a tensor."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name}: expected a {kind.__name__}, not {_shown(value)}")


def _shown(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_group(tp_group: dist.ProcessGroup | None) -> None:
    """Refuse a tensor-parallel group that this rank is not in."""
    if tp_group is not None and dist.get_rank(tp_group) < 0:
        expected = "pass the group that holds its part of the vocabulary"
        raise InvalidInputError(f"this rank is not in tp_group: {expected}")


def check_no_transform(*tensors: Tensor | None) -> None:
    """Refuse tensors of a transform of torch.func, in which tensors have no storage."""
    if any(t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
        raise InvalidInputError(
            "logits are those of a transform of torch.func, which sees no storage: use torch.autograd.grad"
        )


# --- logits and what belongs to their rows


def check_logits(name: str, logits: Tensor, options: VocabParallelOptions) -> None:
    """Reject logits that are not ``[T, V / tp]`` in one of the dtypes, with a column for each token id."""
    check_instance(name, logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InvalidInputError(
            f"{name} are [T, vocab / tp], not {list(logits.shape)}: flatten the dimensions before the last"
        )
    if logits.dtype not in FLOATS:
        raise InvalidInputError(f"{name} are {logits.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    check_no_transform(logits)
    options.num_ids(logits.shape[1])


def check_ids(name: str, ids: Tensor, vocab_size: int, ignore_index: int, meaning: str) -> None:
    """Reject ids outside of the vocabulary, but for ``ignore_index``."""
    in_vocabulary = ((ids >= 0) & (ids < vocab_size)) | (ids == ignore_index)
    _require(in_vocabulary, f"{name}: token ids below {vocab_size}, or {ignore_index} {meaning}", ids)


def check_distinct(name: str, ids: Tensor) -> None:
    """Reject an id that a row ``[K]`` has twice; negative ones are none."""
    ordered = ids.sort(1).values
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    expected = f"{name}: each id at most once per token, since its probability would count twice"
    _require(~is_repeated, f"{expected}; -100 stands for no entry", ordered[:, 1:])


def valid_rows(rows: Rows, logits: Tensor) -> RowIndex:
    """Return the rows; reject numbers that are not of rows, or of one row twice."""
    size = logits.shape[0]
    rows = slice(None) if rows is None else rows
    if isinstance(rows, slice):
        start, stop, step = rows.indices(size)
        if not range(start, stop, step):
            return slice(0, 0)
        return slice(start, stop) if step == 1 else torch.arange(start, stop, step, device=logits.device)
    if isinstance(rows, Sequence):
        end = 0
        for part in rows:
            bounds = [part.start, part.stop] if isinstance(part, slice) and part.step in (None, 1) else []
            if not bounds or not all(map(is_integer, bounds)) or not end <= bounds[0] < bounds[1] <= size:
                raise InvalidInputError(
                    f"rows have {part!r}, expected slices of the {size} rows with start and stop, none of "
                    "them empty, each behind the one before it"
                )
            end = part.stop
        return tuple(rows) if len(rows) > 1 else rows[0] if rows else slice(0, 0)
    if not isinstance(rows, Tensor):
        raise InvalidInputError(f"rows are a {type(rows).__name__}, expected slices or a tensor of numbers")
    if rows.dim() != 1 or rows.dtype != torch.int64:
        mask = "; rows of a mask are mask.nonzero().squeeze(1)" if rows.dtype == torch.bool else ""
        wrong = f"rows are {rows.dtype} {list(rows.shape)}"
        raise InvalidInputError(f"{wrong}, expected a slice or row numbers, torch.int64 [n]{mask}")
    check_one_device(rows=rows, logits=logits)
    _require((rows >= 0) & (rows < size), f"rows: numbers from 0 to {size - 1}", rows)
    uses = rows.new_zeros(size).index_add_(0, rows, torch.ones_like(rows))
    expected = "rows: each at most once, since gradients of a row are written, not added up"
    _require(uses <= 1, expected, torch.arange(size, device=rows.device))
    return as_slices(rows)


def _require(ok: Tensor, expected: str, values: Tensor) -> None:
    if ok.device.type == "cuda":
        # Reading the values would make the CPU wait for the GPU. A kernel checks them and stops the device.
        torch._assert_async(ok.all(), f"expected {expected}")
    elif not ok.all():
        raise InvalidInputError(f"expected {expected}; found {values[~ok][:5].tolist()}")


def as_one_slice(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return consecutive rows as a slice, and others as they are, on the device."""
    index = as_slices(rows)
    return index if isinstance(index, slice) else on_device(rows, device)


def as_numbers(runs: Iterable[slice], device: torch.device | None = None) -> Tensor:
    """Return the numbers of the rows in slices, int64."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def as_slices(rows: Tensor) -> RowIndex:
    """Return slices for long runs of consecutive rows, which are then read without a copy.

    Rows on a GPU stay as they are: reading their values would make the CPU wait for the GPU.
    """
    if rows.device.type != "cpu":
        return rows
    if len(rows) == 0:
        return slice(0, 0)
    breaks = (rows.diff() != 1).nonzero().squeeze(1)
    starts = rows[torch.cat([breaks.new_zeros(1), breaks + 1])]
    stops = torch.cat([rows[breaks], rows[-1:]]) + 1
    if len(starts) > 1 + len(rows) // _SHORTEST_RUN or (stops[:-1] >= starts[1:]).any():
        return rows
    runs = tuple(map(slice, starts.tolist(), stops.tolist()))
    return runs[0] if len(runs) == 1 else runs


# --- scores that know their vocabulary


class LogProbs(list[Tensor]):
    """Log-probabilities of responses over a vocabulary of ``vocab_size`` token ids; a slice has it, too."""

    def __init__(self, values: Iterable[Tensor], vocab_size: int | None) -> None:
        super().__init__(values)
        self.vocab_size = vocab_size

    def __getitem__(self, index: Any) -> Any:
        values = super().__getitem__(index)
        return LogProbs(values, self.vocab_size) if isinstance(index, slice) else values

    def __reduce__(self) -> tuple[Any, ...]:
        return LogProbs, ([*self], self.vocab_size)


# ``tree_map`` and ``torch.load``, with its default ``weights_only=True``, take them as they take plain lists.
register_pytree_node(LogProbs, lambda x: ([*x], x.vocab_size), LogProbs)
torch.serialization.add_safe_globals([LogProbs])


def in_common(scored: Sequence[Any], **loss: float) -> dict[str, Any]:
    """Return temperature and vocab_size of scores, ``None`` if that of one is not known; refuse several.

    No known one may differ from that of the ``loss`` either.
    """
    shared: dict[str, Any] = {}
    for name in ("temperature", "vocab_size"):
        values = [getattr(one, name, None) for one in scored]
        known = [float(number) for number in (loss.get(name), *values) if number is not None]
        if any(not math.isclose(number, known[0], rel_tol=1e-7) for number in known):  # some are in float32
            whose = "scores and loss" if name in loss else "scores"
            numbers = " and ".join(f"{number:.9g}" for number in dict.fromkeys(known))
            raise InvalidInputError(
                f"{whose} differ in {name}, {numbers}: pass the same to the loss and to what scores for it"
            )
        shared[name] = None if None in values else values[0]
    return shared


DEFAULT = VocabParallelOptions()
