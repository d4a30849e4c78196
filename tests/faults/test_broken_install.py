"""Files of the install are damaged or gone, or wrapt is not what it should be: one line, and no process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_rl_patches.engine.settings import VARIABLE

from .environments import FIRES, IMPORTS_MEGATRON, UNRELATED, Environment, set_aside

ON = {VARIABLE: "reentrant-train"}  # of which the stand-in has all
NOT_ACTIVATED = "megatron_rl_patches: not activated, going on without: "
STARTUP = "_megatron_rl_patches_startup.py"
PACKAGE = "megatron_rl_patches"


def _lines(text: str, share: float) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(lines[: int(len(lines) * share)])


#: What becomes of a file's text.
DAMAGES: dict[str, Callable[[str], bytes | None]] = {
    "gone": lambda text: None,
    "empty": lambda text: b"",
    "half of its bytes": lambda text: text.encode()[: len(text) // 2],
    "a third of its lines": lambda text: _lines(text, 1 / 3).encode(),
    "most of its lines": lambda text: _lines(text, 0.8).encode(),
    "no Python": lambda text: b"def\n",
    "null bytes": lambda text: b"\0" * len(text),
    "no text": lambda text: b"\xff\xfe\x80",
    "raises": lambda text: b"raise OSError('two\\nlines')\n",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.make(tmp_path_factory.mktemp("broken") / "venv")


@pytest.fixture(scope="module")
def loaded(environment: Environment) -> list[Path]:
    """The files that a process loads when it imports the framework."""
    print_files = (
        f"import sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('{PACKAGE}')))"
    )
    outcome = environment.run(f"{IMPORTS_MEGATRON}; {print_files}", ON)
    assert "2 applied" in outcome.complaint
    return sorted(map(Path, outcome.stdout.split()))


@contextmanager
def damaged(file: Path, damage: str) -> Iterator[None]:
    content = DAMAGES[damage](file.read_text())
    with set_aside(file):
        if content is not None:
            file.write_bytes(content)
        yield


def test_every_file_gone_in_turn(environment: Environment, loaded: list[Path]) -> None:
    for file in loaded:
        with damaged(file, "gone"):
            complaint = environment.run(IMPORTS_MEGATRON, ON).complaint
        if file.name == "__init__.py" or file.parent.name == "patches":
            continue  # what is left is a namespace, or the patches there are
        assert complaint.startswith(NOT_ACTIVATED) and file.stem in complaint


@pytest.mark.parametrize("damage", DAMAGES)
def test_startup_module_damaged_or_left_behind_alone(environment: Environment, damage: str) -> None:
    with damaged(environment.site_packages / STARTUP, damage):
        complaints = {environment.run(code, ON).complaint for code in (UNRELATED, FIRES, IMPORTS_MEGATRON)}
        assert environment.run(IMPORTS_MEGATRON, {}).complaint == ""
    if damage == "most of its lines":  # all but what it would complain with
        return
    [complaint] = complaints
    assert complaint.startswith(NOT_ACTIVATED)


def test_startup_file_and_module_left_behind(environment: Environment) -> None:
    with set_aside(environment.site_packages / PACKAGE):
        assert environment.run(UNRELATED, ON).complaint == ""
        complaint = environment.run(IMPORTS_MEGATRON, ON).complaint
    assert complaint.startswith(f"{NOT_ACTIVATED}ModuleNotFoundError: No module named '{PACKAGE}'")


WRAPTS = {
    "missing": None,
    "raises": "raise RuntimeError('built for\\nanother Python')",
    "too old": "class FunctionWrapper: pass\ndef decorator(function): return function\n",
    "no classes": "def FunctionWrapper(*args): pass\nregister_post_import_hook = FunctionWrapper\n",
}


@pytest.mark.parametrize("kind", WRAPTS)
def test_wrapt_is_not_what_it_should_be(environment: Environment, kind: str) -> None:
    folder, text = environment.site_packages / "wrapt", WRAPTS[kind]
    with set_aside(folder):
        if text is not None:
            folder.mkdir()
            (folder / "__init__.py").write_text(text)
        assert environment.run(UNRELATED, ON).complaint == ""
        complaint = environment.run(IMPORTS_MEGATRON, ON).complaint
    assert complaint.startswith(NOT_ACTIVATED)
    assert "wrapt" in complaint or kind in ("raises", "no classes")
