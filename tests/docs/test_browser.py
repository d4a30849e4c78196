"""A real browser, without a network, shows every page: on a desktop and on a phone, light and dark."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# In a page: is it wider than the window, and which images are broken?
SCROLLS = "document.documentElement.scrollWidth > window.innerWidth"
BROKEN_IMAGES = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra docs")
    if CHROMIUM is None:
        pytest.skip("no chromium or google-chrome is installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
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
        if page.evaluate(SCROLLS):
            object_to("is wider than the window")
        for image in page.evaluate(BROKEN_IMAGES):
            object_to(f"lacks {image}")
    scheme_of_page = page.evaluate("document.body.dataset.mdColorScheme")
    context.close()
    assert objections == []
    assert scheme_of_page == {"light": "default", "dark": "slate"}[scheme]
