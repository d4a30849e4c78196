"""Every code block of the README and the documentation runs, or is compared with what it quotes.

Python runs on a rank with real megatron-core (``stand_ins.py``), tests under pytest, shell lines in a sandbox
(``test_shell_blocks.py``). A block that none of these follows is in a table here, with the reason.
"""

import os
import re
import traceback
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import megatron_rl_patches
from megatron_rl_patches.testing import TinyModel
from tests.docs import pages
from tests.docs.pages import ROOT, Block
from tests.docs.test_examples import run
from tests.ranks import on_ranks
from tests.worlds.files import write

LANGUAGES = {"bash", "console", "dockerfile", "python", "text", "toml"}

ADDING, DEMO = "docs/adding-a-patch.md", "$ megatron-rl-patches demo"
A_RECORD = "the output of a run of half a minute or more; tests/real/test_demo.py runs the command"
LOG = f"megatron_rl_patches {megatron_rl_patches.__version__} in "
LOGS = [block.page for block in pages.blocks("text") if block.head.startswith(LOG)]
# Blocks that another test follows, or that are not compared with anything, and why.
ELSEWHERE = {
    (ADDING, "# tests/unit/patches/test_quiet_eval.py"): "test_examples.py",
    (ADDING, "# my_package/quiet_eval.py"): "test_examples.py",
    (ADDING, '[project.entry-points."megatron_rl_patches.patches"]'): "examples/third_party_patch runs",
    **dict.fromkeys(((page, LOG) for page in LOGS), "test_records.py"),
    ("docs/demo.md", "starting 2 ranks;"): A_RECORD,
    ("README.md", DEMO): "test_records.py",
    **dict.fromkeys((("docs/index.md", DEMO), ("docs/index.md", "The same program")), "test_records.py"),
    ("docs/quickstart/megatron-bridge.md", "from megatron_rl_patches import hooks"): "the package is in no "
    "environment of these tests; tests/frameworks/test_real_bridge.py calls it",
    ("docs/losses.md", "forward                "): "a drawing",
    ("docs/patches/inference-only.md", "InferenceOnlyError: "): "tests/unit/frameworks",
    ("docs/testing.md", "split     "): "what the test before it prints; that test asserts what it says",
    ("docs/testing.md", "make conformance"): "tests/lab/conformance/test_runs.py, of a checkout made up",
}


def _entry(block: Block) -> tuple[str, str] | None:
    return next((key for key in ELSEWHERE if key[0] == block.page and block.head.startswith(key[1])), None)


PYTHON = [block for block in pages.blocks("python") if not _entry(block)]
TESTS = [block for block in PYTHON if "\ndef test_" in f"\n{block.code}"]
PROGRAMS = [block for block in PYTHON if block not in TESTS]


def test_every_block_is_followed_and_no_entry_is_left_over() -> None:
    assert {block.language for block in pages.blocks()} == LANGUAGES
    others = [block.place for block in (*pages.blocks("toml"), *pages.blocks("text")) if not _entry(block)]
    assert others == []
    assert ELSEWHERE.keys() - {_entry(block) for block in pages.blocks()} == set()


# --- Python


@pytest.mark.slow
@on_ranks(1, timeout=200)
def test_python_of_pages_and_docstrings(tmp_path: Path) -> None:
    """The blocks of each page in one namespace, each example of a docstring in its own, every dotted name."""
    from tests.docs import stand_ins

    TinyModel().initialize()
    os.chdir(tmp_path)
    stand_ins.save_teachers(tmp_path)
    failures = {}
    for page, blocks in groupby(PROGRAMS, key=lambda block: block.page):
        set_up, check = stand_ins.SETUPS.get(page, (dict, lambda names: None))
        failures[page] = _run([(block.line, block.code) for block in blocks], page, set_up, check)
    examples = pages.examples()
    assert {"TeacherPool", "checkpointed", "make_loss_func", "reentrant_train"} <= examples.keys()
    for name, example in examples.items():
        failures[name] = _run([(1, example)], name, stand_ins.docstrings)
    for name in pages.dotted_names():
        failures[name] = _run([(1, f"import pkgutil; pkgutil.resolve_name({name!r})")], name)
    failed = [f"{name}: {failure}" for name, failure in failures.items() if failure]
    assert not failed, "\n".join(failed)


def _run(blocks: list[tuple[int, str]], name: str, set_up: Any = dict, check: Any = bool) -> str:
    """Run the blocks, each with its first line in the page; return the traceback of what fails."""
    try:
        names = {"__name__": "page", **set_up()}
        for line, code in blocks:
            exec(compile("\n" * (line - 1) + code, name, "exec", dont_inherit=True), names)
        check(names)
    except Exception:
        return traceback.format_exc()
    finally:
        megatron_rl_patches.revert()
    return ""


@pytest.mark.slow
def test_tests_that_pages_show(tmp_path: Path) -> None:
    """In a project of a user's: the files of the pages, and the module ``my_rl.model`` that they test."""
    loop, model = ROOT / "tests" / "references" / "tiny_gpt.py", Path(__file__).with_name("my_model.py")
    files = {"__init__": "", "loop": loop.read_text(), "model": model.read_text()}
    files = {f"my_rl/{name}.py": text for name, text in files.items()}
    for block in TESTS:
        stem = re.sub(r"\W", "_", block.page.removesuffix(".md"))
        files[f"test_{stem}_{block.line}.py"] = block.code
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=write(tmp_path, files))
    shown = sum(len(re.findall(r"^def test_", block.code, re.MULTILINE)) for block in TESTS)
    assert f"{shown} passed" in output
