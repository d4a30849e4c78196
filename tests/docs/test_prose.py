"""What prose names exists: variables and their values, settings, links, patches, messages, changes."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl_patches.engine import registry, settings
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.settings import VARIABLE, Settings, parse_selection
from tests.docs import pages
from tests.docs.pages import ROOT

VARIABLES = set(settings.variables())


def test_variables_exist_and_nothing_is_left_to_fill_in() -> None:
    for page in pages.paths():
        text = page.read_text("utf-8")
        assert set(re.findall(r"MEGATRON_RL_PATCHES(?:_[A-Z]+)*", text)) <= VARIABLES, page
        assert not re.search(r"@[A-Z]+@|\b(TODO|TBD|OWNER)\b|\+REPOSITORY", text), page


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
    """On a page that is written from what the patches declare: ``make pages``."""
    options = runpy.run_path(str(ROOT / "docs" / "options.py"))
    assert options["PAGE"].read_text("utf-8") == options["page"](), "run: make pages"


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    names = {name for name in re.findall(r"`([\w/]+/[\w.]+)`", text) if "NAME" not in name}
    known = {
        name for name in names for root in (ROOT, ROOT / "megatron_rl_patches") if (root / name).exists()
    }
    assert names - known == set() and names


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    """Links within the site are checked when it is built."""
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 140
    assert len(re.findall(r"\S*[^\W_]\S*", (ROOT / "docs/production.md").read_text("utf-8"))) <= 900  # words
    words = (re.findall(r"\S*\w\S*", page.read_text("utf-8")) for page in (ROOT / "docs").rglob("*.md"))
    assert sum(map(len, words)) <= 38_000, "cut what repeats another page"
    for page in (path for path in pages.paths() if path.parent == ROOT):
        link = r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)"
        for target, anchor in re.findall(link, page.read_text("utf-8")):
            assert (ROOT / target).exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text("utf-8").lower(), re.MULTILINE)
                anchors = {re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings}
                assert anchor in anchors, (page, target, anchor)


# --- changes


def test_a_fragment_of_the_changelog_is_one_sentence_which_the_log_of_the_next_release_has() -> None:
    fragments = sorted((ROOT / "changelog.d").glob("*.md"))
    for fragment in fragments:
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", fragment.name)
        text = fragment.read_text("utf-8")
        assert re.fullmatch(r"[^\n]{10,250}\.\n", text), fragment
        assert not re.search(r"\w\. [A-Z`]", text.replace("e.g. ", "")), fragment
    pytest.importorskip("towncrier")
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"]
    log = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert "## 9.9.9 - 2" in log
    assert [path.name for path in fragments if f"- {path.read_text('utf-8').strip()}" not in log] == []


def test_the_newest_version_has_at_most_15_sentences() -> None:
    newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1]
    assert 0 < len(re.findall(r"\.(?:\s|$)", newest)) <= 15


# --- patches


#: How a patch is left out, by the set that it is in.
OFF = {
    "default": "MEGATRON_RL_PATCHES=1,-{}",
    "all": "MEGATRON_RL_PATCHES=all,-{}",
    "by name": "off unless it is named",
}


@pytest.mark.parametrize("patch", registry.patches().values(), ids=lambda patch: patch.name)
def test_the_page_of_a_patch_names_its_functions_options_and_sources(patch: Patch) -> None:
    text = (ROOT / "docs" / "patches" / f"{patch.name}.md").read_text("utf-8")
    assert text.startswith(f"# `{patch.name}`\n")
    assert [s.target for s in patch.sites if s.qualname.split(".")[-1] not in text] == []
    links = re.findall(
        r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/(\S+?)\)", text.partition("## Upstream")[2]
    )
    assert {*patch.upstream} <= {name for name, _ in links}
    for name, target in links:
        assert re.fullmatch(name.replace("#", "/(pull|issues)/"), target)
    for shown in (f"{VARIABLE}={patch.name}", f'apply("{patch.name}"', f'revert("{patch.name}")'):
        assert shown in text
    assert OFF[patch.selected_by].format(patch.name) in " ".join(text.split())
    for option in fields(patch.options) if patch.options else ():
        assert f"`{option.name}`" in text or f"`{option.name.upper()}`" in text
    assert f"patches/{patch.name}.md" in (ROOT / "README.md").read_text("utf-8")


# --- the FAQ


# Headings of the FAQ that describe a symptom, and messages that are made from a value or by compiled code.
NOT_QUOTED = (
    *("Parameters that are stale", "A hang in backward", "A second line", "Is it active on all ranks"),
    *("The learning rate is another", "No line in the log", "distillation/loss_min", "Weights are NaN"),
    *("Gradients are wrong under routing replay", "KeyError: Float16Module(", "does not match instances"),
    *("torch.OutOfMemoryError: CUDA out of memory", "one of the variables needed for gradient computation"),
    *("device-side assert triggered", "Cannot access data pointer of Tensor"),
    *("argument --loss-type: invalid", "Unsupported loss mode", "TypeError: runtime_env['env_vars'] must be"),
)


def _folder(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else ROOT / "not installed"


# Where all other messages are: ours, and those of others.
SOURCES = (
    *(ROOT / "megatron_rl_patches", ROOT / "_megatron_rl_patches_startup.py"),
    *(_folder("megatron.core") / "distributed", _folder("megatron.core") / "timers.py"),
    *(ROOT / "tests" / "frameworks" / "stand_in", _folder("torch") / "utils" / "checkpoint.py"),
)


def test_the_faq_quotes_messages_as_the_sources_have_them() -> None:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    headings = {heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    files = [file for place in SOURCES for file in ([place] if place.is_file() else place.rglob("*.py"))]
    # Strings that go on in the next line are joined.
    sources = re.sub(r"['\"]\s*\n\s*f?['\"]", "", "\n".join(file.read_text("utf-8") for file in files))
    quoted = {re.sub(r"^\w+Error: ", "", one) for one in headings if not one.startswith(NOT_QUOTED)}
    assert quoted and {one for one in quoted if one not in sources} == set()
