"""A framework package on disk, patches on it, and an engine of one's own for each test."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_rl_patches import apply
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.engine.patch import Patch, Site

Framework = Callable[..., str]
Tagged = Callable[..., str]
Engine = dict[str, Patch]

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
ACTOR = "from .model import train\nfrom .model import train as run\n"

_numbers = itertools.count()


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Framework]:
    """``framework(**files)`` writes a package with ``model`` and ``actor`` modules and gives its name."""
    names = []

    def write(**files: str) -> str:
        name = f"framework{next(_numbers)}"
        folder = tmp_path / name
        folder.mkdir()
        for module, text in {"__init__": "", "model": MODEL, "actor": ACTOR, **files}.items():
            (folder / f"{module}.py").write_text(text)
        names.append(name)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for module in list(sys.modules):
        if module.partition(".")[0] in names:
            del sys.modules[module]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A fresh engine; patches put into the dictionary are the registered ones."""
    patches: dict[str, Patch] = {}
    fresh = installer.Installer()
    monkeypatch.setattr(installer, "installer", fresh)
    monkeypatch.setattr(registry, "patches", lambda: patches)
    yield patches
    fresh.remove(patches)


def tag(call: Call) -> Any:
    """An adapter that shows in the result how often it was there."""
    return ("patched", call())


def roles(call: Call) -> Any:
    """An adapter that shows an option in place of the result."""
    return call.options.inference_roles


def patch_of(
    framework: str, *qualnames: str, name: str = "tagging", adapter: Any = tag, **options: Any
) -> Patch:
    """A patch with one site per qualified name in ``framework.model``."""
    patch = Patch(name=name, summary="tags results", options=Options)
    for qualname in qualnames:
        patch.wrap(f"{framework}.model", qualname, **options)(adapter)
    return patch


@pytest.fixture
def tagged(framework: Framework, engine: Engine) -> Tagged:
    """``tagged(qualname, ...)`` writes a framework, registers the patch "tagging" of it, gives its name."""

    def register(*qualnames: str, files: dict[str, str] | None = None, **options: Any) -> str:
        name = framework(**files or {})
        engine["tagging"] = patch_of(name, *qualnames, **options)
        return name

    return register


@pytest.fixture
def patched(tagged: Tagged) -> ModuleType:
    """The ``model`` module of a framework whose ``train`` is patched."""
    name = tagged("train")
    apply()
    return importlib.import_module(f"{name}.model")


@dataclass(frozen=True)
class Options:
    """For ``Patch.options``."""

    train_functions: tuple[str, ...] = ()
    inference_roles: tuple[str, ...] = ()


def sites_in(options: Options) -> tuple[Site, ...]:
    """For ``Patch.configured``: a site for every train function."""
    return tuple(Site(*path.split(":"), tag) for path in options.train_functions)
