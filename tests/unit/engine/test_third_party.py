"""Code of other packages: patches that may raise anything, while training goes on, and patches of their own.

The stand-ins of the latter do what the real ones do to modules and classes, before or after this package.
``liger`` is Liger-Kernel's ``apply_liger_kernel_to_megatron()``: the attribute of the defining module becomes
a function that has ``__wrapped__`` and does not call it. ``MindSpeed`` is that project's ``Patch``: every
module in which the name is the original, by ``id()``, gets a function in its place, or around it.
"""

import functools
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_rl_patches import Patch, PatchError, apply, revert, status
from tests.worlds.program import run_program

from .conftest import PATCHED, PLAIN, Engine, Framework, Options, patch_of


def raising(error: BaseException) -> Mock:
    return Mock(side_effect=error)


def lazily(error: BaseException) -> Callable[..., Any]:
    return lambda options: (raising(error)() for _ in range(1))


@pytest.mark.parametrize("error", [SystemExit(0), BaseException("here")])
@pytest.mark.parametrize("function", [raising, lazily])
def test_configured(tagged: Framework, engine: Engine, caplog: Any, error: Any, function: Any) -> None:
    package = tagged("train")
    engine["broken"] = Patch("broken", "", options=Options, configured=function(error))
    apply()
    assert package.model.train("m") == PATCHED
    reason = f"function `configured` of patch 'broken' raised {type(error).__name__}: {error}"
    [message] = caplog.messages
    assert message.startswith(f"megatron_rl_patches: a patch is left out: {reason}. ")
    for must in (lambda: apply("broken"), lambda: apply(strict=True)):
        with pytest.raises(PatchError, match=reason):
            must()


@pytest.mark.parametrize("error", [SystemExit(0), ValueError("no")])
def test_detail(tagged: Framework, caplog: Any, error: BaseException) -> None:
    package = tagged("train", detail=raising(error))
    apply()
    for _ in range(2):
        assert package.model.train("m") == PATCHED
    detail = f"its function `detail` raised {type(error).__name__}: {error}"
    assert [(s.state, s.detail) for s in status()] == [("applied", detail)]
    assert "internal error" not in caplog.text


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: module '{}.adapters' has no attribute 'adapter'"),
    ],
)
def test_an_absent_adapter(framework: Framework, engine: Engine, module: str, expected: str) -> None:
    """The call raises: a rank that went on without the patch would wait for the others."""
    package = framework(adapters=module)
    engine["tagging"] = patch = Patch("tagging", summary="")
    patch.wrap(f"{package}.model", "train", to=f"{package}.adapters:adapter")
    apply()
    raised = expected.format(package)
    reason = f"patch 'tagging': importing its adapter {package}.adapters:adapter raised {raised}"
    for _ in range(2):
        with pytest.raises(PatchError, match=f"^{reason}$"):
            package.model.train("m")
    revert()
    assert package.model.train("m") == PLAIN


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
    assert "in exiting_framework: works" in summary
    assert [line.partition(". ")[0] for line in lines] == [
        "a patch is left out: loading patch exits of patch_that_exits:patch raised SystemExit: 0",
        "skipped judges: exiting_framework.train: failed: checking it raised SystemExit: 0",
    ]


def replacing(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model: "replaced"


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return "theirs", function(*args, **kwargs)

    return wrapper


class MindSpeed:
    def __init__(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self.name, self.original = name, getattr(owner, name)
        self.final = new(self.original)
        setattr(owner, name, self.final)
        self._replace(self.original, self.final)

    def remove(self) -> None:
        self._replace(self.final, self.original)

    def _replace(self, old: object, new: object) -> None:
        for module in list(sys.modules.values()):
            if id(vars(module).get(self.name)) == id(old):
                setattr(module, self.name, new)


@pytest.fixture
def world(framework: Framework, engine: Engine) -> tuple[Any, Any]:
    """A module, of which ``train`` and ``Trainer.step`` are patched, and one with copies."""
    package = framework()
    engine["tagging"] = patch_of(package, "train")
    engine["methods"] = patch_of(package, "Trainer.step", name="methods")
    return package.model, package.actor


def results(world: tuple[Any, Any]) -> list[Any]:
    model, actor = world
    return [model.train("m"), actor.train("m"), actor.run("m")]


def target() -> tuple[str, str]:
    site = status()[0]
    return site.state, site.reason


REPLACING = f"{__name__}.replacing.<locals>.<lambda>"


def test_liger_before(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(actor.train)

    def liger(model: str) -> str:
        return "replaced"

    liger.__wrapped__ = model.train  # type: ignore[attr-defined]
    model.train, before = liger, id(liger)
    del liger  # or it counts as a copy
    apply()
    assert results(world) == [("patched", "replaced"), PLAIN, PLAIN]  # Liger has no copies, so nobody has
    reason = f"in place, but these modules keep a function that was replaced before: {actor.__name__}"
    assert target() == ("applied", reason)
    revert()
    assert results(world) == ["replaced", PLAIN, PLAIN]
    assert (id(model.train), id(actor.train), id(actor.run)) == (before, original, original)


def test_mindspeed_replaces_before(world: tuple[Any, Any]) -> None:
    model, _ = world
    train = MindSpeed(model, "train", replacing)
    apply("methods")
    for _ in range(2):
        apply()
        state, reason = next((s.state, s.reason) for s in status() if s.patch == "tagging")
        assert state == "conflict" and reason.startswith(f"replaced by {REPLACING}")
        with pytest.raises(PatchError, match="put this patch in place before it"):
            apply("tagging")
        assert results(world) == ["replaced", "replaced", PLAIN]
        assert model.train is train.final
        revert()
    train.remove()
    apply()
    assert results(world) == [PATCHED] * 3


def test_mindspeed_replaces_after(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(model.train)
    apply()
    train = MindSpeed(model, "train", replacing)
    for _ in range(2):
        # A copy under another name is one that MindSpeed does not look for.
        assert results(world) == ["replaced", "replaced", PATCHED]
        only_if = "the patch works only if that calls the patched function"
        assert target() == ("lost", f"overwritten by {REPLACING}; {only_if}")
        apply()
    revert()
    assert results(world) == ["replaced", "replaced", PLAIN]
    assert model.train is actor.train is train.final
    train.remove()  # It puts this package's wrapper back, which revert() has switched off.
    assert results(world) == [PLAIN] * 3
    apply()
    assert results(world) == [PATCHED] * 3
    revert()
    assert [id(each) for each in (model.train, actor.train, actor.run)] == [original] * 3


def test_mindspeed_wraps(world: tuple[Any, Any]) -> None:
    model, actor = world
    original = id(model.train)
    apply()
    train = MindSpeed(model, "train", wrapping)
    step = MindSpeed(model.Trainer, "step", wrapping)  # read from the class
    for _ in range(2):
        assert results(world) == [("theirs", PATCHED), ("theirs", PATCHED), PATCHED]
        assert model.Trainer().step("x") == ("theirs", ("patched", ("step", "x")))
        assert [site.state for site in status()] == ["applied"] * 2
        under = f", under code of {__name__}, which must call the patched function"
        assert all(site.reason.endswith(under) for site in status())
        revert()
        assert results(world) == [("theirs", PLAIN), ("theirs", PLAIN), PLAIN]
        assert model.Trainer().step("x") == ("theirs", ("step", "x"))
        assert model.train is actor.train is train.final
        assert model.Trainer.step is step.final and id(actor.run) == original
        apply()
    train.remove()  # takes its layer away, and finds this package's in place
    assert results(world) == [PATCHED] * 3
    assert target() == ("applied", "in place")
    revert()
    assert [id(each) for each in (model.train, actor.train, actor.run)] == [original] * 3
