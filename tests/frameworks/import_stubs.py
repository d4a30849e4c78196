"""Packages that frameworks import and that training a tiny model on a CPU never calls.

A stub stands in for a package only where the real one is not installed. It gives a class for every
capitalized name, so that frameworks can derive from it, and a function that does nothing for every other.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import typing
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

#: Trackers, inference engines, schedulers of clusters, tokenizers, servers, GPU kernels.
PACKAGES = (
    "accelerate cloudpickle codetiming datasets fastapi httpx huggingface_hub omegaconf orjson pandas peft "
    "polars psutil ray regex sglang sglang_router six tensordict tokenizers transformers triton uvicorn "
    "wandb yaml"
)
#: What Megatron-Bridge imports besides.
OF_BRIDGE = "einops google modelopt tensorboard"


class _Stub(ModuleType):
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = (
            type(name, (_Anything,), {"__module__": self.__name__}) if name[0].isupper() else _nothing
        )
        setattr(self, name, value)
        return value


class _Anything:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def add_cli_args(*args: Any, **kwargs: Any) -> None:
        """Add nothing to a command line: there is no server."""


def _nothing(*args: Any, **kwargs: Any) -> Any:
    """Also a decorator, with and without arguments, that leaves its function or class alone."""
    return args[0] if args and callable(args[0]) else _nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def prepare(paths: list[str]) -> None:
    importlib.import_module("torch._dynamo")  # tensordict imports it, and it fails with a stub of triton.
    # Ahead of an installed megatron-core: a checkout's megatron.training goes with its megatron.core.
    sys.path[:0] = paths
    install()


def job_of(framework: str, paths: list[str]) -> Any:
    """Make a framework importable; return its class of jobs."""
    prepare(paths)
    return importlib.import_module("tests.frameworks.real_jobs").JOBS[framework]


def install(packages: str = PACKAGES) -> None:
    """Make ``import`` of those packages that are not installed succeed in this process, from now on."""
    missing = [
        name
        for name in packages.split()
        if name not in sys.modules and importlib.util.find_spec(name) is None
    ]
    sys.meta_path.append(_Finder(missing))
    if not hasattr(typing, "override"):  # Python < 3.12, which recent Megatron-LM does not support
        typing.override = lambda method: method  # type: ignore[attr-defined]
