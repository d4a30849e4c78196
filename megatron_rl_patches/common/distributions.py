"""Versions of installed packages."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def version_of(distribution: str, file: str | None = None) -> str | None:
    """Return the version of what is installed; ``None`` if ``file`` is not a part of it.

    A folder on PYTHONPATH hides an installed package whose version is another one.
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    folders = [str(installed.locate_file("")), _editable_folder(installed)]
    is_of_it = file is None or any(folder and Path(file).is_relative_to(folder) for folder in folders)
    return installed.version if is_of_it else None


def _editable_folder(distribution: metadata.Distribution) -> str | None:
    """Return the folder that an editable install leads to."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    return url2pathname(urlsplit(url["url"]).path) if url.get("dir_info", {}).get("editable") else None
