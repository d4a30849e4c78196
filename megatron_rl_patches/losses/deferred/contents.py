"""What deferred logits are: rows of an output layer's logits, converted and divided."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.slices import as_one_slice
from .options import StoredTiles
from .tiles import OutputLayerRows

Product = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class OutputLayer:
    """The logits ``[..., V / tp]`` of an output layer, which deferred logits are rows of.

    Attributes:
        rows: reads all of them in tiles.
        shape: their shape without the last dimension.
        product: computes ``[..., V / tp]`` of hidden states ``[..., h]``, by the output layer's own code.
        has_hooks: whether a hook waits for their gradient.
        has_losses: whether a loss has been computed whose gradient does not pass through them.
        numbers: the number of each row, int64 ``[T]``.
    """

    rows: OutputLayerRows
    shape: torch.Size
    product: Product
    has_hooks: bool = False
    has_losses: bool = False
    lock: Any = field(default_factory=threading.RLock)
    _logits: Tensor | None = None

    def __post_init__(self) -> None:
        self._versions = self._current_versions()
        self.numbers = torch.arange(self.shape.numel())

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the tensors that the logits come from."""
        return self._versions == self._current_versions()

    @property
    def is_materialized(self) -> bool:
        """Whether some code has read the logits."""
        return self._logits is not None

    def logits(self) -> Tensor:
        """Return all logits ``[T, V / tp]``, which nobody may write to; they stay for the next reader."""
        with self.lock:
            self._logits = self._computed() if self._logits is None else self._logits
            return self._logits

    def own_logits(self) -> Tensor:
        """Return all logits in memory of their own."""
        with self.lock, self.without_modes():
            return self._computed() if self._logits is None else self._logits.clone()

    def own(self, values: Tensor) -> Tensor:
        """Return values in memory of their own: copied, if they are in that of :meth:`logits`."""
        shared = None if self._logits is None else self._logits.untyped_storage().data_ptr()
        with self.without_modes():
            return values.clone() if values.untyped_storage().data_ptr() == shared else values

    def _computed(self) -> Tensor:
        if not self.is_unchanged:
            raise InvalidInputError(
                "the hidden states or the weight behind deferred logits were overwritten before "
                "the logits were used: compute what needs the logits first, for instance before the "
                "optimizer's step"
            )
        hidden = self.rows.hidden
        StoredTiles.free_last(hidden.device)
        with self.without_modes():
            logits = self.product(hidden.view(*self.shape, hidden.shape[1])).detach()
        return logits.reshape(-1, logits.shape[-1])

    @contextmanager
    def without_modes(self) -> Iterator[None]:
        """Compute what does not depend on the autograd and autocast modes of who reads the values."""
        is_inference = any(t.is_inference() for t in self.rows.inputs if t is not None)
        autocast = torch.autocast(self.rows.device.type, enabled=False)
        with torch.inference_mode(is_inference), torch.no_grad(), autocast:
            yield

    def _current_versions(self) -> list[tuple[int, int]]:
        tensors = self.rows.inputs
        return [(t._version, t.data_ptr()) for t in tensors if t is not None and not t.is_inference()]


class Division(NamedTuple):
    """A division of all logits by a number, which a tensor may hold.

    Attributes:
        in_graph: whether autograd has recorded it, in case that the logits have a graph.
    """

    number: float
    operand: Tensor | float
    in_graph: bool = True


@dataclass(eq=False)
class Contents:
    """What deferred logits are; all views of them share it.

    They are rows of an output layer's logits, converted and divided, until code writes to them or gets an
    ordinary tensor in their memory, since nothing counts what is written there. From then on they are what
    their memory holds. Copies are contents of their own, which no write to these can change.

    Attributes:
        layer: what they are rows of.
        rows: which rows, int64 ``[n]``.
        divisions: how they have been divided.
        memory: ``[n, V / tp]``, once other code has a tensor in it, or has written to it.
    """

    layer: OutputLayer
    rows: Tensor
    divisions: tuple[Division, ...] = ()
    memory: Tensor | None = None

    def values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``[...]`` of the layer's logits as the contents have them, ``[..., V / tp]``.

        The result may be in the memory of the layer's logits.
        """
        logits = self.layer.logits()
        index = as_one_slice(rows.flatten(), logits.device)
        with self.layer.without_modes():
            values = logits[index].view(*rows.shape, logits.shape[1]).to(dtype)
            for division in self.divisions:
                values = values / division.operand
            return values

    def own_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values ``[n, V / tp]`` in memory of their own."""
        layer = self.layer
        if self.rows is layer.numbers and not self.divisions and dtype == layer.rows.logit_dtype:
            return layer.own_logits()
        return layer.own(self.values(self.rows, dtype))
