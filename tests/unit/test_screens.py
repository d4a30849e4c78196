"""What every command prints, in terminals of several widths and into a pipe: no name is broken or cut off."""

import io
import os
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer
from pytest import MonkeyPatch

from megatron_rl_patches import doctor
from megatron_rl_patches.cli import main
from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.doctor import Startup
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.settings import VARIABLE, Settings, variables
from megatron_rl_patches.inference.memory import estimate
from megatron_rl_patches.inference.memory.parameters import Parameter, Stage

STAND_IN = str(Path(__file__).parents[1] / "frameworks" / "stand_in")
TRAIN = "my_company_rl.training.megatron_backend.loop:train_one_rollout"
MISSPELT = f"{VARIABLE}_STRIKT"
NOWHERE = "/nowhere/a-folder/that-has/a-long-name/framework-1.0-py3-none-any.whl"
MODEL = [f"--set={field}=4" for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")]
# Arguments, by what is shown.
SHOWN: dict[str, list[str]] = {
    "the commands": [],
    **{f"help of {command}": [command, "--help"] for command in ("doctor", "check", "estimate", "demo")},
    "a diagnosis": ["doctor"],
    "a diagnosis of a command": ["doctor", f"--command={MISSPELT}=1 python train.py"],
    "this environment": ["check"],
    "two sources": ["check", f"a-release={STAND_IN}", f"a-branch={STAND_IN}"],
    "an estimate": ["estimate", *MODEL, "--pp=2", "--teachers=128", "--teacher-heads"],
    "a wrong option": ["estimate", "--tensor-model-paralel-size=2"],
    "a wrong source": ["check", NOWHERE],
    "a wrong file": ["estimate", *MODEL, f"--plot={NOWHERE}"],
}
OPTIONS = {
    name: {option for parameter in command.params for option in parameter.opts if option[0] == "-"}
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}


def names() -> set[str]:
    """Return the names of patches, functions, frameworks, variables, options and places."""
    settings = Settings(train_functions=(TRAIN,))
    sites = [site for p in registry.patches().values() for site in p.sites_for(settings.options_of(p))]
    functions = {name for site in sites for name in (site.target, site.module, site.framework)}
    places = {STAND_IN, NOWHERE, TRAIN, MISSPELT, sys.executable, "a-release", "a-branch"}
    return {*registry.patches(), *functions, *variables(), *places}.union(*OPTIONS.values())


def printed(*arguments: str) -> str:
    """Return what goes to stdout and stderr, without colors."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(stdout), pytest.raises(SystemExit):
        main(arguments)
    return re.sub(r"\x1b\[[\d;]*m", "", stdout.getvalue())


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("place", ["terminal", "pipe"])
@pytest.mark.parametrize("arguments", SHOWN.values(), ids=SHOWN)
def test_no_name_is_broken(monkeypatch: MonkeyPatch, arguments: list[str], place: str, columns: int) -> None:
    for name in [name for name in os.environ if name.startswith((VARIABLE, "FORCE_COLOR"))]:
        monkeypatch.delenv(name)
    stages = [Stage(chunks, chunks) for chunks in ([[Parameter(10**9, "bf16", False)]],) * 2]
    monkeypatch.setattr(estimate, "count_parameters", Mock(return_value=stages))
    monkeypatch.setattr(doctor, "examine_startup", Mock(return_value=Startup(None, False, "why")))
    monkeypatch.syspath_prepend(STAND_IN)
    for name, value in (("", "all"), ("_TRAIN_FUNCTIONS", TRAIN), ("_STRIKT", "1")):
        monkeypatch.setenv(f"{VARIABLE}{name}", value)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    if place == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")

    text = printed(*arguments)
    joined = re.sub(r"\n *", "", text)
    assert [name for name in names() if joined.count(name) != text.count(name)] == []
    assert not set(text) & set("…│╭")
    if "--help" in arguments:
        assert [option for option in OPTIONS[arguments[0]] if option not in text] == []
    elif place == "terminal":  # only a single name, a line for the shell, and an error of click may be longer
        python = re.escape(shlex.quote(sys.executable))
        whole = re.compile(rf"  (export|unset|{python}|in the command:) |Error: No such option: | *\S+$")
        assert [line for line in text.splitlines() if len(line) > columns and not whole.match(line)] == []
    elif arguments:  # a line is what it is, however wide the terminal is in which the command was typed
        monkeypatch.setenv("COLUMNS", "1000")
        assert printed(*arguments) == text
