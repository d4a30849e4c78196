"""A host package on disk, patches on it, and an engine of one's own for each test."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.engine import announce, installer, registry
from megatron_rl_patches.engine.spec import Patch, Site

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
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``host(**files)`` writes a package with ``model`` and ``actor`` modules and gives its name."""
    names = []

    def write(**files: str) -> str:
        name = f"host{next(_numbers)}"
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
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Patch]]:
    """A fresh engine; patches put into the dictionary are the registered ones."""
    patches: dict[str, Patch] = {}
    fresh = installer.Installer()
    monkeypatch.setattr(installer, "installer", fresh)
    monkeypatch.setattr(registry, "patches", lambda: patches)
    monkeypatch.setattr(announce, "done", False)
    monkeypatch.setattr(announce, "_warned", set())
    yield patches
    fresh.remove(fresh.records_of(patches))


def tag(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An adapter that shows in the result how often it was there."""
    return ("patched", wrapped(*args, **kwargs))


def patch_of(host: str, *qualnames: str, name: str = "tagging", adapter: Any = tag, **options: Any) -> Patch:
    """A patch with one site per qualified name in ``host.model``."""
    patch = Patch(name=name, summary="tags results")
    for qualname in qualnames:
        patch.wrap(f"{host}.model", qualname, **options)(adapter)
    return patch


def sites_in(settings: Settings) -> tuple[Site, ...]:
    """For ``Patch.configured``: a site for every train function."""
    return tuple(Site(*path.split(":"), tag) for path in settings.train_functions)
