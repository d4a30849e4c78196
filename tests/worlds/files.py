"""Files that a test writes: frameworks, checkouts, programs."""

import subprocess
from collections.abc import Mapping
from pathlib import Path


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write texts, by their paths within the folder; return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def git(folder: Path | str, *command: str) -> str:
    """Run git in a folder, and return what it prints."""
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", *identity, *command], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
