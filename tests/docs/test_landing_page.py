"""Numbers on the first page and in the table of objectives are those of the pages that measured them."""

from __future__ import annotations

import re

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


def _table(page: str, before: str) -> list[dict[str, str]]:
    """Return the rows of the first table after a line of a page, by the names of the columns."""
    lines = (DOCS / page).read_text("utf-8").partition(f"\n{before}")[2].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[start:]]
    header, _, *rows = cells[: cells.index([""])]
    return [dict(zip(header, row, strict=True)) for row in rows]


def _cell(page: str, section: str, row: str, column: str) -> str:
    table = _table(page, f"## {section}\n")
    [cell] = [cells[column] for cells in table if next(iter(cells.values())) == row]
    return cell


def _cards() -> list[tuple[str, str, str]]:
    """Return the large number of each card, the number that it replaces, and the text below it."""
    text = (DOCS / "index.md").read_text("utf-8")
    cards = re.search(r'<div class="grid cards" markdown>(.*?)</div>', text, re.DOTALL)
    assert cards
    line = r"- \*\*([\d.]+) \S+\*\*[^\n]* instead of ([\d.]+) [^\n]+\n"
    return re.findall(rf"{line}(.*?)(?=\n- |\Z)", cards[1], re.DOTALL)


def test_the_numbers_are_those_that_were_measured() -> None:
    calls, teacher, loss, head = _cards()

    demo = (DOCS / "demo.md").read_text("utf-8")
    (rollouts,) = re.findall(r"^(\d+) rollouts, one train\(\) call each", demo, re.MULTILINE)
    assert calls[:2] == (rollouts, "1")

    counted = ("memory.md", "The case of a 27B teacher")
    column = "counted: Megatron-LM's `--bf16`"
    assert teacher[:2] == (_cell(*counted, "inference-only", column), _cell(*counted, "total", column))
    assert "(memory.md)" in teacher[2] and "(benchmarks/inference_memory.md)" in teacher[2]
    (claimed,) = re.findall(r"within ([\d.]+)%", " ".join(teacher[2].split()))
    page = (DOCS / "benchmarks" / "inference_memory.md").read_text("utf-8").partition("\n## ")[0]
    differences = [abs(float(number)) for number in re.findall(r"\| (-?[\d.]+)% ", page)]
    assert differences and max(differences) <= float(claimed)

    measured = ("benchmarks/loss.md", "TP 1, float32 [2048, 32768]")
    for column in ("memory: ent", "memory: grad"):
        assert loss[:2] == (_cell(*measured, "ours, compiled", column), _cell(*measured, "slime", column))
        assert f"In place: {_cell(*measured, 'ours, compiled, in place', column)} ×" in loss[2]
    assert "(benchmarks/loss.md)" in loss[2]

    measured = ("benchmarks/head.md", "Memory")
    setup = "[8192, 256] × 65536, float32"
    columns = ("deferred", "logits materialized, `lean-loss`")
    assert head[:2] == tuple(f"{float(_cell(*measured, setup, column)) + 1e-9:.2f}" for column in columns)
    assert "8,192 tokens and 65,536 ids" in head[2] and "(benchmarks/head.md)" in head[2]


def test_bias_variance_and_memory_of_objectives() -> None:
    measured = [
        (f"{float(row['bias'].rstrip('%')):.0f}%, {float(row['variance']):g}", row["memory"])
        for row in _table("benchmarks/objectives.md", "<!-- measured: objectives -->")
    ]
    table = [
        (row["bias, variance"], row["memory; payload"].partition(";")[0])
        for row in _table("distillation.md", "## Objectives in use")
    ]
    assert len(table) == 7 and table == measured


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_before_and_after_are_of_the_demo(page: str) -> None:
    shown = [block.code for block in pages.of_page(page) if "megatron-rl-patches demo" in block.code]
    recorded = (DOCS / "demo.md").read_text("utf-8")
    rollouts = re.findall("^rollout.*$", "".join(shown), re.MULTILINE)
    assert len(rollouts) > 2 and all(f"\n{line}" in recorded for line in rollouts)
    error = " ".join("".join(shown).split()).partition("AssertionError: ")[2].partition(" be None")[0]
    assert error and error in " ".join(recorded.split())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110
