"""The site builds without a warning, has every public name, and needs nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import docstrings

pytestmark = pytest.mark.slow


def test_the_api_has_every_public_name_by_its_public_path(site: Path) -> None:
    headings = set()
    for page in (site / "api").rglob("*.html"):
        text = page.read_text("utf-8")
        headings.update(re.findall(r'<h\d id="(megatron_rl_patches\.[\w.]+)"', text))
    # A module has the name of its function.
    headings = {heading.replace("cpu_backend.cpu_backend", "cpu_backend") for heading in headings}
    public = {f"{package.__name__}.{name}" for package in docstrings.packages() for name in package.__all__}
    assert public - headings == set()


def test_equations_are_mathml(site: Path) -> None:
    for page in ("losses", "distillation"):
        text = (site / page / "index.html").read_text("utf-8")
        assert '<div class="equation"><math' in text and "arithmatex" not in text


def test_no_page_shows_tex_or_loads_something_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|link rel="stylesheet")\b[^>]*\b(?:src|href)="https?://""")
    for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):
        text = page.read_text("utf-8")
        prose = re.sub(r"<(pre|script|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert not re.search(r"\\[a-zA-Z(\[]|\$\$", prose) and not loads.search(text), page


def test_tables_without_a_header_have_no_empty_one(site: Path) -> None:
    text = (site / "losses" / "index.html").read_text("utf-8")
    assert "<table>\n<tbody>" in text and "<th></th>" not in text


def test_the_address_of_the_repository_is_that_of_the_project(site: Path) -> None:
    text = (site / "index.html").read_text("utf-8")
    assert "/megatron_rl_patches" in text and "git+REPOSITORY" not in text
