"""What is to be done before this version can be published; ``make release-check`` begins with it.

python -m tests.packaging.publishable
"""

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
    [version] = re.findall(r'^__version__ = "(.+)"$', _text(root, "megatron_rl_patches/__init__.py"), re.M)
    project = _text(root, "pyproject.toml")
    released = re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", _text(root, "CHANGELOG.md"), re.M)
    cited = f"\nversion: {version}\n" in _text(root, "CITATION.cff")
    tag = environment.get("GITHUB_REF_NAME") if environment.get("GITHUB_REF_TYPE") == "tag" else None
    owner = "put the owner of the repository in the place of OWNER, and delete the classifier Private"
    to_do = {
        f"pyproject.toml: {owner}": re.search(r"/OWNER\b|\"Private ::", project),
        f"CHANGELOG.md: has no '## {version} - DATE': date it, or make changelog RELEASE=1": not released,
        f"CITATION.cff: set version: {version}": not cited,
        f"the tag {tag} is not v{version}, the version in megatron_rl_patches/__init__.py": tag
        and tag != f"v{version}",
    }
    return [text for text, is_to_be_done in to_do.items() if is_to_be_done]


def _text(root: Path, file: str) -> str:
    return (root / file).read_text("utf-8")


if __name__ == "__main__":
    sys.exit("\n".join(objections(ROOT, os.environ)) or 0)
