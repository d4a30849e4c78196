"""Each quickstart begins with what to type, and the line that rank 0 logs then.

Quickstarts and README name the patches that fit a framework by the verdicts on record.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from megatron_rl_patches import __version__, available
from megatron_rl_patches.engine.settings import VARIABLE
from tests.docs import pages
from tests.docs.pages import ROOT

# The sources whose verdicts the line of a page counts; all run on this megatron-core.
SOURCES = {
    "slime": "slime v0.3.1",
    "vime": "vime main",
    "openclaw-rl": "OpenClaw-RL main",
    "miles": "miles main",
    "verl": "verl main",
    "nemo-rl": "NeMo-RL main",
    "megatron-bridge": "Megatron-Bridge main",
    "megatron-lm": "Megatron-LM main",
    "own-loop": "",
}
CORE = "megatron-core 0.16.1"
EXPLICIT = ("distillation",)

VERDICTS = json.loads((ROOT / "tests" / "frameworks" / "verdicts.json").read_text("utf-8"))
RECORDED = {entry["source"]: entry["verdicts"] for entry in VERDICTS}


def _readme_rows() -> dict[str, str]:
    """Return which patches the README names for which frameworks, cell by cell."""
    section = (ROOT / "README.md").read_text("utf-8").partition("\n## Frameworks\n")[2].partition("\n## ")[0]
    _, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in rows if row[0] != "your own loop"}


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


PAGES = sorted(path.stem for path in (ROOT / "docs" / "quickstart").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_five_lines_and_what_you_will_see(page: str) -> None:
    to_type, to_see, *_ = pages.of_page(f"docs/quickstart/{page}.md")
    assert to_type.language == "bash" and VARIABLE in to_type.code
    assert len(to_type.code.splitlines()) <= 5
    install = "pip install --no-deps ." if page == "openclaw-rl" else '--8<-- "install.md:command"'
    assert install in (ROOT / "docs" / "quickstart" / f"{page}.md").read_text("utf-8")

    assert to_see.language == "text"
    # One line, which is broken to fit on the page.
    name, _, line = " ".join(to_see.code.split()).partition(": ")
    assert name == f"megatron_rl_patches {__version__}"
    parts = dict(re.findall(r"([\w-]+) \((.*?)\)", line))
    assert list(parts) == [patch for patch in available() if patch not in EXPLICIT]
    fit = _that_fit(SOURCES[page], CORE)
    if page == "own-loop":
        fit["reentrant-train", "my_rl"] = 1
    counts = {
        (patch, framework): int(count)
        for patch, states in parts.items()
        for framework, count in re.findall(r"([\w.]+): (\d+) applied", states)
    }
    assert counts
    assert counts == {place: fit[place] for place in counts}
    waiting = {patch for patch, states in parts.items() if states == "waiting for a framework"}
    assert waiting.isdisjoint(patch for patch, _ in fit)


def _that_fit_any_release(framework: str) -> set[str]:
    """Return the patches that fit the framework's own code, in one of the sources on record."""
    name = framework.casefold()
    sources = [source for source in RECORDED if source.split()[0].casefold() == name]
    assert sources, framework
    return {patch for source in sources for patch, _ in _that_fit(source)}


def _check_names(named: set[str], framework: str) -> None:
    fit = _that_fit_any_release(framework)
    assert fit - named == set(), "patches that fit are not named"
    # Patches of megatron-core, on which each framework runs, may be named.
    assert named - fit - _that_fit_any_release("megatron-core") == set(), "patches that do not fit are named"


@pytest.mark.parametrize("frameworks", _readme_rows())
def test_the_readme_names_the_patches_that_fit(frameworks: str) -> None:
    cell = _readme_rows()[frameworks]
    named = set(re.findall(r"`([\w-]+)`", cell))
    for framework in frameworks.split(", "):
        _check_names(set(available()) - named if cell.startswith("all") else named, framework)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "own-loop"])
def test_what_you_get_names_the_patches_that_fit(page: str) -> None:
    text = (ROOT / "docs" / "quickstart" / f"{page}.md").read_text("utf-8")
    section = text.partition("\n## What you get\n")[2].partition("\n## ")[0]
    _check_names(set(re.findall(r"\]\(\.\./patches/([\w-]+)\.md", section)), SOURCES[page].split()[0])
