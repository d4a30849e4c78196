"""What prose names exists: variables and their values, settings, links, types, patches, messages, changes."""

from __future__ import annotations

import builtins
import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_rl_patches import errors
from megatron_rl_patches.engine import registry, settings
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.settings import VARIABLE, Settings, parse_selection
from tests.docs import pages
from tests.docs.pages import ROOT

VARIABLES = set(settings.variables())
# Classes that pages name, and that are not of this package.
OF_OTHERS = {
    *("AutoBridge", "ChainedOptimizer", "DistributedDataParallel", "FileSystemWriter", "FusedAdam"),
    *("HybridModel", "HybridStack", "MambaModel", "MambaStack", "ModelConfig", "ProcessPoolExecutor"),
    *("SimpleNamespace", "TransformerBlock", "TransformerConfig"),
}


def test_variables_exist_and_nothing_is_left_to_fill_in() -> None:
    for page in pages.paths():
        text = page.read_text("utf-8")
        assert set(re.findall(r"MEGATRON_RL_PATCHES(?:_[A-Z]+)*", text)) <= VARIABLES, page
        assert not re.search(r"@[A-Z]+@|\bTODO\b|\bTBD\b", text), page


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
    text = options["PAGE"].read_text("utf-8")
    assert text == options["page"](), "run: make pages"
    assert [name for name in VARIABLES if f"`{name}`" not in text] == []


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
    for page in (path for path in pages.paths() if path.parent == ROOT):
        link = r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)"
        for target, anchor in re.findall(link, page.read_text("utf-8")):
            assert (ROOT / target).exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text("utf-8").lower(), re.MULTILINE)
                anchors = {re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings}
                assert anchor in anchors, (page, target, anchor)


def test_code_fits_eighty_columns() -> None:
    for block in pages.blocks():
        if not pages.is_for_maintainers(block.page):
            assert max(map(len, block.code.splitlines())) <= 80, block


def test_types_can_be_imported_from_where_the_pages_say() -> None:
    """A class that prose names is in a public package; blocks of code are run."""
    named = {
        code.partition("(")[0]
        for page, code in pages.inline_code()
        if not pages.is_for_maintainers(page)
        and re.fullmatch(r"([A-Z][a-z]+){2,}(\(.*\))?|Scores|Patch|Site|Call", code)
    }
    public = {name for package in pages.packages() for name in package.__all__}
    assert {"Scores", "TargetSource"} <= named
    assert named - public - set(vars(errors)) - set(vars(builtins)) - OF_OTHERS == set()


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
    assert "## 9.9.9 - 2" in log and "### Added" in log
    assert [path.name for path in fragments if f"- {path.read_text('utf-8').strip()}" not in log] == []


# --- patches


FIRST = ["Switch it on", "What it changes", "What it does not change", "Upstream"]
LAST = "Is it active?"
#: How a patch is left out, by the set that it is in.
OFF = {
    "default": "MEGATRON_RL_PATCHES=1,-{}",
    "all": "MEGATRON_RL_PATCHES=all,-{}",
    "by name": "off unless it is named",
}
VERDICTS = json.loads((ROOT / "tests" / "frameworks" / "verdicts.json").read_text("utf-8"))


@pytest.mark.parametrize("patch", registry.patches().values(), ids=lambda patch: patch.name)
def test_the_page_of_a_patch_has_the_same_sections_in_the_same_order(patch: Patch) -> None:
    text = (ROOT / "docs" / "patches" / f"{patch.name}.md").read_text("utf-8")
    title, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title.startswith(f"# `{patch.name}`\n")
    sections = {heading: " ".join(body.split()) for heading, body in (part.split("\n", 1) for part in parts)}
    assert [*sections][:4] == FIRST and [*sections][-1] == LAST
    assert all(sections.values())
    assert [s.target for s in patch.sites if s.qualname.split(".")[-1] not in text] == []

    links = re.findall(r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/(\S+?)\)", sections["Upstream"])
    assert sorted(name for name, _ in links) == sorted(patch.upstream)
    for name, target in links:
        assert re.fullmatch(name.replace("#", "/(pull|issues)/"), target)

    on = sections["Switch it on"]
    assert f"{VARIABLE}={patch.name}" in on and f'apply("{patch.name}"' in on
    assert OFF[patch.selected_by].format(patch.name) in on and f'revert("{patch.name}")' in on
    for option in fields(patch.options) if patch.options else ():
        assert f"(../options.md#{patch.name})" in text
        assert f"`{option.name}`" in text or f"`{option.name.upper()}`" in text

    assert all(f"**{what}" in sections["What it does not change"] for what in ("Numbers:**", "Cost"))
    code = re.findall(r"`([^`]+)`", sections[LAST])
    assert {"megatron_rl_patches.status()", "megatron-rl-patches doctor"} <= set(code)
    assert f"patches/{patch.name}.md" in (ROOT / "README.md").read_text("utf-8")
    assert {path.stem for path in (ROOT / "docs" / "patches").glob("*.md")} == registry.patches().keys()

    # The patch has work to do in the source that the sentence on the log names.
    log = rf"\*\*Log:\*\* with (.*?), the line of rank 0 names `{patch.name}`"
    [source] = re.findall(log, sections[LAST])
    [verdicts] = [entry["verdicts"] for entry in VERDICTS if entry["source"] == source]
    assert "fits" in [word for patches in verdicts.values() for word in patches.get(patch.name, {}).values()]


# --- the FAQ


# Headings of the FAQ that describe a symptom instead of quoting a message.
SYMPTOMS = (
    *("Parameters that are stale", "A hang in backward", "A second line", "Is it active on all ranks"),
    *("The learning rate is another", "No line in the log", "distillation/loss_min", "Weights are NaN"),
    "Gradients are wrong under routing replay",
)
# Headings whose message is made from a value or in a compiled library, and where it was observed.
OBSERVED_IN = {
    "KeyError: Float16Module(": "tests/real/test_mock_ddp_contract.py: the KeyError of a real module",
    "torch.OutOfMemoryError: CUDA out of memory": "torch, on a GPU; what is allocated is in docs/benchmarks",
    "one of the variables needed for gradient computation has been modified by an inplace operation": ""
    "torch; tests/frameworks/test_real_lean_loss.py",
    "does not match instances": "megatron-core, set_replay_data; tests/real/test_router_replay.py",
    "device-side assert triggered": "CUDA; tests/gpu",
    "Cannot access data pointer of Tensor": "torch; tests/unit/losses/vocab/test_deferred.py",
    "Unsupported loss mode: megatron_rl_patches.…": "get_distillation_loss_settings of verl, with our names",
    "argument --loss-type: invalid choice: 'opd_loss'": "argparse, with the choices of slime",
}


def _folder(package: str) -> Path:
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) if spec else ROOT / "not installed"


# Where all other messages are: ours, and those of others.
SOURCES = (
    *(ROOT / "megatron_rl_patches", ROOT / "_megatron_rl_patches_startup.py"),
    *(_folder("megatron.core") / "distributed", _folder("megatron.core") / "timers.py"),
    *(ROOT / "tests" / "frameworks" / "stand_in", _folder("torch") / "utils" / "checkpoint.py"),
)
RAY = _folder("ray") / "_private" / "runtime_env"
OF_RAY = "TypeError: runtime_env['env_vars'] must be of type Dict[str, str]"


def test_the_faq_quotes_messages_as_the_sources_have_them() -> None:
    text = (ROOT / "docs" / "faq.md").read_text("utf-8")
    headings = {heading.strip("`") for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    assert headings > {OF_RAY, *OBSERVED_IN}
    quoted = {h for h in headings if not h.startswith(SYMPTOMS)} - set(OBSERVED_IN)
    sources = "\n".join(map(_text, (*SOURCES, RAY)))
    missing = {heading for heading in quoted if re.sub(r"^\w+Error: ", "", heading) not in sources}
    assert missing <= (set() if RAY.exists() else {OF_RAY})


def _text(place: Path) -> str:
    """Return the text of all modules, in which strings that go on in the next line are joined."""
    files = [place] if place.is_file() else place.rglob("*.py")
    text = "\n".join(path.read_text("utf-8") for path in files)
    return re.sub(r"['\"]\s*\n\s*f?['\"]", "", text)
