"""The site builds without a warning, has every public name, and needs nothing from elsewhere.

A real browser, without a network, shows every page: on a desktop and on a phone, light and dark.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What is wrong with a page, in the words of a list.
OBJECTIONS = """[
    ...(document.documentElement.scrollWidth > window.innerWidth ? ["is wider than the window"] : []),
    ...[...document.querySelectorAll("article p")].map(p => p.textContent.trim())
        .filter(text => text.startsWith("|")).map(text => `shows a row of a table as text: ${text}`),
    ...[...document.images].filter(image => !image.naturalWidth).map(image => `lacks ${image.src}`)]"""

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


def test_equations_are_mathml_and_tables_without_a_header_have_no_empty_one(site: Path) -> None:
    for page in ("losses", "distillation"):
        text = (site / page / "index.html").read_text("utf-8")
        assert re.search('<(?:div|span) class="equation"><math', text) and "arithmatex" not in text
    text = (site / "losses" / "index.html").read_text("utf-8")
    assert "<table>\n<tbody>" in text and "<th></th>" not in text


def test_no_page_shows_tex_or_loads_something_from_elsewhere(site: Path) -> None:
    first = (site / "index.html").read_text("utf-8")
    assert "/megatron_rl_patches" in first and "git+REPOSITORY" not in first  # the address of the project
    loads = re.compile(r"""<(?:script|img|link rel="stylesheet")\b[^>]*\b(?:src|href)="https?://""")
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        text = page.read_text("utf-8")
        prose = re.sub(r"<(pre|script|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"\\[a-zA-Z(\[]|\$\$", prose) and not loads.search(text), page


def test_search_prefers_what_helps_and_every_page_can_be_edited(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
    boosts = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in entries}
    patch, quickstart = boosts["patches/lean-loss/"], boosts["quickstart/verl/"]
    assert boosts["faq/"] > patch == quickstart > boosts["losses/"] == 1 > boosts["benchmarks/loss/"]
    page = (site / "patches" / "lean-loss" / "index.html").read_text("utf-8")
    assert "/edit/main/docs/patches/lean-loss.md" in page and '/blob/main/LICENSE">Apache License' in page


def test_a_group_of_sections_becomes_tabs(site: Path) -> None:
    page = (site / "quickstart" / "slime" / "index.html").read_text("utf-8")
    labels = re.findall(r'<label for="([\w-]+)">', page)
    assert labels == ["slime", "vime", "openclaw-rl", "miles"]
    assert page.count('<div class="tabbed-block">') == len(labels) and "&lt;!-- tabs" not in page


# --- in a browser


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra docs")
    if CHROMIUM is None:
        pytest.skip("no chromium or google-chrome is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_page(site: Path, address: str, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page, objections, place = context.new_page(), [], ""

    def object_to(what: object) -> None:
        objections.append((place, str(what)))

    def only_here(route: Any) -> None:
        if route.request.url.startswith(address):
            route.continue_()
        else:
            object_to(f"asks for {route.request.url}")
            route.abort()

    context.route("**/*", only_here)
    page.on("console", lambda message: message.type == "error" and object_to(message.text))
    page.on("pageerror", object_to)
    for file in sorted(site.rglob("*.html")):
        place = str(file.relative_to(site))
        page.goto(address + place, wait_until="load")
        for objection in page.evaluate(OBJECTIONS):
            object_to(objection)
    scheme_of_page = page.evaluate("document.body.dataset.mdColorScheme")
    context.close()
    assert objections == []
    assert scheme_of_page == {"light": "default", "dark": "slate"}[scheme]
