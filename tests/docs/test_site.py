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


def _build(folder: Path, **variables: str) -> tuple[int, str]:
    """Build the site, and refuse warnings."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"} | variables
    process = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=200)
    return process.returncode, process.stdout + process.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    code, printed = _build(folder)
    assert code == 0, printed
    return folder


def test_the_api_has_every_public_name_by_its_public_path(site: Path) -> None:
    texts = "".join(page.read_text("utf-8") for page in (site / "api").rglob("*.html"))
    headings = set(re.findall(r'<h\d id="(megatron_rl_patches\.[\w.]+)"', texts))
    # A module has the name of its function.
    headings = {heading.replace("cpu_backend.cpu_backend", "cpu_backend") for heading in headings}
    public = {f"{package.__name__}.{name}" for package in pages.packages() for name in package.__all__}
    assert public - headings == set()


def test_no_page_loads_something_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|link rel="stylesheet")\b[^>]*\b(?:src|href)="https?://""")
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        assert not loads.search(text := page.read_text("utf-8")), page
        assert not re.search(r"\bOWNER\b|\+REPOSITORY", text), page


def test_a_site_without_an_address_is_not_published(tmp_path: Path) -> None:
    is_refused = "/OWNER/" in (ROOT / "pyproject.toml").read_text("utf-8")
    for variable in ("PUBLISH", "MIKE_DOCS_VERSION"):
        code, printed = _build(tmp_path, **{variable: "0.2"})
        assert (code != 0) == ("cannot be published" in printed) == is_refused


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
    output = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True).stdout
    assert dict(zip(FIRST, output.split(), strict=True)) == FIRST
