"""Patches of other packages may raise anything, ``sys.exit()`` included: training goes on without them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_rl_patches import Patch, PatchError, apply, revert, status
from tests.worlds.program import run_program

from .conftest import PATCHED, PLAIN, Engine, Framework, Options


class Stop(BaseException):
    """Neither an ``Exception`` nor an interrupt."""


def raising(error: BaseException) -> Mock:
    return Mock(side_effect=error)


def lazily(error: BaseException) -> Callable[..., Any]:
    return lambda options: (raising(error)() for _ in range(1))


EXITS = [(SystemExit(0), "SystemExit: 0"), (Stop("here"), "Stop: here")]


@pytest.mark.parametrize(("error", "shown"), EXITS)
@pytest.mark.parametrize("function", [raising, lazily])
def test_configured(
    tagged: Framework, engine: Engine, caplog: Any, error: BaseException, shown: str, function: Any
) -> None:
    package = tagged("train")
    engine["broken"] = Patch("broken", "", options=Options, configured=function(error))
    apply()
    assert package.model.train("m") == PATCHED
    reason = f"patch 'broken' is left out: its function `configured` raised {shown}"
    assert caplog.messages == [f"megatron_rl_patches: {reason}"]
    for must in (lambda: apply("broken"), lambda: apply(strict=True)):
        with pytest.raises(PatchError, match=reason):
            must()


@pytest.mark.parametrize(("error", "shown"), EXITS)
def test_skip_if(tagged: Framework, caplog: Any, error: BaseException, shown: str) -> None:
    package = tagged("train", skip_if=raising(error))
    apply()
    assert package.model.train("m") == PLAIN
    reason = f"judging it raised {shown}"
    assert [(s.state, s.reason) for s in status()] == [("failed", reason)]
    skipped = f"skipped tagging: {package}.model.train: failed: {reason}"
    assert caplog.messages == [f"megatron_rl_patches: {skipped}"]


@pytest.mark.parametrize(("error", "shown"), [*EXITS, (ValueError("no"), "ValueError: no")])
def test_detail(tagged: Framework, caplog: Any, error: BaseException, shown: str) -> None:
    package = tagged("train", detail=raising(error))
    apply()
    for _ in range(2):
        assert package.model.train("m") == PATCHED
    assert [(s.state, s.detail) for s in status()] == [("applied", f"its function `detail` raised {shown}")]
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: module '{}.adapters' has no attribute 'adapter'"),
    ],
)
def test_an_adapter_that_is_not_there(framework: Framework, engine: Engine, module: str, shown: str) -> None:
    """The call raises: a rank that went on without the patch would wait for the others."""
    package = framework(adapters=module)
    engine["tagging"] = patch = Patch("tagging", summary="")
    patch.wrap(f"{package}.model", "train", to=f"{package}.adapters:adapter")
    apply()
    raised = shown.format(package)
    reason = f"patch 'tagging': importing its adapter {package}.adapters:adapter raised {raised}"
    for _ in range(2):
        with pytest.raises(PatchError, match=f"^{reason}$"):
            package.model.train("m")
    revert()
    assert package.model.train("m") == PLAIN


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_an_adapter_raises_in_a_call_is_raised_there(tagged: Framework, error: BaseException) -> None:
    package = tagged("train", adapter=raising(error))
    apply()
    with pytest.raises(type(error)) as caught:
        package.model.train("m")
    assert caught.value is error


class Terminated:
    """A signal handler that ends the program; Python has no other traceback for it than that of a call."""

    def __call__(self, *_: object) -> None:
        sys.exit(143)

    by_method = __call__


@pytest.mark.parametrize(
    "handler", [Terminated().by_method, Terminated(), None], ids=["method", "object", ""]
)
def test_a_signal_ends_the_program_whatever_runs(tagged: Framework, handler: Any) -> None:
    package = tagged("train", skip_if=lambda code: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, handler or signal.default_int_handler)
    try:
        assert package.model
        with pytest.raises(SystemExit if handler else KeyboardInterrupt):
            apply()
    finally:
        signal.signal(signal.SIGINT, before)


PATCHES = {
    "exits": "import sys; sys.exit(0)",
    "stops": "raise type('Stop', (BaseException,), {})('here')",
    "judges": """
import sys
from megatron_rl_patches import Patch
patch = Patch("judges", "")
patch.wrap("exiting_framework", "train", skip_if=lambda code: sys.exit(0))(lambda call: None)
""",
    "works": """
from megatron_rl_patches import Patch
patch = Patch("works", "")
patch.wrap("exiting_framework", "train")(lambda call: call() + 1)
""",
}


def test_the_environment_variable_never_ends_the_process(tmp_path: Path) -> None:
    entries = "".join(f"{name} = patch_that_{name}:patch\n" for name in PATCHES)
    files = {
        **{f"patch_that_{name}.py": text for name, text in PATCHES.items()},
        "exiting-1.0.dist-info/METADATA": "Name: exiting\nVersion: 1.0\n",
        "exiting-1.0.dist-info/entry_points.txt": f"[megatron_rl_patches.patches]\n{entries}",
        "exiting_framework.py": "def train(): return 5\n",
        "program.py": "import _megatron_rl_patches_startup; _megatron_rl_patches_startup.main()\n"
        "import exiting_framework; raise SystemExit(exiting_framework.train())",
    }
    ours = {"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_ROOTS": "exiting_framework"}
    done = run_program(tmp_path, files, **ours)
    assert done.returncode == 6, done.stderr
    *lines, summary = [line.removeprefix("megatron_rl_patches: ") for line in done.stderr.splitlines()]
    assert "works (exiting_framework: 1 applied)" in summary
    assert lines == [
        "loading patch exits of patch_that_exits:patch raised SystemExit: 0; going on without it",
        "loading patch stops of patch_that_stops:patch raised Stop: here; going on without it",
        "skipped judges: exiting_framework.train: failed: judging it raised SystemExit: 0",
    ]
