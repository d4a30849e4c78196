"""The site builds without a warning, and its API pages name everything public."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import docstrings
from tests.docs.pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built(site: Path) -> None:
    built = {str(path.parent.relative_to(site)) for path in site.rglob("index.html")}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix("")
        assert str(name.parent if name.stem == "index" else name) in built


@pytest.mark.slow
def test_the_api_has_every_public_name(site: Path) -> None:
    documented = set()
    for page in (site / "api").rglob("*.html"):
        documented.update(re.findall(r'id="megatron_rl_patches\.([\w.]+)"', page.read_text("utf-8")))
    names = {anchor.split(".")[-1] for anchor in documented}
    assert docstrings.public_names() - names == set()


@pytest.mark.slow
def test_nothing_is_fetched_at_build_time(site: Path) -> None:
    page = (site / "index.html").read_text("utf-8")
    assert "fonts.googleapis.com" not in page
    assert '<pre class="mermaid">' in (site / "reentry" / "index.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["losses", "distillation"])
def test_equations_are_marked_for_mathjax(site: Path, page: str) -> None:
    text = (site / page / "index.html").read_text("utf-8")
    assert "javascripts/mathjax.js" in text
    assert '<div class="arithmatex">\\[' in text
    prose = re.sub(r"<(pre|script|code)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert "$" not in prose


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"^\s+- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    existing = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(existing)
