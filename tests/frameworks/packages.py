"""Frameworks and releases from the registry: wheels are read or put first on the path, never installed."""

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

VERL = "verl 0.9.1"
BRIDGE = "megatron-bridge 0.3.1"
#: What the batches of its engine are made of.
TENSORDICT = ("tensordict 0.15.3", "pyvers 0.2.3")
#: What reads its command line. Other releases need a package without a wheel, or refuse verl's files.
HYDRA = ("hydra-core 1.4.0.dev1", "omegaconf 2.4.0", "PyYAML 6.0.3")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")


class Packages:
    """Downloads each wheel once, into a folder that one session of tests shares."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.wheel = cache(self._wheel)
        self.unpacked = cache(self._unpacked)

    def _wheel(self, release: str) -> Path:
        """``NAME VERSION``; of a compiled package any wheel will do, as only its Python code is used."""
        package, version = release.split()
        folder = self._folder / f"{package}-{version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        tags = [f"--platform={platform}" for platform in PLATFORMS]
        command = [*pip, *tags, "--python-version=3.12", f"--dest={folder}", f"{package}=={version}"]
        subprocess.run(command, check=True, timeout=120)
        [wheel] = folder.glob("*.whl")
        return wheel

    def _unpacked(self, release: str) -> Path:
        wheel = self.wheel(release)
        folder = wheel.with_suffix("")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        return folder


def built_on(wheel: Path) -> str:
    """The date in the wheel: of its youngest file."""
    with zipfile.ZipFile(wheel) as archive:
        year, month, day = max(entry.date_time for entry in archive.infolist())[:3]
    return f"{year:04}-{month:02}-{day:02}"
