"""Patches of other packages may raise anything, ``sys.exit()`` included: training goes on without them."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron_rl_patches import Patch, PatchError, apply, revert, status

from .conftest import Engine, Framework, Options, patch_of

ROOT = Path(__file__).parents[3]
PLAIN = ("trained", "m", 1)


class Stop(BaseException):
    """Neither an ``Exception`` nor an interrupt."""


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


def lazily(error: BaseException) -> Callable[..., Any]:
    return lambda options: (raising(error)() for _ in range(1))


EXITS = pytest.mark.parametrize(
    ("error", "shown"), [(SystemExit(0), "SystemExit: 0"), (Stop("here"), "Stop: here")]
)


@EXITS
@pytest.mark.parametrize("function", [raising, lazily])
def test_configured(
    framework: Framework, engine: Engine, caplog: Any, error: BaseException, shown: str, function: Any
) -> None:
    broken = Patch("broken", "", options=Options, configured=function(error))
    engine.update(broken=broken, tagging=patch_of(name := framework(), "train"))
    apply()
    assert importlib.import_module(f"{name}.model").train("m") == ("patched", PLAIN)
    reason = f"patch 'broken' is left out: its function `configured` raised {shown}"
    assert caplog.messages == [f"megatron_rl_patches: {reason}"]
    with pytest.raises(PatchError, match=reason):
        apply("broken")


@EXITS
def test_skip_if(framework: Framework, engine: Engine, caplog: Any, error: BaseException, shown: str) -> None:
    engine["tagging"] = patch_of(name := framework(), "train", skip_if=raising(error))
    apply()
    assert importlib.import_module(f"{name}.model").train("m") == PLAIN
    reason = f"judging it raised {shown}"
    assert [(s.state, s.reason) for s in status()] == [("failed", reason)]
    assert caplog.messages == [f"megatron_rl_patches: skipped tagging: {name}.model.train: failed: {reason}"]


@pytest.mark.parametrize(
    ("error", "shown"), [(SystemExit(0), "SystemExit: 0"), (ValueError("not today"), "ValueError: not today")]
)
def test_detail(framework: Framework, engine: Engine, caplog: Any, error: BaseException, shown: str) -> None:
    engine["tagging"] = patch_of(name := framework(), "train", detail=raising(error))
    apply()
    for _ in range(2):
        assert importlib.import_module(f"{name}.model").train("m") == ("patched", PLAIN)
    reason = f"its function `detail` raised {shown}"
    assert [(s.state, s.detail) for s in status()] == [("applied", reason)]
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: module '{}.adapters' has no attribute 'adapter'"),
    ],
)
def test_an_adapter_as_text_that_cannot_be_imported(
    framework: Framework, engine: Engine, module: str, shown: str
) -> None:
    """The call raises: a rank that went on without the patch would wait for the others."""
    name = framework(adapters=module)
    engine["tagging"] = patch = Patch("tagging", summary="")
    patch.wrap(f"{name}.model", "train", to=f"{name}.adapters:adapter")
    model = importlib.import_module(f"{name}.model")
    apply()
    reason = f"patch 'tagging': importing its adapter {name}.adapters:adapter raised {shown.format(name)}"
    for _ in range(2):
        with pytest.raises(PatchError, match=f"^{reason}$"):
            model.train("m")
    revert()
    assert model.train("m") == PLAIN


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_an_adapter_raises_in_a_call_is_raised_there(
    framework: Framework, engine: Engine, error: BaseException
) -> None:
    engine["tagging"] = patch_of(name := framework(), "train", adapter=raising(error))
    apply()
    with pytest.raises(type(error)) as caught:
        importlib.import_module(f"{name}.model").train("m")
    assert caught.value is error


class Terminated:
    """A signal handler that ends the program; Python has no other traceback for it than that of a call."""

    def by_method(self, *_: object) -> None:
        self._exit()

    def __call__(self, *_: object) -> None:
        self._exit()

    def _exit(self) -> None:
        sys.exit(143)


@pytest.mark.parametrize(
    "handler", [Terminated().by_method, Terminated(), None], ids=["method", "object", "ctrl-c"]
)
def test_a_signal_ends_the_program_whatever_runs(framework: Framework, engine: Engine, handler: Any) -> None:
    engine["tagging"] = patch_of(
        name := framework(), "train", skip_if=lambda code: signal.raise_signal(signal.SIGINT)
    )
    before = signal.signal(signal.SIGINT, handler or signal.default_int_handler)
    try:
        importlib.import_module(f"{name}.model")
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
    for name, text in PATCHES.items():
        (tmp_path / f"patch_that_{name}.py").write_text(text)
    entries = "".join(f"{name} = patch_that_{name}:patch\n" for name in PATCHES)
    (tmp_path / "exiting-1.0.dist-info").mkdir()
    (tmp_path / "exiting-1.0.dist-info" / "METADATA").write_text("Name: exiting\nVersion: 1.0\n")
    (tmp_path / "exiting-1.0.dist-info" / "entry_points.txt").write_text(
        f"[megatron_rl_patches.patches]\n{entries}"
    )
    (tmp_path / "exiting_framework.py").write_text("def train(): return 5\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import _megatron_rl_patches_startup; _megatron_rl_patches_startup.main()\n"
            "import exiting_framework; raise SystemExit(exiting_framework.train())",
        ],
        env={
            **{name: value for name, value in os.environ.items() if name != "RANK"},
            "MEGATRON_RL_PATCHES": "1",
            "MEGATRON_RL_PATCHES_ROOTS": "exiting_framework",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 6, done.stderr
    *lines, summary = [line.removeprefix("megatron_rl_patches: ") for line in done.stderr.splitlines()]
    assert "works (exiting_framework: 1 applied)" in summary
    assert lines == [
        "loading patch exits of patch_that_exits:patch raised SystemExit: 0; going on without it",
        "loading patch stops of patch_that_stops:patch raised Stop: here; going on without it",
        "skipped judges: exiting_framework.train: failed: judging it raised SystemExit: 0",
    ]
