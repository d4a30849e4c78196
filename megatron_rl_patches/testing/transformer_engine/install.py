"""Puts the stand-in in place of an absent TransformerEngine, and takes it away."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from packaging.version import InvalidVersion, Version

from ...errors import MegatronRLPatchesError
from . import version

_NAME = "transformer_engine"
_in_place: _Finder | None = None
_blocks = 0  # that have asked for it and have not ended


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version.current}\n"

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(MetaPathFinder):
    """Answers ``importlib.metadata.version("transformer-engine")``. Modules are in ``sys.modules``."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def find_spec(self, *args: object, **kwargs: object) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Sequence[Distribution]:
        name = (context.name if context else None) or ""
        return [_Distribution()] if name.lower().replace("_", "-") == "transformer-engine" else []


@contextmanager
def stand_in(requested: str | None = None) -> Iterator[None]:
    """Have the stand-in of a version in place. If Megatron is imported meanwhile, it stays for good.

    Raises:
        MegatronRLPatchesError: TransformerEngine is installed, Megatron was imported without it, the version
            is none, or the stand-in stands for another one already.
    """
    global _in_place, _blocks
    try:
        release = Version(requested or version.current)
    except InvalidVersion as error:
        raise MegatronRLPatchesError(f'{error}; expected a version, such as "{version.DEFAULT}"') from None
    if _in_place is None:
        _check_absence()
        version.current = requested or version.DEFAULT
        _in_place = _Finder(_new_modules())
        sys.modules.update(_in_place.modules)
        sys.meta_path.append(_in_place)
    elif release != Version(version.current):
        raise MegatronRLPatchesError(
            f"The stand-in of TransformerEngine stands for {version.current} in this process, not for "
            f"{requested}. Use one version in a process."
        )
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        # Functions of Megatron import from TransformerEngine when they are called.
        if _in_place is not None and _blocks == 0 and "megatron.core" not in sys.modules:
            for name, module in _in_place.modules.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
            sys.meta_path.remove(_in_place)
            _in_place, version.current = None, version.DEFAULT


def _check_absence() -> None:
    if _NAME in sys.modules or find_spec(_NAME) is not None:
        raise MegatronRLPatchesError(
            "TransformerEngine is installed, and the stand-in never takes the place of a real one. Leave out "
            "transformer_engine=True, or use an environment without TransformerEngine."
        )
    if "megatron.core" in sys.modules:
        raise MegatronRLPatchesError(
            "megatron.core was imported before the stand-in of TransformerEngine was in place, and decided "
            "then that there is none. Import megatron inside cpu_backend(transformer_engine=True) first. "
            "The file of a function for spawn_ranks may import it at its top if ranks are forks of a server "
            "that has preloaded megatron_rl_patches.testing.preload: see docs/testing.md."
        )


def _new_modules() -> dict[str, ModuleType]:
    from . import names

    modules: dict[str, ModuleType] = {}
    for name, values in names.modules().items():
        parent, _, child = name.rpartition(".")
        if not parent and name != _NAME and find_spec(name) is not None:
            continue
        modules[name] = module = ModuleType(name, "Of the stand-in of TransformerEngine.")
        module.__spec__ = ModuleSpec(name, loader=None, origin="stand-in", is_package=True)
        module.__path__ = []
        vars(module).update(values)
        if parent:
            setattr(modules[parent], child, module)
    return modules
