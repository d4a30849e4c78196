"""PEP 517 backend: setuptools, plus the startup files at the root of site-packages.

setuptools has no declarative way to put a `.pth` file there that also reaches editable installs.  So the
wheel that it builds, ordinary or editable, gets the two startup files of this folder added, and recorded in
RECORD so that uninstalling removes them.  Their module, `_megatron_rl_patches_startup.py`, stays at the root
of the repository, where a checkout on `PYTHONPATH` needs it: the package imports it.

The package index shows the README of the wheel, without the files that the README links to.  So these links
become links into the repository, and pictures are loaded from there.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

HERE = Path(__file__).parent
ROOT = HERE.parent
STARTUP_FILES = tuple(HERE / f"megatron_rl_patches_startup.{suffix}" for suffix in ("pth", "start"))


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    add_to_root(Path(wheel_directory, name), STARTUP_FILES)
    return name


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    add_to_root(Path(wheel_directory, name), STARTUP_FILES)
    return name


def add_to_root(wheel: Path, files: tuple[Path, ...]) -> None:
    """Rewrite `wheel` with `files` at its root and in its RECORD, and with a README for the package index.

    Times and modes of the added files are those of RECORD.
    """
    rewritten = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(rewritten, "w") as result:
        (record,) = (entry for entry in source.infolist() if entry.filename.endswith(".dist-info/RECORD"))
        lines = source.read(record).decode()
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith(".dist-info/METADATA"):
                content = links_into_the_repository(content.decode()).encode()
                line = f"^{re.escape(entry.filename)},.*\n"
                lines = re.sub(line, _recorded(entry.filename, content), lines, flags=re.MULTILINE)
            if entry is not record:
                result.writestr(entry, content)
        for file in files:
            content = file.read_bytes()
            entry = zipfile.ZipInfo(file.name, record.date_time)
            entry.compress_type, entry.external_attr = record.compress_type, record.external_attr
            result.writestr(entry, content)
            lines = _recorded(file.name, content) + lines
        result.writestr(record, lines)
    os.replace(rewritten, wheel)


def links_into_the_repository(metadata: str) -> str:
    """Replace the relative links of the README by links to the files of this version."""
    repository = re.search(r"^Project-URL: Repository, (\S+)$", metadata, re.M)
    version = re.search(r"^Version: (\S+)$", metadata, re.M)
    assert repository and version

    def link(relative: re.Match[str]) -> str:
        is_folder, is_picture = (ROOT / relative[1]).is_dir(), relative[1].endswith(".svg")
        kind = "tree" if is_folder else "raw" if is_picture else "blob"
        return f"]({repository[1]}/{kind}/v{version[1]}/{relative[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", link, metadata)


def _recorded(name: str, content: bytes) -> str:
    """Return the line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"
