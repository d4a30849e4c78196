"""The site builds without a warning, has every public name, and needs nothing from elsewhere."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site without a warning."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    options = {"env": {**os.environ, "NO_MKDOCS_2_WARNING": "1"}, "text": True, "capture_output": True}
    process = subprocess.run(command, cwd=ROOT, timeout=200, **options)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def test_the_api_has_every_public_name_by_its_public_path(site: Path) -> None:
    texts = "".join(page.read_text("utf-8") for page in (site / "api").rglob("*.html"))
    headings = set(re.findall(r'<h\d id="(megatron_rl_patches\.[\w.]+)"', texts))
    # A module has the name of its function.
    headings = {heading.replace("cpu_backend.cpu_backend", "cpu_backend") for heading in headings}
    public = {f"{package.__name__}.{name}" for package in pages.packages() for name in package.__all__}
    assert public - headings == set()


def test_no_page_loads_something_from_elsewhere(site: Path) -> None:
    first = (site / "index.html").read_text("utf-8")
    assert "/megatron_rl_patches" in first and "git+REPOSITORY" not in first  # the address of the project
    loads = re.compile(r"""<(?:script|img|link rel="stylesheet")\b[^>]*\b(?:src|href)="https?://""")
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        assert not loads.search(page.read_text("utf-8")), page


def test_what_markdown_does_not_have(site: Path) -> None:
    """Equations are MathML, and a group of sections becomes tabs."""
    for page in ("losses", "distillation"):
        text = (site / page / "index.html").read_text("utf-8")
        assert re.search('<(?:div|span) class="equation"><math', text) and "arithmatex" not in text
    page = (site / "quickstart" / "slime" / "index.html").read_text("utf-8")
    labels = re.findall(r'<label for="([\w-]+)">', page)
    assert labels == ["slime", "vime", "openclaw-rl", "miles"]
    assert page.count('<div class="tabbed-block">') == len(labels) and "&lt;!-- tabs" not in page


#: What people search for, and the page that must come first.
FIRST = {
    **dict.fromkeys(("OOM", "out of memory", "disable", "switch off", "wandb"), "faq/"),
    **dict.fromkeys(("Docker", "uninstall", "multi-node", "production", "rollback"), "production/"),
    **{name: f"quickstart/{name}/" for name in ("slime", "verl")},
}


def test_a_search_lists_the_page_that_helps_first(site: Path) -> None:
    """Node.js runs the search that the site runs in a browser."""
    node = shutil.which("node") or pytest.skip("no Node.js on this machine")
    command = [node, Path(__file__).with_name("search.js"), site, *FIRST]
    found = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True).stdout
    assert dict(zip(FIRST, found.split(), strict=True)) == FIRST
