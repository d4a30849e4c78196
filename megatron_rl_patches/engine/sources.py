"""Where source text comes from: this environment, a folder, a wheel, a git tree. Nothing is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Protocol

from ..errors import MegatronRLPatchesError


class Source(Protocol):
    """Gives the text of modules by their dotted name."""

    name: str

    def has_package(self, package: str) -> bool: ...

    def read(self, module: str) -> str | None:
        """The module's source text, ``None`` when there is no such module."""


class Environment:
    """What ``import`` would find in this process, without importing it."""

    name = "this environment"

    def has_package(self, package: str) -> bool:
        return _find_spec(package) is not None

    def read(self, module: str) -> str | None:
        spec = _find_spec(module)
        get_source = getattr(spec.loader, "get_source", None) if spec else None
        return get_source(module) if get_source else None


def _find_spec(module: str) -> ModuleSpec | None:
    # importlib.util.find_spec would import the parents of a dotted name; this walk does not.
    root, *rest = module.split(".")
    spec = _spec_of_loaded(root) or importlib.util.find_spec(root)
    name = root
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = _spec_of_loaded(name) or PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec


def _spec_of_loaded(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


class _Files:
    """Modules found by the end of their path, so that ``src/`` and vendored layouts need no options."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Dotted suffixes are looked up by their last part; the shallowest path wins."""
        by_length = sorted(self._list(), key=lambda path: (path.count("/"), path))
        return {path: path for path in by_length if path.endswith(".py")}

    def has_package(self, package: str) -> bool:
        stem = package.replace(".", "/")
        return any(f"/{path}".find(f"/{stem}/") >= 0 for path in self._paths)

    def read(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        for path in self._paths:
            if f"/{path}".endswith((f"/{stem}.py", f"/{stem}/__init__.py")):
                return self._text(path)
        return None

    def _list(self) -> Iterable[str]:
        raise NotImplementedError

    def _text(self, path: str) -> str:
        raise NotImplementedError


class Folder(_Files):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self._folder = folder

    def _list(self) -> Iterable[str]:
        return (path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*.py"))

    def _text(self, path: str) -> str:
        return (self._folder / path).read_text(encoding="utf-8")


class Wheel(_Files):
    def __init__(self, wheel: Path) -> None:
        name, version = wheel.name.split("-")[:2]
        super().__init__(f"{name} {version}")
        self._archive = zipfile.ZipFile(wheel)

    def _list(self) -> Iterable[str]:
        return self._archive.namelist()

    def _text(self, path: str) -> str:
        return self._archive.read(path).decode()


class GitTree(_Files):
    """``REPOSITORY@REVISION``; a bare repository will do."""

    def __init__(self, repository: Path, revision: str) -> None:
        root = repository.parent if repository.name == ".git" else repository
        super().__init__(f"{root.name.removesuffix('.git')} {revision}")
        self._repository = repository
        self._revision = revision

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._repository), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
        if done.returncode:
            raise MegatronRLPatchesError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _list(self) -> Iterable[str]:
        return self._git("ls-tree", "-r", "--full-tree", "--name-only", self._revision).splitlines()

    def _text(self, path: str) -> str:
        return self._git("show", f"{self._revision}:{path}")


def open_source(source: str) -> Source:
    """A wheel, a folder, or ``REPOSITORY@REVISION``.

    Raises:
        MegatronRLPatchesError: it is none of these.
    """
    path = Path(source)
    if path.is_dir():
        return Folder(path.resolve())
    if path.suffix == ".whl" and path.is_file():
        return Wheel(path)
    repository, _, revision = source.rpartition("@")
    if repository and Path(repository).is_dir():
        return GitTree(Path(repository).resolve(), revision)
    raise MegatronRLPatchesError(
        f"{source!r} is neither a folder, nor a .whl file, nor REPOSITORY@REVISION of a git repository"
    )
