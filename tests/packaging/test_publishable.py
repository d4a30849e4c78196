"""What may not be published: a version that is not prepared. See docs/development/releasing.md."""

from __future__ import annotations

import re
import shutil

import pytest

from megatron_rl_patches import __version__

from .conftest import ROOT
from .publishable import objections

TAGGED = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": f"v{__version__}"}
FILES = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", "megatron_rl_patches/__init__.py")


@pytest.fixture
def prepared(tmp_path):
    """Copies of the files, as a maintainer leaves them."""
    (tmp_path / "megatron_rl_patches").mkdir()
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path / file)
    _replace(tmp_path / "pyproject.toml", r"\bOWNER\b", "somebody")
    with (tmp_path / "CHANGELOG.md").open("a") as log:
        log.write(f"\n## {__version__} - 2026-12-01\n")
    return tmp_path


def _replace(file, pattern, text):
    file.write_text(re.sub(pattern, text, file.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    "environment", [{}, TAGGED, {"GITHUB_REF_TYPE": "branch", "GITHUB_REF_NAME": "main"}]
)
def test_a_prepared_version_is_published(prepared, environment):
    assert objections(prepared, environment) == []


@pytest.mark.parametrize(
    ("file", "pattern", "text"),
    [
        ("pyproject.toml", r"github\.com/[\w-]+", "github.com/OWNER"),
        ("CHANGELOG.md", r"^(## \S+) - 2026-12-01", r"\1 - unreleased"),
        ("CITATION.cff", "^version: .*", "version: 0.0.1"),
    ],
)
def test_what_is_left_to_do_is_named(prepared, file, pattern, text):
    _replace(prepared / file, pattern, text)
    (objection,) = objections(prepared, TAGGED)
    assert objection.startswith(file)


def test_the_tag_is_the_version(prepared):
    (objection,) = objections(prepared, TAGGED | {"GITHUB_REF_NAME": "v9"})
    assert "v9" in objection


def test_no_other_file_names_the_repository():
    files = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    address = re.compile(r"github\.com/[\w-]+/megatron_rl_patches|[\w-]+\.github\.io/megatron_rl_patches")
    found = {
        str(file.relative_to(ROOT)) for file in files if file.is_file() and address.search(file.read_text())
    }
    assert found == {"pyproject.toml"}
