"""What differs between the tensors of a checkpoint and those of a model, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    shapes: dict[str, tuple[_Shape, _Shape]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise a ``CheckpointError`` that shows the first ten of each kind, unless there are none."""
        differing = [
            f"{name} is {list(stored)} in the checkpoint and {list(wanted)} in the model"
            for name, (stored, wanted) in self.shapes.items()
        ]
        kinds = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape": differing,
        }
        parts = [f"tensors {kind} ({len(items)}): {_first(items)}" for kind, items in kinds.items() if items]
        if parts:
            raise CheckpointError("the checkpoint is of another model; " + "; ".join(parts))


def _first(items: Sequence[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")
