"""What views of deferred logits have in common: output layer, rows, and the values once they are computed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidInputError
from .head import HeadLogits, TileOptions


@dataclass(eq=False)
class Head:
    """The tensors that the logits are computed from, and the output layer's own function that does so.

    Attributes:
        has_hooks: whether a hook waits for the gradient of the logits themselves.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: TileOptions
    layer: Callable[[], Tensor]
    has_hooks: bool = False

    def __post_init__(self) -> None:
        self.token = object()  # identifies graphs that begin at this output layer
        self._versions = self._version()

    def all_rows(self) -> HeadLogits:
        hidden = self.hidden.flatten(0, -2)
        return HeadLogits(hidden, self.weight, self.bias, slice(0, len(hidden)), self.options)

    def check_unchanged(self) -> None:
        if self._version() != self._versions:
            raise InvalidInputError(
                "the hidden states or the weight of deferred logits were overwritten before the logits were "
                "used: compute what needs the logits first, for instance before the optimizer's step"
            )

    def _version(self) -> list[tuple[int, int]]:
        tensors = (self.hidden, self.weight, self.bias)
        return [(t._version, t.data_ptr()) for t in tensors if t is not None and not t.is_inference()]


class LazyValues:
    """Values ``[n, V / tp]`` that are computed once, when they are first needed."""

    def __init__(self, head: Head, compute: Callable[[], Tensor]) -> None:
        self._head, self._compute = head, compute
        self._lock = threading.Lock()
        self.values: Tensor | None = None
        #: Values that will be computed from these. They are computed before these are overwritten.
        self.copies: weakref.WeakSet[LazyValues] = weakref.WeakSet()

    def get(self) -> Tensor:
        with self._lock:
            if self.values is None:
                self.values = self._computed()
                del self._compute  # frees the tensors that it refers to
            return self.values

    def _computed(self) -> Tensor:
        hidden = self._head.hidden
        self._head.check_unchanged()
        # The autograd and autocast modes of the first reader must not change what later readers get.
        with (
            torch.inference_mode(hidden.is_inference()),
            torch.no_grad(),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            values = self._compute().detach()
        return values.reshape(-1, values.shape[-1])


class Contents:
    """Some rows of logits, which all views of them share.

    Attributes:
        rows: int64 ``[n]``, rows of the head's logits ``[T, V / tp]``; ``None``: all of them, in order.
        divisor: what they have been divided by.
        lazy: their values, which an operation in place replaces or overwrites.
        has_graph: whether gradients flow through them.
    """

    def __init__(
        self,
        head: Head,
        rows: Tensor | None,
        dtype: torch.dtype,
        divisor: float,
        compute: Callable[[], Tensor],
    ) -> None:
        self.head, self.rows, self.dtype, self.divisor = head, rows, dtype, divisor
        self.lazy = LazyValues(head, compute)
        self.has_graph = False

    @property
    def values(self) -> Tensor | None:
        """The values, if some code has read them."""
        return self.lazy.values

    def __len__(self) -> int:
        return self.head.hidden.shape[:-1].numel() if self.rows is None else len(self.rows)

    def divide_in_place(self, divide: Callable[[Tensor], Tensor], divisor: float) -> None:
        """Record a division in place. Copies that were taken before it keep the undivided values."""
        before, has_copies = self.lazy, len(self.lazy.copies) > 0
        self.lazy = LazyValues(
            self.head, lambda: divide(before.get().clone() if has_copies else before.get())
        )
        self.divisor *= divisor

    def before_write(self) -> None:
        """Compute the copies that were taken of these values before they are overwritten."""
        for lazy in list(self.lazy.copies):
            lazy.get()


#: Nodes of a graph that select rows, convert or divide.
_KNOWN_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Cat", "Clone", "Div", "Index", "IndexSelect", "Permute", "Select", "Slice"),
        *("Split", "SplitWithSizes", "Squeeze", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze"),
        "View",
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "torch::autograd::CopySlices"}


def comes_from(node: Any, head: Head) -> bool:
    """Return whether the graph from the output layer to ``node`` holds only operations that are followed."""
    nodes, seen = [node], set()
    while nodes:
        node = nodes.pop()
        if node in seen or getattr(node, "token", None) is head.token:
            continue
        seen.add(node)
        if node is None or node.name() not in _KNOWN_NODES:
            return False
        nodes += [source for source, _ in node.next_functions if source is not None]
    return True
