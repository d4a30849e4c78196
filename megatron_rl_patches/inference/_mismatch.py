"""What differs between the tensors of a checkpoint and those of a model, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError

_SHOWN = 10
_Shape = tuple[int, ...]


@dataclass
class Mismatch:
    """Names are those of the checkpoint.

    Attributes:
        missing: the model has them, the checkpoint has not.
        unexpected: the checkpoint has them, the model has not.
        shapes: name -> (shape in the checkpoint, shape in the model).
        dtypes: name -> (dtype in the checkpoint, dtype in the model).
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    shapes: dict[str, tuple[_Shape, _Shape]] = field(default_factory=dict)
    dtypes: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise a ``CheckpointError`` that shows the first ten of each kind, unless there are none."""
        shapes, dtypes = (
            [
                f"{name} is {stored} in the checkpoint and {wanted} in the model"
                for name, (stored, wanted) in differing.items()
            ]
            for differing in (
                {name: tuple(map(list, pair)) for name, pair in self.shapes.items()},
                self.dtypes,
            )
        )
        kinds = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape": shapes,
            "of another dtype": dtypes,
        }
        parts = [f"tensors {kind} ({len(items)}): {_first(items)}" for kind, items in kinds.items() if items]
        if parts:
            raise CheckpointError("the checkpoint is of another model; " + "; ".join(parts))


def _first(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")
