"""A line for every page and plot: the machine, the versions and the date of the measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def description() -> str:
    """Return one line with device, versions and date."""
    cores = f"{os.cpu_count()} CPU cores"
    device = f"{torch.cuda.get_device_name()}, {cores}" if torch.cuda.is_available() else cores
    versions = ", ".join(_versions("torch", "megatron-core"))
    python = f"CPython {platform.python_version()}, {platform.system()} {platform.machine()}"
    return f"{device}, {versions}, {python}, {datetime.date.today().isoformat()}"


def _versions(*packages: str) -> Iterator[str]:
    for package in packages:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"


def commit_of(folder: str) -> str:
    """Return the commit of a checkout, or "(checkout)" for a folder that is none of its own."""
    command = ["git", "-C", folder, "rev-parse", "--short=9", "--show-prefix", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    prefix, _, commit = result.stdout.partition("\n")
    # If there is a prefix, the folder is a part of some other repository.
    return "(checkout)" if result.returncode or prefix else commit.strip()


def stamp(figure: Any) -> None:
    """Write the description at the foot of a matplotlib figure with constrained layout."""
    figure.supxlabel(description(), x=0.995, ha="right", fontsize=6, color="0.4")
