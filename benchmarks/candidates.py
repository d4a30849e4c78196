"""Functions that benchmarks compare, each as its own framework calls it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .measure import Call, why
from .page import commit_of

CHECKOUTS = {
    "slime": "SLIME_DIR",
    "verl": "VERL_DIR",
    "nemo-rl": "NEMO_RL_DIR",
    "OpenClaw-RL": "OPENCLAW_DIR",
    "SkyRL": "SKYRL_DIR",
    "AReaL": "AREAL_DIR",
    "TRL": "TRL_DIR",
    "TRL before 1.13": "TRL_BEFORE_DIR",
}


@dataclass(frozen=True)
class Candidate:
    """A function, and what has to be loaded for it.

    Attributes:
        function: takes what ``needs`` returns, if there is one, before its other arguments.
        needs: is called where the function is measured; what it raises then is why that is left out.
    """

    name: str
    function: Callable[..., Any]
    needs: Callable[[], Any] | None = None
    splits_vocabulary: bool = True

    def load(self) -> Callable[..., Any]:
        return self.function if self.needs is None else partial(self.function, self.needs())


def calls(
    candidates: Iterable[Candidate],
    call: Callable[[Any], Call],
    left_out: dict[str, str],
    ranks: int = 1,
) -> dict[str, Call]:
    """Return the calls of the functions that can be loaded here; note in ``left_out`` why others cannot."""
    loaded = {}
    for candidate in candidates:
        try:
            if ranks > 1 and not candidate.splits_vocabulary:
                raise NotImplementedError("does not split the vocabulary")
            loaded[candidate.name] = call(candidate.load())
        except Exception as error:  # triton raises what it likes where there is no driver
            left_out[candidate.name] = why(error)
    return loaded


def checkout(package: str, module: str) -> Callable[[], Any]:
    """Return what imports a module from the package's checkout, else from what is installed."""
    return partial(from_checkout, package, module)


def from_checkout(package: str, module: str) -> Any:
    variable = CHECKOUTS[package]
    folder = os.environ.get(variable)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not folder and error.name == module.partition(".")[0]:
            raise ModuleNotFoundError(f"not installed, and {variable} not set") from error
        raise


def revisions(packages: Iterable[str]) -> list[str]:
    """Return the release or the commit of each checkout that an environment variable names."""
    known = []
    for package in packages:
        if folder := os.environ.get(CHECKOUTS[package]):
            release = next(Path(folder).glob("*.dist-info"), None)  # of an unpacked wheel
            known.append(release.stem.replace("-", " ") if release else f"{package} {commit_of(folder)}")
    return known
