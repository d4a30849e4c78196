"""Where source text comes from: this environment, a folder, a wheel, a git tree. Nothing is imported."""

from __future__ import annotations

import importlib.util
import pkgutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from typing import Protocol

from ..errors import MegatronRLPatchesError


class Source(Protocol):
    """Gives the text of modules by their dotted name."""

    name: str

    def has_package(self, package: str) -> bool:
        """Whether the package is there. A bare folder is not one: any checkout would be."""

    def read(self, module: str) -> str | None:
        """The module's source text, ``None`` when there is no such module."""


class Environment:
    """What ``import`` would find in this process, without importing it."""

    name = "this environment"

    def has_package(self, package: str) -> bool:
        return self.file_of(package) is not None

    def file_of(self, module: str) -> str | None:
        """The file that ``import`` would execute."""
        spec = _find_spec(module)
        return spec.origin if spec is not None and spec.has_location else None

    def read(self, module: str) -> str | None:
        spec = _find_spec(module)
        get_source = getattr(spec.loader, "get_source", None) if spec else None
        return get_source(module) if get_source else None


def _find_spec(module: str) -> ModuleSpec | None:
    # importlib.util.find_spec would import the parents of a dotted name; this walk does not.
    root, *rest = module.split(".")
    spec = _spec_of_loaded(root) or _search(root, None)
    name = root
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = _spec_of_loaded(name) or _search(name, spec.submodule_search_locations)
    return spec


def _search(name: str, locations: list[str] | None) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        # Finders that run import hooks (wrapt's, our own) are instances; asking one of those may import the
        # parents. PathFinder, and the finders of editable installs, are classes.
        if not isinstance(finder, type) or not hasattr(finder, "find_spec"):
            continue
        if finder is PathFinder and locations is not None:
            spec = _search_folders(name, locations)
        else:
            spec = finder.find_spec(name, locations)
        if spec is not None:
            return spec
    return None


def _search_folders(name: str, locations: list[str]) -> ModuleSpec | None:
    """``PathFinder.find_spec``, which wants a bare folder's parent package to be imported already."""
    portions: list[str] = []
    for location in locations:
        find_spec = getattr(pkgutil.get_importer(location), "find_spec", None)
        spec: ModuleSpec | None = find_spec(name) if find_spec else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec else []
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _spec_of_loaded(name: str) -> ModuleSpec | None:
    return getattr(sys.modules.get(name), "__spec__", None)


class _Files:
    """Import, acted out on a list of files.

    Every folder that is not inside a package counts as a place to import from, the shallowest first, so that
    ``src/`` and vendored layouts (``slime/slime/...``) need no options.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._texts: dict[str, str] = {}

    def has_package(self, package: str) -> bool:
        return self._find(package) is not None

    def read(self, module: str) -> str | None:
        file = self._find(module)
        if file is None:
            return None
        if file not in self._texts:
            self._texts[file] = importlib.util.decode_source(self._bytes(file))
        return self._texts[file]

    def _find(self, module: str) -> str | None:
        """The file that ``import module`` would execute."""
        places = self._places
        file = None
        for part in module.split("."):
            file, places = self._step(part, places)
        return file

    def _step(self, name: str, places: list[str]) -> tuple[str | None, list[str]]:
        """One look-up as Python does it: the first package or module wins, bare folders add up."""
        for place in places:
            if f"{place}{name}/__init__.py" in self._files:
                return f"{place}{name}/__init__.py", [f"{place}{name}/"]
            if f"{place}{name}.py" in self._files:
                return f"{place}{name}.py", []
        return None, [f"{place}{name}/" for place in places if f"{place}{name}/" in self._folders]

    @cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(path for path in self._list() if path.endswith(".py"))

    @cached_property
    def _folders(self) -> frozenset[str]:
        """All folders that hold Python files at some depth, each with a slash at its end."""
        parents = {parent for path in self._files for parent in PurePosixPath(path).parents}
        return frozenset(f"{parent}/" for parent in parents if parent.name)

    @cached_property
    def _places(self) -> list[str]:
        packages = {path.removesuffix("__init__.py") for path in self._files if path.endswith("/__init__.py")}
        outside = (folder for folder in self._folders if packages.isdisjoint(_with_parents(folder)))
        return ["", *sorted(outside, key=lambda folder: (folder.count("/"), folder))]

    def _list(self) -> Iterable[str]:
        """Paths from the source's root, with forward slashes."""
        raise NotImplementedError

    def _bytes(self, path: str) -> bytes:
        raise NotImplementedError


def _with_parents(folder: str) -> Iterator[str]:
    """``a/b/c/``: ``a/``, ``a/b/``, ``a/b/c/``."""
    for index, letter in enumerate(folder):
        if letter == "/":
            yield folder[: index + 1]


class Folder(_Files):
    """A checkout, or a site-packages; folders whose name begins with a dot are passed over."""

    def __init__(self, folder: Path, name: str = "") -> None:
        super().__init__(name or folder.name)
        self._folder = folder

    def _list(self) -> Iterator[str]:
        pending = [self._folder]
        while pending:
            for path in pending.pop().iterdir():
                if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                    pending.append(path)
                elif path.suffix == ".py":
                    yield path.relative_to(self._folder).as_posix()

    def _bytes(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()


class Wheel(_Files):
    def __init__(self, wheel: Path, name: str = "") -> None:
        super().__init__(name or " ".join(wheel.stem.split("-")[:2]))
        try:
            self._archive = zipfile.ZipFile(wheel)
        except zipfile.BadZipFile as error:
            raise MegatronRLPatchesError(f"{wheel}: {error}") from None

    def _list(self) -> list[str]:
        return self._archive.namelist()

    def _bytes(self, path: str) -> bytes:
        return self._archive.read(path)


class GitTree(_Files):
    """A commit of a repository; a bare one will do."""

    def __init__(self, repository: Path, revision: str, name: str = "") -> None:
        root = repository.parent if repository.name == ".git" else repository
        super().__init__(name or f"{root.name.removesuffix('.git')} {revision}")
        self._repository = repository
        found = self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        self._commit = found.decode().strip()

    def _git(self, *arguments: str) -> bytes:
        command = ["git", "-C", str(self._repository), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            raise MegatronRLPatchesError(
                "git is not installed: it is needed for REPOSITORY@REVISION"
            ) from None
        if done.returncode:
            told = done.stderr.decode(errors="replace").strip()
            raise MegatronRLPatchesError(f"{' '.join(command)}: {told}")
        return done.stdout

    def _list(self) -> list[str]:
        names = self._git("ls-tree", "-r", "-z", "--full-tree", "--name-only", self._commit)
        return names.decode(errors="replace").split("\0")

    def _bytes(self, path: str) -> bytes:
        return self._git("cat-file", "blob", f"{self._commit}:{path}")


def open_source(source: str) -> Source:
    """A wheel, a folder, or ``REPOSITORY@REVISION``; with ``NAME=`` before it, it is called NAME in reports.

    Raises:
        MegatronRLPatchesError: it is none of these.
    """
    if opened := _open(source):
        return opened
    name, _, unnamed = source.partition("=")
    if name and (opened := _open(unnamed, name)):
        return opened
    raise MegatronRLPatchesError(
        f"{source!r} is neither a folder, nor a .whl file, nor REPOSITORY@REVISION of a git repository"
    )


def _open(source: str, name: str = "") -> Source | None:
    path = Path(source)
    if source and path.is_dir():
        return Folder(path.resolve(), name)
    if path.suffix == ".whl" and path.is_file():
        return Wheel(path, name)
    repository, _, revision = source.rpartition("@")
    if repository and Path(repository).is_dir():
        return GitTree(Path(repository).resolve(), revision, name)
    return None
