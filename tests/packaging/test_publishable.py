"""What may not be published: a version that is not prepared. See docs/development/releasing.md."""

import re
import shutil

import pytest

from megatron_rl_patches import __version__

from .conftest import ROOT
from .publishable import objections

TAG = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": f"v{__version__}"}
FILES = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", "megatron_rl_patches/__init__.py")


@pytest.mark.parametrize(
    ("file", "pattern", "text", "environment"),
    [
        ("", "", "", TAG),
        ("", "", "", {"GITHUB_REF_TYPE": "branch", "GITHUB_REF_NAME": "main"}),
        ("pyproject.toml", r"github\.com/[\w-]+", "github.com/OWNER", {}),
        ("pyproject.toml", r'"Typing :: Typed"', '"Private :: Do Not Upload"', {}),
        ("CHANGELOG.md", r"^(## \S+) - 2026-12-01", r"\1 - unreleased", {}),
        ("CITATION.cff", "^version: .*", "version: 0.0.1", {}),
        ("the tag v9", "", "", TAG | {"GITHUB_REF_NAME": "v9"}),
    ],
)
def test_what_is_left_to_do_is_named(tmp_path, file, pattern, text, environment):
    """Of copies of the files, as a maintainer leaves them, one of which is changed again."""
    (tmp_path / "megatron_rl_patches").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "CHANGELOG.md").open("a") as log:
        log.write(f"\n## {__version__} - 2026-12-01\n")
    for name, old, new in (("pyproject.toml", r'\bOWNER\b|"Private.*', "somebody"), (file, pattern, text)):
        if old:
            before = (tmp_path / name).read_text()
            (tmp_path / name).write_text(re.sub(old, new, before, flags=re.MULTILINE))
    found = objections(tmp_path, environment)
    assert len(found) == bool(file) and all(objection.startswith(file) for objection in found)


def test_no_other_file_names_the_repository():
    files = [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    address = re.compile(r"(github\.com/[\w-]+|[\w-]+\.github\.io)/megatron_rl_patches")
    found = [file.name for file in files if file.is_file() and address.search(file.read_text())]
    assert found == ["pyproject.toml"]
