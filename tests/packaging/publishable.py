"""What is to be done before this version can be published; ``make release-check`` begins with it.

python -m tests.packaging.publishable
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def objections(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return what a maintainer has to do first; nothing where the version can be published.

    Args:
        environment: GitHub's variables, which name the tag in a run that a tag started.
    """
    version = re.search(r'^__version__ = "(.+)"$', _text(root, "megatron_rl_patches/__init__.py"), re.M)
    assert version is not None
    found = []
    if re.search(r"\bOWNER\b", _text(root, "pyproject.toml").partition("[project.urls]")[2]):
        found.append(
            "pyproject.toml: put the owner of the repository in the place of OWNER in [project.urls]"
        )
    if not re.search(rf"^## {re.escape(version[1])} - \d{{4}}-\d\d-\d\d$", _text(root, "CHANGELOG.md"), re.M):
        found.append(f"CHANGELOG.md: has no version {version[1]}: make changelog RELEASE=1 writes it")
    if f"\nversion: {version[1]}\n" not in _text(root, "CITATION.cff"):
        found.append(f"CITATION.cff: set version: {version[1]}")
    tag = environment.get("GITHUB_REF_NAME") if environment.get("GITHUB_REF_TYPE") == "tag" else None
    if tag and tag != f"v{version[1]}":
        found.append(f"the tag {tag} is not v{version[1]}, the version in megatron_rl_patches/__init__.py")
    return found


def _text(root: Path, file: str) -> str:
    return (root / file).read_text("utf-8")


if __name__ == "__main__":
    sys.exit("\n".join(objections(ROOT, os.environ)) or 0)
