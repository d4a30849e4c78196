"""A framework package on disk, patches on it, and an engine of one's own for each test."""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from megatron_rl_patches import status
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.engine.patch import Patch
from tests.worlds.files import write

PLAIN, PATCHED = ("trained", "m", 1), ("patched", ("trained", "m", 1))
MODEL = """
def train(model, steps=1):
    '''Train it.'''
    return ("trained", model, steps)

def save(model):
    return ("saved", model)

class Base:
    def fit(self, x):
        return ("fit", x)

class Trainer(Base):
    def step(self, x):
        return ("step", x)

    @staticmethod
    def scale(x):
        return 2 * x

    @classmethod
    def build(cls, x):
        return (cls.__name__, x)
"""
ACTOR = "from .model import save, train\nfrom .model import train as run\n"
#: For ``model``: a class that refuses to have its methods replaced.
REFUSING = """
class Meta(type):
    def __setattr__(cls, name, value): raise {}
class Trainer(metaclass=Meta):
    def step(self, x): return x
def train(model): return ("trained", model, 1)
"""
#: For ``model``: its source does not show that somebody has replaced ``train``.
REPLACED = f"{MODEL}\nimport posixpath\nglobals()['train'] = posixpath.join"

_numbers = itertools.count()


@dataclass(frozen=True)
class Package:
    """A framework on disk: its modules are attributes, imported when they are read."""

    name: str

    def __getattr__(self, module: str) -> Any:
        if module.startswith("_"):
            raise AttributeError(module)
        return importlib.import_module(f"{self.name}.{module}")

    def __str__(self) -> str:
        return self.name


Framework = Callable[..., Package]
Engine = dict[str, Patch]


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Framework]:
    """``framework(**files)`` writes a package, with modules ``model`` and ``actor`` at least."""
    names = []

    def make(**files: str) -> Package:
        names.append(f"framework{next(_numbers)}")
        modules = {"__init__": "", "model": MODEL, "actor": ACTOR, **files}
        write(tmp_path / names[-1], {f"{module}.py": text for module, text in modules.items()})
        return Package(names[-1])

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for module in list(sys.modules):
        if module.partition(".")[0] in names:
            del sys.modules[module]


@pytest.fixture
def engine(monkeypatch: MonkeyPatch) -> Iterator[Engine]:
    """A fresh engine; patches put into the dictionary are the registered ones."""
    patches: Engine = {}
    fresh = installer.Installer()
    monkeypatch.setattr(installer, "installer", fresh)
    monkeypatch.setattr(registry, "patches", lambda: patches)
    yield patches
    fresh.remove(patches)


def tag(call: Call) -> Any:
    """An adapter that shows in the result how often it was there."""
    return ("patched", call())


def patch_of(
    framework: Package | str, *qualnames: str, name: str = "tagging", adapter: Any = tag, **options: Any
) -> Patch:
    """A patch with one site per qualified name in ``framework.model``."""
    patch = Patch(name=name, summary="tags results", options=Options)
    for qualname in qualnames:
        patch.wrap(f"{framework}.model", qualname, **options)(adapter)
    return patch


@pytest.fixture
def tagged(framework: Framework, engine: Engine) -> Framework:
    """``tagged(qualname, ...)`` writes a framework and registers the patch "tagging" of it."""

    def register(*qualnames: str, files: dict[str, str] | None = None, **options: Any) -> Package:
        package = framework(**files or {})
        engine["tagging"] = patch_of(package, *qualnames, **options)
        return package

    return register


def verdicts() -> dict[str, tuple[str, str]]:
    """Return state and reason of each site, by its target without the framework: "model.train"."""
    return {site.target.partition(".")[2]: (site.state, site.reason) for site in status()}


def states() -> dict[str, str]:
    return {target: state for target, (state, _) in verdicts().items()}


@dataclass(frozen=True)
class Options:
    """For ``Patch.options``."""

    inference_roles: tuple[str, ...] = ()
