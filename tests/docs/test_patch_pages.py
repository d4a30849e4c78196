"""Every patch has a page with the same five sections."""

from __future__ import annotations

import re

import pytest

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch
from tests.docs.pages import ROOT

HEADINGS = ("What it changes", "What it does not change", "Upstream", "Is it active?", "Switch it off")


@pytest.mark.parametrize("patch", registry.patches().values(), ids=lambda patch: patch.name)
def test_the_page_of_a_patch(patch: Patch) -> None:
    text = (ROOT / "docs" / "patches" / f"{patch.name}.md").read_text("utf-8")
    title, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title.startswith(f"# `{patch.name}`\n")
    sections = dict(part.split("\n", 1) for part in parts)
    assert [heading for heading in sections if heading in HEADINGS] == list(HEADINGS)
    assert all(sections[heading].strip() for heading in HEADINGS)
    assert [s.target for s in patch.sites if s.qualname.split(".")[-1] not in text] == []

    links = re.findall(r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/(\S+?)\)", sections["Upstream"])
    assert sorted(name for name, _ in links) == sorted(patch.upstream)
    for name, target in links:
        assert re.fullmatch(name.replace("#", "/(pull|issues)/"), target)

    assert "megatron_rl_patches.status()" in sections["Is it active?"]
    off = f"all,-{patch.name}" if not patch.explicit else "off unless it is named"
    assert off in sections["Switch it off"] and f'revert("{patch.name}")' in sections["Switch it off"]
    assert f"patches/{patch.name}.md" in (ROOT / "README.md").read_text("utf-8")


def test_every_page_is_of_a_patch() -> None:
    assert {path.stem for path in (ROOT / "docs" / "patches").glob("*.md")} == registry.patches().keys()
