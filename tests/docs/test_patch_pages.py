"""Every patch has a page with the same five sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch
from tests.docs.pages import ROOT

HEADINGS = ("What it changes", "What it does not change", "Upstream", "Is it active?", "Switch it off")

by_patch = pytest.mark.parametrize("patch", registry.patches().values(), ids=lambda patch: patch.name)


def _page(patch: Patch) -> Path:
    return ROOT / "docs" / "patches" / f"{patch.name}.md"


def _sections(patch: Patch) -> dict[str, str]:
    """Return the text of each section of the second level by its heading."""
    _, *parts = re.split(r"^## ", _page(patch).read_text("utf-8"), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


@by_patch
def test_has_the_headings_in_this_order(patch: Patch) -> None:
    sections = _sections(patch)
    assert [heading for heading in sections if heading in HEADINGS] == list(HEADINGS)
    assert all(sections[heading].strip() for heading in HEADINGS)
    assert _page(patch).read_text("utf-8").startswith(f"# `{patch.name}`\n")


@by_patch
def test_upstream_is_what_the_patch_says(patch: Patch) -> None:
    links = re.findall(
        r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/(\S+?)\)", _sections(patch)["Upstream"]
    )
    assert sorted(name for name, _ in links) == sorted(patch.upstream)
    for name, target in links:
        assert re.fullmatch(name.replace("#", "/(pull|issues)/"), target)


@by_patch
def test_every_function_that_is_wrapped_is_named(patch: Patch) -> None:
    text = _page(patch).read_text("utf-8")
    assert [s.target for s in patch.sites if s.qualname.split(".")[-1] not in text] == []


@by_patch
def test_tells_how_it_is_seen_and_switched_off(patch: Patch) -> None:
    sections = _sections(patch)
    assert "megatron_rl_patches.status()" in sections["Is it active?"]
    off = f"all,-{patch.name}" if not patch.explicit else "off unless it is named"
    assert off in sections["Switch it off"] and f'revert("{patch.name}")' in sections["Switch it off"]


def test_every_page_is_of_a_patch() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "patches").glob("*.md")}
    assert pages == {patch.name for patch in registry.patches().values()}


def test_the_site_and_the_readme_lead_to_every_page() -> None:
    for file in ("mkdocs.yml", "README.md"):
        text = (ROOT / file).read_text("utf-8")
        assert [name for name in registry.patches() if f"patches/{name}.md" not in text] == [], file
