"""The numbers on the first page are those of the pages that measured them."""

from __future__ import annotations

import re

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


def _cell(page: str, section: str, row: str, column: str) -> str:
    """Return a cell of a table in a section of a page."""
    _, found, text = (DOCS / page).read_text("utf-8").partition(f"\n## {section}\n")
    assert found, f"{page} has no section {section}"
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    (cells,) = (cells for cells in rows if cells[0] == row)
    return cells[header.index(column)]


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


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_before_and_after_are_of_the_demo(page: str) -> None:
    shown = [
        block for block in pages.blocks() if block.page == page and "megatron-rl-patches demo" in block.code
    ]
    lines = [line for block in shown for line in block.code.splitlines()]
    recorded = (DOCS / "demo.md").read_text("utf-8")
    rollouts = [line for line in lines if line.startswith("rollout")]
    assert len(rollouts) > 2 and all(f"\n{line}" in recorded for line in rollouts)
    error = " ".join("\n".join(lines).split()).partition("AssertionError: ")[2].partition(" be None")[0]
    assert error and error in " ".join(recorded.split())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 110


def test_the_estimate_is_as_near_to_what_was_measured_as_the_page_says() -> None:
    _, teacher, *_ = _cards()
    (claimed,) = re.findall(r"within ([\d.]+)%", " ".join(teacher[2].split()))
    page = (DOCS / "benchmarks" / "inference_memory.md").read_text("utf-8").partition("\n## ")[0]
    differences = [abs(float(number)) for number in re.findall(r"\| (-?[\d.]+)% ", page)]
    assert differences
    assert max(differences) <= float(claimed)
