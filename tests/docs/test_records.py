"""Pages show what was measured, judged and drawn: the first page, objectives, quickstarts, README, pictures.

README names the patches that fit a framework by the verdicts on record.
"""

from __future__ import annotations

import html
import json
import re
import runpy
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from megatron_rl_patches import available
from megatron_rl_patches.engine.settings import VARIABLE
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


def _cell(page: str, section: str, row: str | tuple[str, ...], column: str) -> str:
    """Return the cell of the row that begins with these cells, in the first table of the section."""
    table, names = _table(page, f"## {section}\n"), (row,) if isinstance(row, str) else row
    [cell] = [cells[column] for cells in table if tuple(cells.values())[: len(names)] == names]
    return cell


def test_the_numbers_are_those_that_were_measured() -> None:
    """Of each card: the large number, the number that it replaces, and the text below it."""
    cards = re.search(
        r'<div class="grid cards" markdown>(.*?)</div>', (DOCS / "index.md").read_text("utf-8"), re.DOTALL
    )
    line = r"- \*\*([\d.]+) \S+\*\*[^\n]* instead of ([\d.]+) [^\n]+\n"
    calls, teacher, loss, head = re.findall(rf"{line}(.*?)(?=\n- |\Z)", cards[1] if cards else "", re.DOTALL)

    demo = (DOCS / "demo.md").read_text("utf-8")
    (rollouts,) = re.findall(r"^(\d+) rollouts, one train\(\) call each", demo, re.MULTILINE)
    assert calls[:2] == (rollouts, "1")

    counted = ("memory.md", "The case of a 27B teacher")
    column = "counted: Megatron-LM's `--bf16`"
    assert teacher[:2] == (_cell(*counted, "inference-only", column), _cell(*counted, "total", column))
    assert "(memory.md)" in teacher[2] and "(benchmarks/inference_memory.md)" in teacher[2]
    (claimed,) = re.findall(r"within ([\d.]+)%", " ".join(teacher[2].split()))
    record = json.loads((DOCS / "benchmarks" / "inference_memory.json").read_text("utf-8"))
    uses = ("training: difference", "inference-only: difference")
    differences = [abs(float(row[use].rstrip("%"))) for row in record["memory"] for use in uses]
    assert differences and max(differences) <= float(claimed)

    setup = ("TP 1, float32 [2048, 32768]", "+ entropy with gradient")
    section = "Log-probabilities and entropy, with both gradients"
    ours, in_place, stock = (
        _cell("benchmarks/loss.md", section, (*setup, name), "memory")
        for name in ("ours, compiled", "ours, compiled, in place", "slime")
    )
    assert loss[:2] == (ours, stock) and f"In place: {in_place} ×" in loss[2]
    assert "(benchmarks/loss.md)" in loss[2]

    setup = ("[8192, 256] × 65536, float32", "log-probs and entropy")
    heads = ("deferred", "logits materialized, `lean-loss`")
    memory = [float(_cell("benchmarks/head.md", "Memory", (*setup, name), "memory")) for name in heads]
    assert head[:2] == tuple(f"{one + 1e-9:.2f}" for one in memory)
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
    shown = [block.code for block in pages.blocks(page=page) if "megatron-rl-patches demo" in block.code]
    recorded = (DOCS / "demo.md").read_text("utf-8")
    rollouts = re.findall("^rollout.*$", "".join(shown), re.MULTILINE)
    assert len(rollouts) > 2 and all(f"\n{line}" in recorded for line in rollouts)
    error = " ".join("".join(shown).split()).partition("AssertionError: ")[2].partition(" be None")[0]
    assert error and error in " ".join(recorded.split())


VERDICTS = json.loads((ROOT / "tests" / "frameworks" / "verdicts.json").read_text("utf-8"))
RECORDED = {entry["source"]: entry["verdicts"] for entry in VERDICTS}
QUICKSTARTS = sorted((DOCS / "quickstart").glob("*.md"))


def _that_fit(source: str, core: str = "") -> Counter[tuple[str, str]]:
    """Return how many sites fit by patch and framework, as ``tests/frameworks`` recorded it."""
    verdicts = {**RECORDED.get(core, {}), **RECORDED.get(source, {})}
    return Counter(
        (patch, framework)
        for framework, of_patches in verdicts.items()
        for patch, sites in of_patches.items()
        for verdict in sites.values()
        if verdict == "fits"
    )


# The frameworks of a page, where it has several: the first is that of its log lines.
SLIME_LIKE = ("slime", "vime", "openclaw-rl", "miles")


@pytest.mark.parametrize("page", QUICKSTARTS, ids=lambda page: page.stem)
def test_a_quickstart_goes_from_the_safest_patch_to_the_default_set_to_all(page: Path) -> None:
    to_type, *_ = pages.blocks("bash", page=pages.name_of(page))
    assert f"{VARIABLE}=reentrant-train" in to_type.code or f'"{VARIABLE}": "reentrant-train"' in to_type.code
    assert len(to_type.code.splitlines()) <= 5
    text = page.read_text("utf-8")
    assert '--8<-- "install.md:command"' in text
    frameworks = SLIME_LIKE if page.stem == "slime" else (page.stem,)
    assert re.findall("^<!-- written: (.+) -->$", text, re.MULTILINE) == [
        *(f"log {frameworks[0]} {value}" for value in ("reentrant-train", "1", "all")),
        f"patches {' '.join(frameworks)}",
    ]


def _check_names(named: set[str], framework: str) -> None:
    """Compare with the patches that fit the framework's own code, in one of the sources on record."""
    fit: dict[str, set[str]] = {framework: set(), "megatron-core": set()}
    for name, source in product(fit, RECORDED):
        if source.split()[0].casefold() == name.casefold():
            fit[name] |= {patch for patch, _ in _that_fit(source)}
    assert fit[framework] and fit[framework] <= named, f"{framework}: patches that fit are not named"
    # Patches of megatron-core, on which each framework runs, may be named.
    assert named <= set.union(*fit.values()), f"{framework}: patches that do not fit are named"


def test_the_readme_names_the_patches_that_fit() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    section = readme.partition("\n## Frameworks\n")[2].partition("\n## ")[0]
    _, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    for frameworks, cell, *_ in (row for row in rows if row[0] != "your own loop"):
        named = set(re.findall(r"`([\w-]+)`", cell))
        for framework in frameworks.split(", "):
            _check_names(set(available()) - named if cell.startswith("all") else named, framework)


def _text(svg: str) -> str:
    """Return what can be read in the picture; how it is drawn depends on the version of rich."""
    shown = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return " ".join(html.unescape(" ".join(shown)).split())


def test_the_picture_of_doctor_is_what_it_prints_now() -> None:
    screenshots = runpy.run_path(str(DOCS / "screenshots.py"))
    drawn = (screenshots["IMAGES"] / "doctor.svg").read_text("utf-8")
    assert _text(drawn) == _text(screenshots["doctor"]()), "run: make screenshots"
    assert "unset MEGATRON_RL_PATCHES_STRIKT; export MEGATRON_RL_PATCHES_STRICT=1" in _text(drawn)
    assert str(ROOT) not in drawn and "url(http" not in drawn


def test_labels_can_be_read_on_a_phone_and_in_the_dark() -> None:
    for image in (DOCS / "images").glob("*.svg"):
        if image.stem in ("doctor", "logo", "favicon"):  # a terminal, which scrolls, and marks without text
            continue
        text = image.read_text("utf-8")
        assert "prefers-color-scheme: dark" in text, image
        width, *_ = re.findall(r'viewBox="0 0 ([\d.]+)', text)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\d+ )?([\d.]+)px", text)]
        assert sizes and min(sizes) * min(1, 368 / float(width)) >= 9, image  # pixels
