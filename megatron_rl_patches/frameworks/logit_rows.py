"""A tensor that stands for rows of logits, so that code which only selects rows does not copy any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..losses.logits.row_selection import selects_rows, viewed_rows

aten = torch.ops.aten
R = TypeVar("R")


class LogitsNeeded(RuntimeError):
    """An operation looked at the values of :class:`LogitRows`, or changed them."""


@dataclass
class Logits:
    """The logits that some :class:`LogitRows` stand for.

    Attributes:
        values: ``[T, V / tp]``, one row per position.
        needed_by: the first operation that :class:`LogitRows` did not know; empty if there was none.
        written: whether that operation writes into its operands.
        scored: whether log-probabilities of some rows have been computed.
    """

    values: Tensor
    needed_by: str = ""
    written: bool = False
    scored: bool = False


class LogitRows(Tensor):
    """Rows of logits, divided by a number: shape, dtype and device of the real slice, but no storage.

    The object sees every operation below autograd. It follows what selects or reorders whole rows and what
    divides them by a number, and knows afterwards which rows it stands for. Every other operation raises
    :class:`LogitsNeeded` before anything has been computed or written, so that the caller can start again
    with the logits themselves: see :func:`call_with_rows`.

    Attributes:
        source: the logits.
        rows: int64 numbers of rows of ``source.values``, on the CPU, in the shape of this tensor without its
            last dimension.
        divisor: what the logits have been divided by.
    """

    source: Logits
    rows: Tensor
    divisor: float
    _made_with_grad: bool

    # A result is of this class only if __torch_dispatch__ returns one, not because an argument is.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, source: Logits, rows: Tensor, divisor: float = 1.0, *, leaf: bool = False) -> LogitRows:
        values = source.values
        # Autograd sets requires_grad of results; only the first tensor sets its own.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*rows.shape, values.shape[-1]),
            dtype=values.dtype,
            device=values.device,
            requires_grad=leaf and values.requires_grad,
        )
        self.source, self.rows, self.divisor = source, rows, divisor
        self._made_with_grad = torch.is_grad_enabled()
        return self

    @classmethod
    def of(cls, logits: Tensor) -> LogitRows:
        """Return an object that stands for all of the logits ``[..., V / tp]``."""
        rows = torch.arange(logits.shape[:-1].numel()).view(logits.shape[:-1])
        return cls(Logits(logits.reshape(-1, logits.shape[-1])), rows, leaf=True)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operands = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        if all(isinstance(operand, LogitRows) and operand.is_tracked for operand in operands):
            follow = _FOLLOWED.get(func)
            result = follow(func, *args, **(kwargs or {})) if follow is not None else None
            if result is not None:
                return result
        values = tree_leaves((args, kwargs))
        return next(value for value in values if isinstance(value, LogitRows)).need(
            str(func), func._schema.is_mutable
        )

    @property
    def is_tracked(self) -> bool:
        """Whether its gradient is that of the rows.

        The output of an autograd function, which runs without grad mode, may have another gradient.
        """
        return self._made_with_grad or not (self.requires_grad and torch.is_grad_enabled())

    def need(self, operation: str, writes: bool = False) -> NoReturn:
        """Note that an operation needs the values, and raise :class:`LogitsNeeded`."""
        self.source.needed_by = self.source.needed_by or operation
        self.source.written = self.source.written or writes
        raise LogitsNeeded(f"{operation} needs the values of the logits")

    # No gradient flows through this object, and a kernel would find no storage.

    def register_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.need("register_hook")

    def retain_grad(self) -> NoReturn:
        self.need("retain_grad")

    def data_ptr(self) -> NoReturn:
        self.need("data_ptr")


def call_with_rows(function: Callable[[Tensor], R], logits: Tensor, on_logits: Callable[[bool], R]) -> R:
    """Call a function with :class:`LogitRows`; if it needs the logits' values or fails, call ``on_logits``.

    The function has then run up to some operation, and has written nothing into the logits.

    Args:
        function: of a tensor in the shape of ``logits``.
        logits: ``[..., V / tp]``.
        on_logits: called instead, with whether the function may write into the logits.
    """
    rows = LogitRows.of(logits)
    try:
        result = function(rows)
        if not rows.source.needed_by:  # else the function has caught the error
            return result
    except LogitsNeeded:
        pass
    except Exception as error:
        # One rank alone may run into these: it must not start collectives that its peers have behind them.
        if rows.source.scored and isinstance(error, (torch.OutOfMemoryError, torch.distributed.DistError)):
            raise
        # A kernel found no storage, autograd forbade a write, or it is an error that on_logits raises too.
        rows.source.written = True
    return on_logits(rows.source.written)


# --- operators that are followed: the functions return None for arguments that they cannot follow


def _select(func: Any, tensor: LogitRows, *args: Any, **kwargs: Any) -> Any:
    rows = viewed_rows(func, tensor.rows, tensor.shape[-1], *args, **kwargs)
    if isinstance(rows, list):
        return [LogitRows(tensor.source, part, tensor.divisor) for part in rows]
    return None if rows is None else LogitRows(tensor.source, rows, tensor.divisor)


def _index(func: Any, tensor: LogitRows, indices: Sequence[Tensor | None]) -> LogitRows | None:
    if not selects_rows(indices, tensor.dim()) or any(
        index is not None and index.is_cuda for index in indices
    ):
        return None
    return LogitRows(tensor.source, func(tensor.rows, indices), tensor.divisor)


def _cat(func: Any, tensors: Sequence[LogitRows], dim: int = 0) -> LogitRows | None:
    first = tensors[0]
    alike = all(tensor.source is first.source and tensor.divisor == first.divisor for tensor in tensors)
    if not alike or dim % first.dim() == first.dim() - 1:
        return None
    return LogitRows(
        first.source, func([tensor.rows for tensor in tensors], dim % first.dim()), first.divisor
    )


def _divide(func: Any, tensor: LogitRows, divisor: Any) -> LogitRows | None:
    # A second division would round differently from one by the product.
    if not isinstance(divisor, (int, float)) or not 0 < divisor < float("inf") or tensor.divisor != 1.0:
        return None
    # The quotient of 16-bit logits is rounded to 16 bits.
    if divisor != 1 and tensor.dtype not in (torch.float32, torch.float64):
        return None
    return LogitRows(tensor.source, tensor.rows, float(divisor))


def _convert(func: Any, tensor: LogitRows, dtype: Any, *args: Any, **kwargs: Any) -> LogitRows | None:
    return tensor if dtype == tensor.dtype and not args and not kwargs else None


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.unsqueeze.default,
            aten.view.default,
            aten._unsafe_view.default,
            aten.slice.Tensor,
            aten.select.int,
            aten.split.Tensor,
            aten.split_with_sizes.default,
        ),
        _select,
    ),
    aten.index.Tensor: _index,
    aten.cat.default: _cat,
    aten.div.Tensor: _divide,
    aten.to.dtype: _convert,
}
