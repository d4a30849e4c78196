"""What is imported late: names that a package offers, and installed packages, which may be absent."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MegatronRLPatchesError


def lazy_names(
    package: str, names_by_module: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose import stays cheap.

    It offers, for each relative name of a module, some names in that module.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name], package), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, list_names, sorted(module_of)


def require_megatron(action: str) -> None:
    """Raise :class:`MegatronRLPatchesError` without torch or megatron-core, which an action needs."""
    with suppress(ModuleNotFoundError):  # of megatron
        if find_spec("torch") and find_spec("megatron.core"):
            return
    raise MegatronRLPatchesError(f"{action} needs torch and megatron-core: pip install torch megatron-core")


def version_of(distribution: str, file: str | None = None) -> str | None:
    """Return the version of what is installed; if ``file`` is not a part of it, the one in the source.

    A folder on PYTHONPATH hides an installed package whose version is another one.
    """
    from importlib import metadata  # takes a while, and few processes need it

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


def _editable_folder(distribution: Any) -> str | None:
    """Return the folder that an editable install leads to."""
    import json
    from urllib.parse import unquote, urlsplit

    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    return unquote(urlsplit(url["url"]).path) if url.get("dir_info", {}).get("editable") else None
