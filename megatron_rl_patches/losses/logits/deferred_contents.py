"""What views of deferred logits have in common: where they come from, rows, and the values once computed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .options import check_no_transform
from .tiles import OutputLayerRows


@dataclass(eq=False)
class Origin:
    """The logits ``[T, V / tp]`` of an output layer, which deferred logits are rows of.

    Attributes:
        all_rows: reads all of them.
        shape: that of the logits that were deferred, ``[..., V / tp]``.
        dtype: their dtype.
        layer: returns logits of that shape, by the output layer's own code.
        has_hooks: whether a hook waits for the gradient of the logits themselves.
        has_losses: whether a loss has been computed whose gradient does not pass through these logits.
    """

    all_rows: OutputLayerRows
    shape: torch.Size
    dtype: torch.dtype
    layer: Callable[[], Tensor]
    has_hooks: bool = False
    has_losses: bool = False

    def __post_init__(self) -> None:
        check_no_transform(*self.all_rows.inputs)
        self._versions = self._current_versions()

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the tensors that the logits come from."""
        return self._versions == self._current_versions()

    def check_unchanged(self) -> None:
        if not self.is_unchanged:
            raise InvalidInputError(
                "the hidden states or the weight behind deferred logits were overwritten before "
                "the logits were used: compute what needs the logits first, for instance before the "
                "optimizer's step"
            )

    def values(self) -> Tensor:
        """Compute the logits of :attr:`shape`."""
        self.check_unchanged()
        return self.layer()

    def _current_versions(self) -> list[tuple[int, int]]:
        tensors = self.all_rows.inputs
        return [(t._version, t.data_ptr()) for t in tensors if t is not None and not t.is_inference()]


class LazyValues:
    """Values ``[n, V / tp]`` that are computed once, when they are first needed."""

    def __init__(self, origin: Origin, compute: Callable[[], Tensor]) -> None:
        self._origin, self._compute = origin, compute
        self._lock = threading.Lock()
        self.values: Tensor | None = None
        #: Whether other code has a tensor in the memory of the values.
        self.is_shared = False
        #: Values that will be computed from these. They are computed before these are overwritten.
        self.copies: weakref.WeakSet[LazyValues] = weakref.WeakSet()

    def get(self) -> Tensor:
        with self._lock:
            if self.values is None:
                self.values = self._computed()
                del self._compute  # frees the tensors that it refers to
            return self.values

    def compute_copies(self) -> None:
        """Compute the copies that were taken of these values, before other code can overwrite these."""
        for copy in list(self.copies):
            copy.get()

    def _computed(self) -> Tensor:
        is_inference = any(t.is_inference() for t in self._origin.all_rows.inputs if t is not None)
        # The autograd and autocast modes of the first reader must not change what later readers get.
        with (
            torch.inference_mode(is_inference),
            torch.no_grad(),
            torch.autocast(self._origin.all_rows.device.type, enabled=False),
        ):
            values = self._compute().detach()
        return values.reshape(-1, values.shape[-1])


@dataclass(eq=False)
class Contents:
    """Some rows of logits, which all views of them share.

    Attributes:
        rows: int64 ``[n]``, rows of the origin's logits; ``None``: all of them, in order.
        divisor: what they have been divided by.
        lazy: their values, which an operation in place replaces or overwrites.
        has_graph: whether gradients flow through them.
        are_rows: whether the values are those of the rows, divided by the divisor, if autograd has counted no
            write since.
        num_divisions: how often they have been divided in place.
        counts_writes: whether autograd counts the writes to all views of them. It does not under inference
            mode.
    """

    origin: Origin
    rows: Tensor | None
    dtype: torch.dtype
    divisor: float
    lazy: LazyValues
    has_graph: bool = False
    are_rows: bool = True
    num_divisions: int = 0
    counts_writes: bool = True

    @property
    def values(self) -> Tensor | None:
        """The values, if some code has read them."""
        return self.lazy.values

    def __len__(self) -> int:
        return self.origin.shape[:-1].numel() if self.rows is None else len(self.rows)

    def divide_in_place(self, divide: Callable[[Tensor], Tensor], divisor: float) -> None:
        """Divide the values, or record the division; copies that were taken before stay undivided."""
        before, has_copies = self.lazy, len(self.lazy.copies) > 0
        if before.values is not None:
            before.compute_copies()
            divide(before.values)
        else:
            self.lazy = LazyValues(
                self.origin, lambda: divide(before.get().clone() if has_copies else before.get())
            )
        self.divisor *= divisor
        self.num_divisions += 1

    def share(self, *, writes: bool, counts: bool = True) -> None:
        """Let other code have a tensor in the memory of the values, after all copies of them are computed.

        Args:
            writes: the next operation writes to the values.
            counts: autograd counts writes to that tensor, see :attr:`.DeferredLogits.are_rows`.
        """
        self.lazy.compute_copies()
        self.lazy.is_shared = True
        counts = counts and self.counts_writes and not torch.is_inference_mode_enabled()
        self.are_rows = self.are_rows and counts and not writes
