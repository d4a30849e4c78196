"""The command ``megatron-rl-patches`` in this process: what it prints, answers as JSON and refuses."""

import io
import json
from contextlib import redirect_stderr
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_rl_patches.cli import main
from megatron_rl_patches.cli.commands import app


def invoke(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def invoke_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(invoke(*arguments, "--json", code=code).stdout)


def refuse(*arguments: object) -> str:
    """Return what an error of ours says, in one line; its exit code is 2."""
    with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as exit:
        main(list(map(str, arguments)))
    assert exit.value.code == 2 and len(stderr.getvalue().splitlines()) == 1
    return stderr.getvalue()
