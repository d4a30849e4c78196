"""Follows ``docs/adding-a-patch.md`` in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT
from tests.worlds.environment import without_ours

PAGE = "docs/adding-a-patch.md"
FILES = {
    block.head.removeprefix("# "): block.code
    for block in pages.in_language("python", PAGE)
    if block.head.endswith(".py")
}
ENTRY_POINT = pages.in_language("toml", PAGE)[0].code
PATCH = "megatron_rl_patches/patches/quiet_eval.py"
TEST = "tests/unit/patches/test_quiet_eval.py"
OURS = "my_package/quiet_eval.py"


def _run(folder: Path, *command: str) -> str:
    environ = {**without_ours(), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = (sys.executable, "-m", *command)
    done = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True, timeout=120)
    return done.stdout + done.stderr


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} in {file}"
    file.write_text(text.replace(old, new))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy with the files of the page."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_rl_patches", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("_megatron_rl_patches_startup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / TEST).write_text(FILES[TEST])
    (tmp_path / PATCH).write_text(FILES[OURS])
    _replace(tmp_path / PATCH, "from megatron_rl_patches import Patch", "from ..engine.patch import Patch")
    return tmp_path


@pytest.mark.slow
def test_the_example_is_a_patch_of_this_repository(repository: Path) -> None:
    assert set(FILES) == {TEST, OURS}
    files = (TEST, "tests/unit/test_every_patch.py", "tests/unit/test_architecture.py")
    pytest_on = ("pytest", "-q", "-p", "no:cacheprovider", *files, "-k")
    output = _run(repository, *pytest_on, "root")
    assert "1 failed" in output and "test_the_startup_trigger_knows_every_root" in output, output
    startup = repository / "_megatron_rl_patches_startup.py"
    _replace(startup, '_ROOTS = ("megatron", ', '_ROOTS = ("megatron", "framework", ')
    output = _run(repository, *pytest_on, "quiet or evaluate or root or arrows")
    assert re.search(r"^\d+ passed", output, re.MULTILINE), output
    assert "quiet-eval" in _run(repository, "megatron_rl_patches", "check")


def test_a_package_of_ones_own_registers_it_as_the_example_does() -> None:
    """``test_examples.py`` installs the example and applies its patch."""
    tomllib = pytest.importorskip("tomllib")
    example = tomllib.loads((ROOT / "examples" / "third_party_patch" / "pyproject.toml").read_text())
    (group, entries), *others = tomllib.loads(ENTRY_POINT)["project"]["entry-points"].items()
    assert not others and example["project"]["entry-points"].keys() == {group}
    assert entries == {"quiet-eval": "my_package.quiet_eval:patch"}
