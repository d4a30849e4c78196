"""Where source text comes from: this environment, a folder, a wheel, a git tree. Nothing is imported."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ..errors import MegatronRLPatchesError

#: The text of modules, by their dotted name.
Source: TypeAlias = "Environment | Files"


class Environment:
    """What ``import`` would find in this process, without importing it. It looks for each module once."""

    name = "this environment"

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def has_package(self, package: str) -> bool:
        """Return whether the package or module is there. A bare folder is not: any checkout would be one."""
        return self.file_of(package) is not None

    def file_of(self, module: str) -> str | None:
        """Return the file that ``import`` would execute."""
        spec = self.find_spec(module)
        return spec.origin if spec is not None and spec.has_location else None

    def read(self, module: str) -> str | None:
        """Return the module's source text, ``None`` when there is no such module."""
        spec, file = self.find_spec(module), self.file_of(module) or ""
        if spec and (get_source := getattr(spec.loader, "get_source", None)):
            return get_source(spec.name)
        # The loader of a hook that rewrites modules may not offer their text.
        return importlib.util.decode_source(Path(file).read_bytes()) if file.endswith(".py") else None

    def find_spec(self, module: str) -> ModuleSpec | None:
        """Return what ``import`` would find, a bare folder included; parents are not imported for it."""
        if module not in self._specs:
            parent = module.rpartition(".")[0]
            above = self.find_spec(parent) if parent else None
            locations = above.submodule_search_locations if above else None
            is_possible = not parent or locations is not None
            loaded = getattr(sys.modules.get(module), "__spec__", None) if is_possible else None
            self._specs[module] = loaded or (_search(module, locations) if is_possible else None)
        return self._specs[module]


def _search(name: str, locations: list[str] | None) -> ModuleSpec | None:
    """Ask those finders of which it is certain that they import nothing.

    Classes, such as ``PathFinder`` and the finders of setuptools' editable installs, look a name up. Some
    instances are import hooks, which import a name's parents: they are asked once those are imported.
    """
    parent = name.rpartition(".")[0]
    for finder in list(sys.meta_path):
        spec = None
        if finder is PathFinder and locations is not None:
            # With its whole name, a bare folder needs its parent imported; its own list follows `sys.path`.
            spec = PathFinder.find_spec(name.rpartition(".")[2], locations)
            if spec is not None and spec.loader is None:
                spec.submodule_search_locations = [*(spec.submodule_search_locations or ())]
        elif isinstance(finder, type) or not parent or parent in sys.modules:
            # Somebody else's finder may be broken; the import itself will say so.
            with suppress(Exception):
                spec = finder.find_spec(name, locations)
        if spec is not None:
            return spec
    return None


class Files:
    """What ``import`` would find in a list of files.

    Every folder that is not inside a package is a place to import from, the shallowest first, so that layouts
    (``src/``, ``slime/slime/``) need no options. ``paths`` have forward slashes; ``content`` reads one.
    """

    def __init__(self, name: str, paths: Iterable[str], content: Callable[[str], bytes]) -> None:
        self.name = name
        self._files = {path for path in paths if path.endswith(".py")}
        # Those that hold Python files at some depth, each with a slash at its end.
        self._folders = {f"{parent}/" for path in self._files for parent in PurePosixPath(path).parents[:-1]}
        packages = tuple(folder for folder in self._folders if f"{folder}__init__.py" in self._files)
        outside = (folder for folder in self._folders if not folder.startswith(packages))
        self._places = ["", *sorted(outside, key=lambda folder: (folder.count("/"), folder))]
        self._text = cache(lambda path: importlib.util.decode_source(content(path)))

    def has_package(self, package: str) -> bool:
        return self._find(package) is not None

    def read(self, module: str) -> str | None:
        file = self._find(module)
        return None if file is None else self._text(file)

    def _find(self, module: str) -> str | None:
        """Look up each part as Python does: the first package or module wins, bare folders add up."""
        file, places = None, self._places
        for part in module.split("."):
            names = [f"{place}{part}" for place in places]
            possible = (f"{name}{end}" for name in names for end in ("/__init__.py", ".py"))
            file = next((path for path in possible if path in self._files), None)
            folders = [f"{name}/" for name in names if f"{name}/" in self._folders]
            places = folders if file is None else [file.removesuffix("__init__.py")]
        return file


def open_source(source: str) -> Source:
    """Open a wheel, a folder, or ``REPOSITORY@REVISION``; ``NAME=`` before it is its name in reports.

    Raises:
        MegatronRLPatchesError: it is none of these.
    """
    name, _, unnamed = source.partition("=")
    if opened := _open(source) or (_open(unnamed, name) if name else None):
        return opened
    raise MegatronRLPatchesError(
        f"{source!r} is neither a folder, nor a .whl file, nor REPOSITORY@REVISION of a git repository"
    )


def _open(source: str, name: str = "") -> Source | None:
    path = Path(source)
    if source and path.is_dir():
        folder, paths = path.resolve(), []
        for parent, folders, files in os.walk(folder):
            folders[:] = [each for each in folders if not each.startswith(".")]
            paths += [Path(parent, file).relative_to(folder).as_posix() for file in files]
        return Files(name or folder.name, paths, lambda path: (folder / path).read_bytes())
    if path.suffix == ".whl" and path.is_file():
        try:
            return _unzipped(path, name or " ".join(path.stem.split("-")[:2]))
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
            raise MegatronRLPatchesError(f"{path}: {error}") from None
    repository, _, revision = source.rpartition("@")
    if repository and Path(repository).is_dir():
        return _open_commit(Path(repository).resolve(), revision, name)
    return None


def _unzipped(file: Path | io.BytesIO, name: str) -> Files:
    with zipfile.ZipFile(file) as archive:
        files = {path: archive.read(path) for path in archive.namelist() if path.endswith(".py")}
    return Files(name, files, files.__getitem__)


def _open_commit(repository: Path, revision: str, name: str) -> Files:
    """Read the Python files of a commit; the repository may be bare."""
    root = repository.parent if repository.name == ".git" else repository
    commit, folder = (
        os.fsdecode(_git(repository, "rev-parse", *options)).rstrip("\n")
        for options in (["--verify", "--end-of-options", f"{revision}^{{commit}}"], ["--absolute-git-dir"])
    )
    # Run in .git, git archive takes the whole tree. In a folder of the work tree it takes only that.
    content = _git(Path(folder), "archive", "--format=zip", "-0", commit, "--", "*.py")
    return _unzipped(io.BytesIO(content), name or f"{root.name.removesuffix('.git')} {revision}")


def _git(repository: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise MegatronRLPatchesError("git is not installed: it is needed for REPOSITORY@REVISION") from None
    if done.returncode:
        raise MegatronRLPatchesError(f"{' '.join(command)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
