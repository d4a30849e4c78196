"""Releases of megatron-core, as wheels from the registry; they are unpacked or read, never installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

# Release -> the Python and the platform that a wheel of it is for.
PLATFORMS = {
    "0.12.3": ("3.11", "manylinux_2_28_aarch64"),
    "0.13.1": ("3.11", "manylinux_2_28_aarch64"),
    "0.14.0": ("3.12", "manylinux_2_28_x86_64"),
    "0.15.3": ("3.12", "manylinux_2_28_x86_64"),
    "0.16.1": ("3.12", "manylinux_2_28_x86_64"),
    "0.17.1": ("3.12", "manylinux_2_28_x86_64"),
    "0.18.2": ("3.12", "manylinux_2_28_x86_64"),
    "0.19.2": ("3.12", "manylinux_2_28_x86_64"),
}
# What a release needs beside what the installed one does: numpy 1 for checkpoints of several ranks, and
# triton, which is imported although no kernel runs.
NUMPY, TRITON = "numpy<2", "triton"
NEEDS = dict.fromkeys(("0.12.3", "0.13.1", "0.14.0", "0.15.3"), NUMPY)
NEEDS |= dict.fromkeys(("0.18.2", "0.19.2"), TRITON)


def wheel(release: str, folder: Path) -> Path:
    """Download the wheel of a release into a folder."""
    python, platform = PLATFORMS[release]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    wanted = ["--python-version", python, "--platform", platform, f"megatron-core=={release}"]
    subprocess.run([*pip, "--dest", str(folder), *wanted], check=True, timeout=120)
    [path] = folder.glob(f"megatron_core-{release}-*.whl")
    return path


def put_first(release: str, folder: Path) -> None:
    """Unpack a release to where it comes first on the path, of this process and of those that it starts.

    Its extension, which is of another Python, is not loaded; Megatron does without.
    """
    unpacked = folder / release
    if not unpacked.exists():
        with zipfile.ZipFile(wheel(release, folder)) as archive:
            archive.extractall(unpacked)
    paths = [str(unpacked)]
    if requirement := NEEDS.get(release):
        paths.append(str(_installed(requirement, folder)))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def _installed(requirement: str, folder: Path) -> Path:
    target = folder / requirement
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", str(target), requirement], check=True, timeout=300)
    return target
