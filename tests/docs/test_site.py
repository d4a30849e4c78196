"""The site builds without a warning, and has every public name and what its readers' browsers draw."""

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
pytestmark = pytest.mark.slow


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


def test_the_api_has_every_public_name(site: Path) -> None:
    documented = set()
    for page in (site / "api").rglob("*.html"):
        documented.update(re.findall(r'id="megatron_rl_patches\.([\w.]+)"', page.read_text("utf-8")))
    names = {anchor.split(".")[-1] for anchor in documented}
    assert docstrings.public_names().keys() - names == set()


def test_diagrams_and_equations_are_marked_and_no_font_is_fetched(site: Path) -> None:
    assert "fonts.googleapis.com" not in (site / "index.html").read_text("utf-8")
    assert '<pre class="mermaid">' in (site / "reentry" / "index.html").read_text("utf-8")
    for page in ("losses", "distillation"):
        text = (site / page / "index.html").read_text("utf-8")
        assert "javascripts/mathjax.js" in text
        assert '<div class="arithmatex">\\[' in text
        prose = re.sub(r"<(pre|script|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "$" not in prose
