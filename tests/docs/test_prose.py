"""What prose and blocks name exists: variables and their values, settings, links between pages."""

from __future__ import annotations

import json
import re

import pytest

from megatron_rl_patches import available, settings
from megatron_rl_patches.settings import Settings, parse_selection
from tests.docs import pages
from tests.docs.pages import ROOT

VARIABLES = {value for name, value in vars(settings).items() if name.endswith("VARIABLE")}


@pytest.mark.parametrize("path", pages.paths(), ids=pages.name_of)
def test_variables_exist(path: pages.Path) -> None:
    named = set(re.findall(r"MEGATRON_RL_PATCHES(?:_[A-Z]+)*", path.read_text("utf-8")))
    assert named <= VARIABLES


def test_values_of_the_variable_select_patches() -> None:
    for page, code in pages.inline_code():
        for value in re.findall(r"^MEGATRON_RL_PATCHES=(\S+)$", code):
            unknown = parse_selection(value, available()).unknown
            assert unknown in ((), ("-NAME",)), (page, code)


def test_settings_parse() -> None:
    for page, code in pages.inline_code():
        name, equals, value = code.partition("=")
        if equals and name in VARIABLES and not re.search(r"\.\.\.|…", value):
            assert Settings.from_environment({name: value}), page


def test_json_parses() -> None:
    for _, code in pages.inline_code():
        if code.startswith('{"'):
            json.loads(code)


def test_every_variable_is_explained() -> None:
    told = (ROOT / "docs" / "activation.md").read_text("utf-8") + (ROOT / "README.md").read_text("utf-8")
    assert [name for name in VARIABLES if f"`{name}" not in told] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=pages.name_of)
def test_links_of_pages_outside_the_site_lead_somewhere(path: pages.Path) -> None:
    """Those within the site are checked when it is built."""
    for target, _, anchor in re.findall(r"\]\((?!https?:)([^)#]+)(#([^)]+))?\)", path.read_text("utf-8")):
        file = path.parent / target
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("path", pages.paths(), ids=pages.name_of)
def test_nothing_is_left_to_fill_in(path: pages.Path) -> None:
    assert not re.search(r"@[A-Z]+@|\bTODO\b|\bTBD\b", path.read_text("utf-8"))
