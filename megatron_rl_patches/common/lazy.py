"""What is imported late: names that a package offers, and torch and megatron-core, which may be absent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
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
