"""Each change says one sentence, in a file in ``changelog.d``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

FRAGMENTS = sorted((ROOT / "changelog.d").glob("*.md"))


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_a_fragment_is_one_sentence(fragment) -> None:
    assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", fragment.name)
    text = fragment.read_text("utf-8")
    assert re.fullmatch(r"[^\n]{10,250}\.\n", text)
    assert not re.search(r"\w\. [A-Z`]", text.replace("e.g. ", "")), "more than one sentence"


def test_the_log_of_the_next_release_has_them() -> None:
    pytest.importorskip("towncrier")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"]
    log = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert "## 9.9.9 - 2" in log and "### Added" in log
    assert [path.name for path in FRAGMENTS if f"- {path.read_text('utf-8').strip()}" not in log] == []
