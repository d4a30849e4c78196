"""Every code block of the README and the documentation runs, or is compared with what it quotes.

Python runs on a rank with real megatron-core (``ranks.py``), tests under pytest, shell lines in a sandbox
(``sandbox.py``). A block that none of these follows is in a table here, with the reason, or the test fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from megatron_rl_patches.testing import spawn_ranks
from tests.docs import docstrings, messages, pages, ranks
from tests.docs.pages import ROOT, Block

LANGUAGES = {"bash", "console", "mermaid", "python", "text", "toml"}

ADDING = "docs/adding-a-patch.md"
# Blocks that another test follows.
FOLLOWED_ELSEWHERE = {
    ("README.md", "from ..engine.spec import Patch"): "test_adding_a_patch.py",
    (ADDING, "# megatron_rl_patches/patches/quiet_eval.py"): "test_adding_a_patch.py",
    (ADDING, "# megatron_rl_patches/quiet.py"): "test_adding_a_patch.py",
    (ADDING, "# tests/unit/patches/test_quiet_eval.py"): "test_adding_a_patch.py",
    (ADDING, "# my_package/quiet_eval.py"): "test_adding_a_patch.py",
    (ADDING, '[project.entry-points."megatron_rl_patches.patches"]'): "test_adding_a_patch.py",
}
A_RECORD = "figures of a run of a minute or more; tests/real/test_demo.py runs the command"
A_FORMULA = "a formula; tests/unit/losses compare the functions with float64 autograd of it"
# Blocks of text that are not compared with anything, and why.
NOT_COMPARED = {
    ("README.md", "megatron_rl_patches 0.1.0: inference-only"): A_RECORD,
    ("docs/demo.md", "megatron_rl_patches 0.1.0: inference-only"): A_RECORD,
    ("docs/demo.md", "rollout   1  routed: ascending"): A_RECORD,
    ("docs/demo.md", "rollout   1  reward"): A_RECORD,
    ("docs/losses.md", "log_prob = log p[target]"): A_FORMULA,
    ("docs/distillation.md", "log_prob of id"): A_FORMULA,
    ("docs/how-it-works.md", "environment variable"): "a drawing",
    ("docs/testing.md", "RanksFailed: no result after 8 s"): "has times, addresses and line numbers; "
    "tests/unit/testing/test_ranks.py tests the message",
}


def _entry(table: dict[tuple[str, str], str], block: Block) -> tuple[str, str] | None:
    return next((key for key in table if key[0] == block.page and block.head.startswith(key[1])), None)


def _id(block: Block) -> str:
    return block.place


def _is_test(block: Block) -> bool:
    return bool(re.search(r"^def test_", block.code, re.MULTILINE))


PYTHON = [block for block in pages.of("python") if not _entry(FOLLOWED_ELSEWHERE, block)]
TESTS = [block for block in PYTHON if _is_test(block)]
PROGRAMS = [block for block in PYTHON if not _is_test(block)]
EXAMPLES = docstrings.examples()


@pytest.mark.parametrize("block", pages.blocks(), ids=_id)
def test_has_a_language_that_is_followed(block: Block) -> None:
    assert block.language in LANGUAGES, "name the language after the backticks"


def test_no_table_has_an_entry_too_many() -> None:
    for table in (FOLLOWED_ELSEWHERE, NOT_COMPARED):
        used = {_entry(table, block) for block in pages.blocks()}
        assert set(table) - used == set()


def test_every_toml_is_followed() -> None:
    assert [block.place for block in pages.of("toml") if not _entry(FOLLOWED_ELSEWHERE, block)] == []


# --- Python


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed on the one rank that follows all pages and docstrings."""
    by_page = defaultdict(list)
    for block in PROGRAMS:
        by_page[block.page].append((block.line, block.code))
    folder = tmp_path_factory.mktemp("pages")
    (found,) = spawn_ranks(
        ranks.follow, 1, dict(by_page), EXAMPLES, pages.dotted_names(), str(folder), timeout=200
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*dict.fromkeys(block.page for block in PROGRAMS), *EXAMPLES])
def test_python(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


@pytest.mark.slow
def test_dotted_names_in_prose_and_blocks_exist(failures: dict[str, str]) -> None:
    assert [name for name in failures if name in pages.dotted_names()] == []


def test_docstrings_have_examples() -> None:
    assert {"TeacherPool", "checkpointed", "make_loss_func", "reentrant_train"} <= EXAMPLES.keys()


@pytest.mark.slow
def test_tests_that_pages_show(tmp_path: Path) -> None:
    """In a project of a user's: the files of the pages, and the module ``my_rl.model`` that they test."""
    package = tmp_path / "my_rl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loop.py").write_text((ROOT / "tests" / "real" / "tiny_gpt.py").read_text())
    (package / "model.py").write_text((Path(__file__).with_name("my_model.py")).read_text())
    for block in TESTS:
        stem = re.sub(r"\W", "_", block.page.removesuffix(".md"))
        (tmp_path / f"test_{stem}_{block.line}.py").write_text(block.code)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = sum(len(re.findall(r"^def test_", block.code, re.MULTILINE)) for block in TESTS)
    assert f"{shown} passed" in done.stdout


# --- text


def _compared(block: Block) -> bool:
    return _entry(NOT_COMPARED, block) is None


@pytest.mark.parametrize("block", [*filter(_compared, pages.of("text"))], ids=_id)
def test_text_is_what_it_quotes(block: Block) -> None:
    """The startup file, or an error message of ours or of the demo's own assertion."""
    if block.head.startswith("import os;"):
        assert block.code == (ROOT / "startup" / "megatron_rl_patches_startup.pth").read_text()
        return
    name, _, message = messages.one_line(block.code).partition(": ")
    assert re.fullmatch(r"[A-Z]\w*(Error|Failed)", name), "not a message; compare it, or say why not"
    assert message in messages.all_texts() or messages.raised_as(message), "nothing in the sources says so"


@pytest.mark.parametrize("block", pages.of("mermaid"), ids=_id)
def test_diagrams_are_well_formed(block: Block) -> None:
    first, *lines = block.code.split("\n")
    assert first == "stateDiagram-v2"
    step = re.compile(r"(\[\*\]|[A-Z]\w+) --> [A-Z]\w+(: .+)?|direction (TB|LR)")
    assert [line for line in map(str.strip, lines) if line and not step.fullmatch(line)] == []
