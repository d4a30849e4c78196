"""A memory estimate as a table, a sentence, and a plot of stacked bars."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .estimate import Memory, MemoryEstimate, StageEstimate

_DECIMAL, _BINARY = ("B", "kB", "MB", "GB"), ("B", "KiB", "MiB", "GiB")
_PARTS = {field.name: field.name.replace("_", " ") for field in fields(Memory)}


def rows(estimate: MemoryEstimate) -> list[tuple[str, ...]]:
    """Return a header, and a row for each pipeline stage, scenario and place: all parts and their sum.

    Units are decimal (1 GB is 10⁹ bytes); the sum is also given in the binary one (1 GiB is 2³⁰ bytes).
    """
    memories = list(_memories(estimate.stages))
    power = _power(max(memory.total for *_, memory in memories))
    columns = [f"{name} ({_DECIMAL[power]})" for name in (*_PARTS.values(), "total")]
    table: list[tuple[str, ...]] = [("stage", "use", "where", *columns, f"total ({_BINARY[power]})")]
    for stage, use, where, memory in memories:
        sizes = [size / 1000**power for size in (*asdict(memory).values(), memory.total)]
        sizes.append(memory.total / 1024**power)
        table.append((str(stage), use, where, *(f"{size:.2f}" if size else "-" for size in sizes)))
    return table


def summary(estimate: MemoryEstimate) -> str:
    """Return one sentence on the stage that takes most."""
    stage = estimate.worst
    training, inference = stage.training.device.total, stage.inference_only.device.total
    return (
        f"stage {stage.stage} takes most: {size(training)} per device for training, "
        f"{size(inference)} inference-only ({1 - inference / training:.1%} less); activations not counted"
    )


def size(number: int) -> str:
    """Return bytes in both kinds of units: ``54.02 GB (50.31 GiB)``."""
    power = _power(number)
    return f"{number / 1000**power:.2f} {_DECIMAL[power]} ({number / 1024**power:.2f} {_BINARY[power]})"


def plot(estimate: MemoryEstimate, path: Path) -> None:
    """Draw stacked bars for the stage that takes most; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    draw(estimate, axes)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(estimate: MemoryEstimate, axes: Any) -> None:
    """Draw the same on axes of matplotlib."""
    memories = list(_memories([estimate.worst]))
    power = _power(max(memory.total for *_, memory in memories))
    labels = [f"{use}\n{where}".replace(" + ", "\n+ ") for _, use, where, _ in memories]
    bottoms = [0.0] * len(memories)
    for part, name in _PARTS.items():
        heights = [getattr(memory, part) / 1000**power for *_, memory in memories]
        if any(heights):
            axes.bar(labels, heights, bottom=bottoms, label=name, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axes.annotate(f"{total:.1f}", (index, total), ha="center", va="bottom")
    axes.set(ylabel=f"{_DECIMAL[power]} per rank")
    axes.margins(y=0.1)
    axes.legend(loc="upper right")


def _memories(stages: Sequence[StageEstimate]) -> Iterator[tuple[int, str, str, Memory]]:
    """Yield stage, scenario, place and memory; host memory only if there is any."""
    for stage in stages:
        for scenario, memory in stage.scenarios.items():
            yield stage.stage, scenario, "device", memory.device
            if memory.host.total:
                yield stage.stage, scenario, "host", memory.host


def _power(number: int) -> int:
    """Return the power of 1000 that leaves up to four digits before the point."""
    return min(int(math.log(max(number, 1), 1000)), len(_DECIMAL) - 1)
