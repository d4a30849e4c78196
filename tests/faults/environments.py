"""An environment of this Python with the product in it, made without pip: cheap enough to be broken often.

It holds the files that a wheel puts there, wrapt, a stand-in for Megatron, and two packages of nobody's:
`bystander`, and `megatron.bystander`, which shares its root with Megatron, so that importing it fires the
trigger.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import wrapt

import _megatron_rl_patches_startup as startup
import megatron_rl_patches

ROOT = Path(__file__).parents[2]
UNRELATED = "import bystander, decimal"
FIRES = "import megatron.bystander"
IMPORTS_MEGATRON = "import megatron.core.distributed.distributed_data_parallel"


@dataclass(frozen=True)
class Environment:
    path: Path

    @classmethod
    def make(cls, path: Path) -> Environment:
        venv.EnvBuilder(symlinks=True).create(path)
        environment = cls(path)
        site_packages = environment.site_packages
        shutil.copy(ROOT / "startup" / "megatron_rl_patches_startup.pth", site_packages)
        shutil.copy(startup.__file__, site_packages)
        for module in (megatron_rl_patches, wrapt):
            source = Path(str(module.__file__)).parent
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, site_packages / source.name, ignore=ignore)
        (site_packages / "stand_in.pth").write_text(f"{ROOT / 'tests/packaging/stand_in'}\n")
        for name in ("bystander", "megatron/bystander"):
            (site_packages / name).mkdir(parents=True)
            (site_packages / name / "__init__.py").touch()
        return environment

    @property
    def site_packages(self) -> Path:
        (found,) = self.path.glob("lib/python*/site-packages")
        return found

    def run(self, code: str, variables: Mapping[str, str], *options: str) -> Outcome:
        """The process sees nothing but these variables."""
        command = [self.path / "bin" / "python", *options, "-c", code]
        done = subprocess.run(command, env=dict(variables), cwd=self.path, capture_output=True, timeout=60)
        return Outcome(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The one line on stderr, or none; any more, or a process that fails, is an error of the test."""
        lines = self.stderr.split("\n")[:-1] if self.stderr else []
        assert self.code == 0 and len(lines) <= 1, self
        return lines[0] if lines else ""


@contextmanager
def set_aside(*paths: Path) -> Iterator[None]:
    """For the block these are gone; what the block puts in their places is gone after it."""
    for path in paths:
        path.rename(path.with_name(f"{path.name}.aside"))
    try:
        yield
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.aside").rename(path)
