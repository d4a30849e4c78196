"""Functions that benchmarks compare, each as its own framework calls it."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .measure import Call, why

CHECKOUTS = {
    "slime": "SLIME_DIR",
    "verl": "VERL_DIR",
    "nemo-rl": "NEMO_RL_DIR",
    "OpenClaw-RL": "OPENCLAW_DIR",
    "SkyRL": "SKYRL_DIR",
    "trl": "TRL_DIR",
}


@dataclass(frozen=True)
class Candidate:
    """A function, and what has to be loaded for it.

    Attributes:
        function: takes what ``needs`` returns, if there is one, before its other arguments.
        needs: is called where the function is measured; what it raises then is why that is left out.
        modes: what it is measured at; everything if there are none.
    """

    name: str
    function: Callable[..., Any]
    needs: Callable[[], Any] | None = None
    splits_vocabulary: bool = True
    modes: tuple[str, ...] = ()


def calls(
    candidates: Iterable[Candidate],
    call: Callable[[Any], Call],
    left_out: dict[str, str],
    ranks: int = 1,
) -> dict[str, Call]:
    """Return the calls of the functions that can be loaded here; note in ``left_out`` why others cannot."""
    loaded = {}
    for candidate in candidates:
        function = candidate.function
        try:
            if ranks > 1 and not candidate.splits_vocabulary:
                raise NotImplementedError("does not split the vocabulary")
            loaded[candidate.name] = call(
                partial(function, candidate.needs()) if candidate.needs else function
            )
        except Exception as error:  # triton raises what it likes where there is no driver
            left_out[candidate.name] = why(error)
    return loaded


def checkout(package: str, module: str) -> Callable[[], Any]:
    """Return what imports a module from the package's checkout, else from what is installed."""
    return partial(_from_checkout, package, module)


def _from_checkout(package: str, module: str) -> Any:
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


SLIME = checkout("slime", "slime.utils.ppo_utils")
NEMO_RL = checkout("nemo-rl", "nemo_rl.distributed.model_utils")


@cache
def definition(file: Path, name: str, *needed: str) -> Any:
    """Return one function or class of a file, without importing what the rest of the file needs.

    Args:
        needed: other functions and classes of the file that it uses.
    """
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in (name, *needed)]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(tree, file, "exec"), scope)
    return scope[name]


def revisions(title: str, *packages: str) -> str:
    """Return a sentence with the commit of each package's checkout, or the release that is there."""
    listed = ", ".join(_revisions(packages))
    return f"{title}: {listed}." if listed else ""


def _revisions(packages: Iterable[str]) -> Iterator[str]:
    for package in packages:
        folder = os.environ.get(CHECKOUTS.get(package, ""))
        if not folder:
            with suppress(PackageNotFoundError):
                yield f"{package} {version(package)}"
        elif release := next(Path(folder).glob("*.dist-info"), None):  # of an unpacked wheel
            yield release.stem.replace("-", " ")
        else:
            command = ["git", "-C", folder, "rev-parse", "--short=9", "--show-prefix", "HEAD"]
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            prefix, _, commit = shown.partition("\n")
            # If there is a prefix, the folder is a part of some other repository.
            yield f"{package} {commit.strip() if commit and not prefix else '(checkout)'}"
