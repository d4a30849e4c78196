"""A sandbox for the shell blocks of the pages: cheap commands run, and stand-ins replace the others.

Stand-ins for ``ray``, ``pip``, ``make``, ... come first on ``PATH``; each records its arguments. The stand-in
of a launcher runs the program here, in one process, with the variables that its workers would have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.worlds.environment import without_ours

ROOT = Path(__file__).parents[2]
STAND_IN_MEGATRON = ROOT / "tests" / "packaging" / "stand_in"
RECORDED = ("make", "pip", "pre-commit", "pytest", "ray", "torchrun", "uv")

_RECORD = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps({{"command": name, "arguments": arguments}}) + "\\n")

def launched(arguments, **variables):
    code = subprocess.run(arguments, env={{**os.environ, **variables}}).returncode
    sys.exit(code)

if name == "ray" and arguments[:2] == ["job", "submit"]:
    split = arguments.index("--")
    option = next(a for a in arguments[:split] if a.startswith("--runtime-env-json="))
    launched(arguments[split + 1 :], **json.loads(option.partition("=")[2])["env_vars"])
if name == "torchrun":
    script = next(i for i, argument in enumerate(arguments) if argument.endswith(".py"))
    launched([sys.executable, *arguments[script:]], RANK="0", WORLD_SIZE="1")
"""


@dataclass(frozen=True)
class Call:
    command: str
    arguments: list[str]


class Sandbox:
    """A folder with the programs that the pages start, and a record of the calls in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "calls.jsonl"
        commands = folder / "bin"
        commands.mkdir()
        for name in RECORDED:
            command = commands / name
            command.write_text(_RECORD.format(python=sys.executable, log=str(self._log)))
            command.chmod(0o755)
        self._path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def add_program(self, name: str) -> None:
        """Add a framework's training script, which imports Megatron and prints the patches in place.

        A folder above that begins with ``of_`` has the packages of a framework.
        """
        program = self.folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        trainer = Path(__file__).with_name("trainer.py").read_text()
        program.write_text(f"import sys; sys.path.insert(0, {str(STAND_IN_MEGATRON)!r})\n{trainer}")
        if name.startswith("of_"):
            for package in [*Path(name).parents][:-2]:
                (self.folder / package / "__init__.py").touch()

    def run(self, code: str, *, checkout: str = "", timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Run the lines in a shell; ``checkout`` is a folder whose packages they can import."""
        folders = (checkout and str(self.folder / checkout), str(ROOT), os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, folders))
        return subprocess.run(
            [shutil.which("bash") or "bash", "-eo", "pipefail", "-c", code],
            cwd=self.folder,
            env={**without_ours(), "PATH": self._path, "PYTHONPATH": path, "COLUMNS": "200"},
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    def calls(self) -> list[Call]:
        """Return the calls since the last time that this method was called."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return [Call(**json.loads(line)) for line in lines]
