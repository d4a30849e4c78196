"""Every shell line of the README and the documentation, in a sandbox.

Lines that start a cluster are run with stand-ins for its launchers: each must reach a training process in
which the patches are then in place, with variables of ours that exist and parse.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.engine.settings import VARIABLE, Settings, parse_selection
from tests.docs import pages
from tests.docs.pages import ROOT, Block
from tests.docs.sandbox import Call, Sandbox
from tests.unit.test_cli import GEMMA_3_27B

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

PROGRAMS = (
    "train.py",
    "train_async.py",
    "train_rl.py",
    "scripts/run_qwen3_dense.py",
    "examples/run_grpo.py",
)
HOOKS = "megatron_rl_patches.hooks"
# Commands that are not run, and what is checked instead: see _check_call and _check_demo.
DEMO = re.compile(r"\bmegatron-rl-patches demo\b(.*)")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    folder = tmp_path_factory.mktemp("sandbox")
    box = Sandbox(folder)
    for name in PROGRAMS:
        box.add_program(name)
    # Apart from the others: where a framework can be imported, its sites are judged.
    box.add_program("of_verl/verl/trainer/main_ppo.py")
    (folder / "gemma-3-27b").mkdir()
    for place in ("config.json", "gemma-3-27b/config.json"):
        (folder / place).write_text(json.dumps(GEMMA_3_27B))
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    _make_checkouts(folder)
    return box


def _make_checkouts(folder: Path) -> None:
    """A repository of a framework with a tag and a remote branch, and a folder that is a checkout."""
    for place in ("slime", "path/to/new/checkout"):
        shutil.copytree(ROOT / "tests/frameworks/stand_in/slime", folder / place / "slime")
    git = ["git", "-C", folder / "slime", "-c", "user.name=x", "-c", "user.email=x"]
    for command in (
        ["init", "-q", "-b", "main"],
        ["add", "."],
        ["commit", "-q", "-m", "x"],
        ["tag", "v0.3.0"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
    ):
        subprocess.run([*git, *command], check=True)


# --- bash


def _pages_with(language: str) -> list[str]:
    return list(dict.fromkeys(block.page for block in pages.in_language(language)))


@pytest.mark.parametrize("page", _pages_with("bash"))
def test_bash(page: str, sandbox: Sandbox) -> None:
    for block in pages.in_language("bash", page):
        _check_bash(block, sandbox)


def _check_bash(block: Block, sandbox: Sandbox) -> None:
    _check_demo(block.code)
    only_exports = all(line.startswith("export ") for line in block.code.splitlines())
    code = f"{block.code}python train.py" if only_exports else block.code
    done = _run(sandbox, code, "of_verl" if "verl" in block.page or "verl." in block.code else "")
    assert done.returncode == 0, f"{block.place}\n{done.stdout}{done.stderr}"
    reached = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"patched"')]
    for call in sandbox.calls():
        _check_call(call)
    switched_on = (VARIABLE in block.code and "doctor" not in block.code) or HOOKS in block.code
    assert reached or not switched_on, f"{block.place}: no training process was reached"
    for process in reached:
        assert process["patched"] == switched_on, (block.place, process)
        if switched_on and HOOKS not in block.code:
            patches, unknown = parse_selection(process["variables"][VARIABLE])
            assert patches and not unknown
            Settings.from_environment(process["variables"])


def _run(sandbox: Sandbox, code: str, checkout: str = "") -> subprocess.CompletedProcess[str]:
    """Run the code, but an estimate only once, as it takes seconds and several pages show the same one."""
    code = DEMO.sub("true", code).strip()
    run = _run_once if code.startswith("megatron-rl-patches estimate") else Sandbox.run
    return run(sandbox, code, checkout=checkout)


_run_once = cache(Sandbox.run)


def _check_demo(code: str) -> None:
    """It takes half a minute, and tests/real/test_demo.py runs it: here its options are parsed."""
    for arguments in DEMO.findall(code):
        command = typer.main.get_command(app).commands["demo"]  # type: ignore[attr-defined]
        command.make_context("demo", shlex.split(arguments.partition("#")[0]))


def _check_call(call: Call) -> None:
    """What a stand-in was called with would work."""
    command, arguments = call.command, call.arguments
    if command in ("pip", "uv"):
        _check_pip(arguments)
    elif command == "make":
        dry = ["make", "--dry-run", "--silent", *arguments]
        subprocess.run(dry, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif command == "torchrun":
        get_args_parser().parse_args(arguments)
    elif command == "pytest":
        assert all((ROOT / path).exists() for path in arguments if "/" in path), call
    elif command == "ray":
        assert arguments[0] == "start" or arguments[:2] == ["job", "submit"], call
    else:
        assert (ROOT / f".{command}-config.yaml").exists(), call


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [a for a in arguments if not a.startswith("-") and a not in ("pip", "install")]
    assert "install" in arguments and names
    for name in names:
        own = re.fullmatch(r"\.(?:\[(\w+)\])?", name)  # a checkout
        if own:
            assert own[1] is None or own[1] in project["optional-dependencies"]
        else:  # what is installed in place of the dependencies is among them
            assert name in project["dependencies"]


# --- console: commands, and the beginning of what they print


@pytest.mark.parametrize("page", _pages_with("console"))
def test_console(page: str, sandbox: Sandbox) -> None:
    sessions = [session for block in pages.in_language("console", page) for session in _sessions(block.code)]
    for command, printed in sessions:
        _check_demo(command)
        done = _run(sandbox, command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if printed:
            is_printed = re.search(_pattern(printed), " ".join(done.stdout.split()))
            assert is_printed, f"{printed}\n--- is not what is printed:\n{done.stdout}"
    for call in sandbox.calls():
        _check_call(call)


def _sessions(code: str) -> list[tuple[str, str]]:
    return [
        (session.partition("\n")[0], session.partition("\n")[2].strip())
        for session in re.split(r"^\$ ", code.replace("\\\n", ""), flags=re.MULTILINE)
        if session.strip()
    ]


def _pattern(printed: str) -> str:
    """``...`` is anything; versions and paths are those of another machine; lines are broken elsewhere."""
    pattern = re.escape(" ".join(printed.split()))
    pattern = pattern.replace(r"\.\.\.", ".*").replace(r"\ ", " ")
    pattern = re.sub(r"/venv/\S*?(?=:? |$)", r"\\S+?", pattern)
    return re.sub(r"\d+\\\.\d+\\\.\d+(\\\+\w+)?", r"\\S+", pattern)
