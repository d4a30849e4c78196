"""What prose and blocks name exists: variables and their values, settings, links between pages."""

from __future__ import annotations

import builtins
import json
import re
import runpy

from megatron_rl_patches import errors
from megatron_rl_patches.engine import settings
from megatron_rl_patches.engine.settings import VARIABLE, Settings, parse_selection
from tests.docs import docstrings, pages
from tests.docs.pages import ROOT

VARIABLES = set(settings.variables())
# Classes that pages name, and that are not of this package.
OF_OTHERS = {
    "AutoBridge",
    "ChainedOptimizer",
    "DistributedDataParallel",
    "FileSystemWriter",
    "ModelConfig",
    "ProcessPoolExecutor",
    "SimpleNamespace",
    "TransformerBlock",
    "TransformerConfig",
}


def test_variables_exist() -> None:
    for name, text in _texts().items():
        assert set(re.findall(r"MEGATRON_RL_PATCHES(?:_[A-Z]+)*", text)) <= VARIABLES, name


def test_values_of_variables_parse() -> None:
    for page, code in pages.inline_code():
        name, equals, value = code.partition("=")
        if code.startswith('{"'):
            json.loads(code)
        elif equals and name == VARIABLE and " " not in value:
            assert parse_selection(value)[1] in ([], ["-NAME"]), (page, code)
        elif equals and name in VARIABLES and not re.search(r"\.\.\.|…", value):
            assert Settings.from_environment({name: value}), page


def test_every_variable_is_explained() -> None:
    """On a page that is written from what the patches declare: ``make options``."""
    options = runpy.run_path(str(ROOT / "docs" / "options.py"))
    text = options["PAGE"].read_text("utf-8")
    assert text == options["page"](), "run: make options"
    assert [name for name in VARIABLES if f"`{name}`" not in text] == []


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    """Links within the site are checked when it is built."""
    for page in (path for path in pages.paths() if path.parent == ROOT):
        link = r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)"
        for target, anchor in re.findall(link, page.read_text("utf-8")):
            assert (ROOT / target).exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text("utf-8").lower(), re.MULTILINE)
                anchors = {re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings}
                assert anchor in anchors, (page, target, anchor)


def test_code_fits_eighty_columns() -> None:
    wide = [
        f"{block.page}:{number}"
        for block in pages.blocks()
        if not pages.is_for_maintainers(block.page)
        for number, line in enumerate(block.code.splitlines(), block.line)
        if len(line) > 80
    ]
    assert wide == []


def test_types_can_be_imported_from_where_the_pages_say() -> None:
    """A class that prose names is in a public package; blocks of code are run."""
    named = {
        code.partition("(")[0]
        for page, code in pages.inline_code()
        if not pages.is_for_maintainers(page)
        and re.fullmatch(r"([A-Z][a-z]+){2,}(\(.*\))?|Scores|Patch|Site|Call", code)
    }
    public = {name for package in docstrings.packages() for name in package.__all__}
    assert {"Scores", "TargetSource"} <= named
    assert named - public - set(vars(errors)) - set(vars(builtins)) - OF_OTHERS == set()


def test_nothing_is_left_to_fill_in() -> None:
    placeholder = re.compile(r"@[A-Z]+@|\bTODO\b|\bTBD\b")
    assert [name for name, text in _texts().items() if placeholder.search(text)] == []


def _texts() -> dict[str, str]:
    return {pages.name_of(path): path.read_text("utf-8") for path in pages.paths()}
