"""How the tiles of an output layer are computed, and how much memory they may take."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.arguments import check_integer

#: What ``keep_bytes="auto"`` may keep on each GPU, from the first backward on.
_automatic: dict[torch.device, int] = {}

KeepBytes = int | Literal["auto"]


class MainGradient(Protocol):
    """A buffer of its own for a weight's gradient, as Megatron's ``main_grad``."""

    def buffer(self) -> Tensor | None:
        """Return the tensor ``[V / tp, h]`` to add to, or ``None`` if the gradient goes to autograd."""

    def added(self) -> Tensor | None:
        """Return what autograd gets in place of the gradient, which has been added to the buffer."""


@dataclass(frozen=True)
class TileOptions:
    """How the tiles of an output layer are computed, and how much memory they may take.

    Attributes:
        tile_bytes: see :func:`.deferred_logits`.
        keep_bytes: see :func:`.deferred_logits`.
        main_gradient: where the weight's gradient goes; ``None``: to autograd.
        logit_dtype: see :func:`.deferred_logits`.
    """

    tile_bytes: int | None = None
    keep_bytes: KeepBytes = 0
    main_gradient: MainGradient | None = None
    logit_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.tile_bytes is not None:
            check_integer("tile_bytes", self.tile_bytes, 1, "a number of bytes")
        if self.keep_bytes != "auto":
            check_integer("keep_bytes", self.keep_bytes, 0, 'a number of bytes, or "auto"')
        if self.logit_dtype not in (None, torch.float32):
            raise InvalidInputError(f"logit_dtype is {self.logit_dtype!r}, expected torch.float32 or None")

    def bytes_to_keep(self, device: torch.device) -> int:
        """Return how many bytes of logits a forward may keep on the device."""
        if self.keep_bytes != "auto":
            return self.keep_bytes
        return _half_of_free_memory(device) if device in _automatic else 0

    def backward_ran(self, device: torch.device) -> None:
        """Let ``keep_bytes="auto"`` see how much memory is free on a GPU at its first backward."""
        if self.keep_bytes == "auto" and device.type == "cuda" and device not in _automatic:
            _half_of_free_memory(device)


class StoredTiles(dict[tuple[int, int], Tensor]):
    """Tiles that wait for a backward, by their first row and column; each in memory that may be larger.

    The last tile of a forward stays until its backward, or until other logits need memory for a tile.
    """

    _latest: ClassVar[dict[torch.device, tuple[weakref.ref[StoredTiles], tuple[int, int]]]] = {}

    def store_last(self, place: tuple[int, int], memory: Tensor) -> None:
        assert place not in self, "the last tile has memory of its own, so the buffer has another one"
        self.free_last(memory.device, unless_of=self)
        self[place] = memory
        self._latest[memory.device] = weakref.ref(self), place

    @classmethod
    def free_last(cls, device: torch.device, unless_of: StoredTiles | None = None) -> None:
        """Free the tile that the latest forward has left on the device."""
        if device in cls._latest:
            reference, place = cls._latest[device]
            if (latest := reference()) is not None and latest is not unless_of:
                latest.pop(place, None)


def _half_of_free_memory(device: torch.device) -> int:
    """Return half of the memory that is free on a GPU, but never more than at an earlier call.

    What torch's allocator has reserved and not allocated is free.
    """
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _automatic[device] = min(free // 2, _automatic.get(device, free))
    return _automatic[device]
