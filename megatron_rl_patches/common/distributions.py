"""Versions of installed packages."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def version_of(distribution: str, file: str | None = None) -> str | None:
    """Return the version of what is installed; if ``file`` is not a part of it, the one in the source.

    A folder on PYTHONPATH hides an installed package whose version is another one.
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return _version_in(Path(file)) if file else None
    folders = [str(installed.locate_file("")), _editable_folder(installed)]
    is_of_it = file is None or any(folder and Path(file).is_relative_to(folder) for folder in folders)
    return installed.version if is_of_it else _version_in(Path(file or ""))


def _version_in(file: Path) -> str | None:
    """Return the version that the source of megatron.core has in it."""
    info = file.with_name("package_info.py")
    text = info.read_text("utf-8") if info.is_file() else ""
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)) or None


def _editable_folder(distribution: metadata.Distribution) -> str | None:
    """Return the folder that an editable install leads to."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    return unquote(urlsplit(url["url"]).path) if url.get("dir_info", {}).get("editable") else None
