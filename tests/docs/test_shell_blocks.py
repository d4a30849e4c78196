"""Every shell line of the README, the documentation and the launch scripts, in a sandbox.

Cheap commands run. Stand-ins for ``ray``, ``pip``, ``make``, ... come first on ``PATH`` and record their
arguments; that of a launcher runs the program here, in one process, with the variables that its workers would
have. Lines that start a cluster must reach a training process in which the patches are then in place, with
variables of ours that exist and parse.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.engine.settings import VARIABLE, Settings, parse_selection
from tests.docs import pages
from tests.docs.pages import ROOT
from tests.references.hugging_face import GEMMA_3_27B
from tests.worlds.files import git, write
from tests.worlds.program import without_ours

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

STAND_IN_MEGATRON = ROOT / "tests" / "packaging" / "stand_in"
RECORDED = ("docker", "make", "pip", "pre-commit", "pytest", "ray", "torchrun", "uv")
#: Training scripts of frameworks, which import Megatron and print the patches in place.
PROGRAMS = (
    *("train.py", "train_async.py", "train_rl.py", "scripts/run_qwen3_dense.py", "examples/run_grpo.py"),
    "examples/teacher_and_distillation.py",  # in place of the example, which test_examples.py runs
    # Apart from the others: where a framework can be imported, its functions are checked.
    *("launched/train.py", "of_verl/verl/trainer/main_ppo.py"),
)
HOOKS = "megatron_rl_patches.hooks"
# Not run, as it takes half a minute, and tests/real/test_demo.py runs it: its options are parsed.
DEMO = re.compile(r"\bmegatron-rl-patches demo\b(.*)")
RECORD = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([name, arguments]) + "\\n")

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

pytestmark = pytest.mark.slow


class Sandbox(NamedTuple):
    """A folder with the programs that the pages start, and a record of the calls in it."""

    folder: Path

    def run(self, code: str, checkout: str = "") -> subprocess.CompletedProcess[str]:
        """Run the lines in a shell; ``checkout`` is a folder whose packages they can import."""
        folders = (checkout and str(self.folder / checkout), str(ROOT), os.environ.get("PYTHONPATH"))
        commands = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        path = os.pathsep.join(filter(None, folders))
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-eo", "pipefail", "-c", code],
            cwd=self.folder,
            env={**without_ours(), "PATH": commands, "PYTHONPATH": path, "COLUMNS": "200"},
            text=True,
            capture_output=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
        return done

    def check_calls(self) -> None:
        """What stand-ins were called with since the last time would work."""
        log = self.folder / "calls.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            _check_call(*json.loads(line))
        log.unlink(missing_ok=True)


# As slime has it since v0.3.0.
CHECKPOINT = "checkpoint(function, args, batch, logits, use_reentrant=False)"


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    folder = tmp_path_factory.mktemp("sandbox")
    record = RECORD.format(python=sys.executable, log=str(folder / "calls.jsonl"))
    trainer = Path(__file__).with_name("trainer.py").read_text()
    trainer = f"import sys; sys.path.insert(0, {str(STAND_IN_MEGATRON)!r})\n{trainer}"
    config = json.dumps(GEMMA_3_27B)
    files = {
        **{f"bin/{name}": record for name in RECORDED},
        **dict.fromkeys(PROGRAMS, trainer),
        **dict.fromkeys(("of_verl/verl/__init__.py", "of_verl/verl/trainer/__init__.py"), ""),
        **dict.fromkeys(("config.json", "gemma-3-27b/config.json"), config),
        "launched/scripts/models/qwen3-4B.sh": "MODEL_ARGS=(--num-layers 36)\n",
        ".venv/bin/activate": "",
    }
    write(folder, files)
    for name in RECORDED:
        (folder / "bin" / name).chmod(0o755)
    # A repository of a framework with a tag and a remote branch, and a folder that is a checkout.
    for place in ("slime", "path/to/new/checkout"):
        shutil.copytree(ROOT / "tests/frameworks/stand_in/slime", folder / place / "slime")
    loss = folder / "slime/slime/backends/megatron_utils/loss.py"
    loss.write_text(loss.read_text().replace("checkpoint(function, args, batch, logits)", CHECKPOINT))
    branch = "update-ref refs/remotes/origin/main HEAD"
    for command in ("init -q", "add .", "commit -q -m x", "tag v0.3.0", branch):
        git(folder / "slime", *command.split())
    return Sandbox(folder)


def _pages_with(language: str) -> list[str]:
    return list(dict.fromkeys(block.page for block in pages.blocks(language)))


@pytest.mark.parametrize("page", _pages_with("bash"))
def test_bash(page: str, sandbox: Sandbox) -> None:
    for block in pages.blocks("bash", page):
        only_exports = all(line.startswith("export ") for line in block.code.splitlines())
        code = f"{block.code}python train.py" if only_exports else block.code
        printed = _printed(sandbox, code, "of_verl" if "verl" in page or "verl." in block.code else "")
        reached = [json.loads(line) for line in printed.splitlines() if line.startswith('{"patched"')]
        sandbox.check_calls()
        switched_on = (VARIABLE in block.code and "doctor" not in block.code) or HOOKS in block.code
        assert reached or not switched_on, f"{block.place}: no training process was reached"
        for process in reached:
            assert process["patched"] == switched_on, (block.place, process)
            if switched_on and HOOKS not in block.code:
                patches, unknown = parse_selection(process["variables"][VARIABLE])
                assert patches and not unknown and Settings.from_environment(process["variables"])


@pytest.mark.parametrize("page", _pages_with("console"))
def test_console(page: str, sandbox: Sandbox) -> None:
    """Commands, and the beginning of what they print."""
    for block in pages.blocks("console", page):
        code = block.code.replace("\\\n", "")
        for session in filter(str.strip, re.split(r"^\$ ", code, flags=re.MULTILINE)):
            command, _, shown = session.partition("\n")
            printed = " ".join(_printed(sandbox, command).split())
            assert re.search(_pattern(shown), printed), f"{shown}\n--- is not what is printed:\n{printed}"
    sandbox.check_calls()


def test_dockerfile(sandbox: Sandbox) -> None:
    """Its commands run here, where pip is a stand-in and doctor is not."""
    [block] = pages.blocks("dockerfile")
    code = block.code.replace("\\\n", "").replace("/opt/megatron_rl_patches", ".")
    sandbox.run("\n".join(re.findall(r"^RUN (.+)$", code, re.MULTILINE)))
    sandbox.check_calls()


@pytest.mark.parametrize("script", ["slime_run.sh", "verl_run.sh"])
def test_launch_scripts(script: str, sandbox: Sandbox) -> None:
    """The processes that the launcher starts have the patches; Ray and the framework are stand-ins."""
    script = f"SLIME={sandbox.folder / 'launched'} bash {ROOT / 'examples' / script}"
    assert json.loads(sandbox.run(script, "of_verl").stdout)["patched"] is True


_run_once = cache(Sandbox.run)


def _printed(sandbox: Sandbox, code: str, checkout: str = "") -> str:
    """Run the code, but an estimate only once, as it takes seconds and several pages show the same one."""
    for arguments in DEMO.findall(code):
        command = typer.main.get_command(app).commands["demo"]  # type: ignore[attr-defined]
        command.make_context("demo", shlex.split(arguments.partition("#")[0]))
    code = DEMO.sub("true", code).strip()
    run = _run_once if code.startswith("megatron-rl-patches estimate") else Sandbox.run
    return run(sandbox, code, checkout).stdout


def _check_call(command: str, arguments: list[str]) -> None:
    """What a stand-in was called with would work."""
    if command in ("pip", "uv"):
        _check_pip(arguments)
    elif command == "make":
        subprocess.run(["make", "-ns", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif command == "pytest":
        assert all((ROOT / path).exists() for path in arguments if "/" in path), arguments


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Checkouts, and what is installed in place of dependencies and is among them.
    checkouts = {"git+file:///my/clone@COMMIT", ".", *(f".[{e}]" for e in project["optional-dependencies"])}
    names = [a for a in arguments if not a.startswith("-") and a not in ("pip", "install")]
    assert "install" in arguments and names
    assert [name for name in names if name not in (*checkouts, *project["dependencies"])] == []


def _pattern(printed: str) -> str:
    """``...`` is anything; versions and paths are those of another machine; lines are broken elsewhere."""
    pattern = re.escape(" ".join(printed.split()))
    pattern = pattern.replace(r"\.\.\.", ".*").replace(r"\ ", " ")
    pattern = re.sub(r"/venv/\S*?(?=:? |$)", r"\\S+?", pattern)
    return re.sub(r"\d+\\\.\d+\\\.\d+(\\\+\w+)?", r"\\S+", pattern)
