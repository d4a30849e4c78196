"""The differences between expected and existing weights, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import first

#: Megatron pads a vocabulary to a multiple of 128 × TP. With TP up to 16, two paddings of one vocabulary
#: differ by fewer rows than this.
MAX_PADDING = 128 * 16

_Shape = tuple[int, ...]


@dataclass
class Mismatch:
    """Names of weights that differ; of a pair, the source has the first and the model the second."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[_Shape, _Shape]] = field(default_factory=dict)
    dtypes: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def between(cls, source: Mapping[str, Any], model: Mapping[str, Any], *, dtypes: bool = True) -> Mismatch:
        """Compare tensors, or what has shape and dtype, by name, shape and, with ``dtypes``, dtype."""
        both = {name: (source[name], model[name]) for name in model if name in source}
        return cls(
            missing=[name for name in model if name not in source],
            unexpected=[name for name in source if name not in model],
            shapes={n: (tuple(a.shape), tuple(b.shape)) for n, (a, b) in both.items() if a.shape != b.shape},
            dtypes={n: (a.dtype, b.dtype) for n, (a, b) in both.items() if dtypes and a.dtype != b.dtype},
        )

    @classmethod
    def merged(cls, mismatches: Iterable[Mismatch]) -> Mismatch:
        """Return what differs on any rank, each name once."""
        result = cls()
        for one in mismatches:
            result.missing += [name for name in one.missing if name not in result.missing]
            result.unexpected += [name for name in one.unexpected if name not in result.unexpected]
            result.shapes |= one.shapes
            result.dtypes |= one.dtypes
        result.missing.sort()
        return result

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.shapes or self.dtypes)

    def describe(self, source: str) -> str:
        """Return the first ten of each kind; empty if nothing differs. ``source`` is a name for messages."""
        shape_lists = {name: tuple(map(list, pair)) for name, pair in self.shapes.items()}
        shapes, dtypes = (
            [
                f"{name} is {theirs} in {source} and {own} in the model"
                for name, (theirs, own) in pairs.items()
            ]
            for pairs in (shape_lists, self.dtypes)
        )
        kinds = {
            f"missing in {source}": self.missing,
            f"unexpected in {source}": self.unexpected,
            "of another shape": shapes,
            "of another dtype": dtypes,
        }
        return "; ".join(
            f"tensors {kind} ({len(items)}): {first(items)}" for kind, items in kinds.items() if items
        )
