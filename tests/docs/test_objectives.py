"""The table of objectives has the numbers that the benchmark measured."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of the rows of one table."""
    lines = (DOCS / page).read_text("utf-8").partition(f"| {header} |")[2].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]


def test_bias_variance_and_memory() -> None:
    measured = [
        (f"{float(bias.rstrip('%')):.0f}%, {float(variance):g}", memory)
        for _, _, bias, variance, _, memory, _ in rows("benchmarks/objectives.md", "objective")
    ]
    table = [
        (bias, memory.partition(";")[0]) for _, _, bias, memory, _ in rows("distillation.md", "objective")
    ]
    assert len(table) == 7
    assert table == measured
