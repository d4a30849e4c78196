"""Whatever variables and files are, a process that imports no framework runs on, with at most one complaint.

Processes are tried in an environment of this Python with the product in it, made without pip: cheap enough to
be broken often. It holds the files that a wheel puts there, wrapt, a stand-in for Megatron, and two packages
of nobody's: `bystander`, and `megatron.bystander`, which shares its root with Megatron, so that importing it
fires the trigger.
"""

import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import wrapt
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import _megatron_rl_patches_startup as startup
import megatron_rl_patches
from megatron_rl_patches import PatchError, Settings, doctor
from megatron_rl_patches.engine import api, installer, registry
from megatron_rl_patches.engine import settings as settings_module
from megatron_rl_patches.engine.settings import STRICT_VARIABLE, VARIABLE
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from tests.worlds.files import write
from tests.worlds.program import ROOT

UNRELATED = "import bystander, decimal"
FIRES = "import megatron.bystander"
IMPORTS_MEGATRON = "import megatron.core.distributed.distributed_data_parallel"


class Environment:
    """A virtual environment with the product."""

    def __init__(self, path: Path) -> None:
        self.path = path
        venv.EnvBuilder(symlinks=True).create(path)
        [self.site_packages] = path.glob("lib/python*/site-packages")
        for file in (ROOT / "packaging" / "megatron_rl_patches_startup.pth", startup.__file__):
            shutil.copy(file, self.site_packages)
        for module in (megatron_rl_patches, wrapt):
            source = Path(str(module.__file__)).parent
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, self.site_packages / source.name, ignore=ignore)
        packages = dict.fromkeys(("bystander/__init__.py", "megatron/bystander/__init__.py"), "")
        write(self.site_packages, {"stand_in.pth": f"{ROOT / 'tests/packaging/stand_in'}\n", **packages})

    def complaint(self, code: str, variables: Mapping[str, str], *options: str) -> str:
        """Return the one line on stderr, or none; the process sees these variables alone."""
        command = [self.path / "bin" / "python", *options, "-c", code]
        done = subprocess.run(command, env=dict(variables), cwd=self.path, capture_output=True, timeout=60)
        first, *others = os.fsdecode(done.stderr).split("\n")
        assert done.returncode == 0 and others in ([], [""]), done
        return first


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


@contextmanager
def set_aside(path: Path) -> Iterator[None]:
    """For the block this is gone; what the block puts in its place is gone after it."""
    aside = path.rename(path.with_name(f"{path.name}.aside"))
    try:
        yield
    finally:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        aside.rename(path)


VARIABLES = sorted(settings_module.variables())
INTERPRETER_OPTIONS = ("-I", "-E", "-s", "-B", "-OO", "-Werror", "-Xutf8=0", "-Xdev")

_LONGEST = 100_000  # Linux takes 128 KiB for one variable
_WORDS = (
    *("1", "0", "all", "none", "maybe", "-1", "1e999", "nan", "9" * 5000, "٣"),
    *("mine.model:train", "os.path:join", ":", "=", "a=/b", "-"),
    *DIVERGENCES,
)


def _values(*words: str) -> st.SearchStrategy[str]:
    """Nearly right, wholly wrong, bytes of no encoding, and far too long."""
    word = st.sampled_from([*words, *(f"-{word}" for word in words[:5])]) | st.text(max_size=5)
    listed = st.lists(word, max_size=5).map(",".join)
    raw = st.binary(max_size=20).map(os.fsdecode)
    some = st.one_of(st.sampled_from(words), listed, raw, st.text())
    value = st.one_of(some, st.builds(lambda text: text * (_LONGEST // (4 * len(text) + 4)), some))
    return value.map(lambda text: text.replace("\0", ""))


def _environments(*words: str) -> st.SearchStrategy[dict[str, str]]:
    value = _values(*registry.patches(), *_WORDS, *words)
    others = {name: value for name in VARIABLES if name != VARIABLE}
    return st.fixed_dictionaries({VARIABLE: value}, optional=others)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(), options=st.lists(st.sampled_from(INTERPRETER_OPTIONS), max_size=3))
def test_an_unrelated_process_never_hears_of_us(
    environment: Environment, variables: dict[str, str], options: list[str]
) -> None:
    """Strict or not, and to the last line: nothing is said before a framework is imported."""
    assert environment.complaint(UNRELATED, variables, *options) == ""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(*sorted(sys.stdlib_module_names)))
@example({VARIABLE: "nothing", STRICT_VARIABLE: "maybe"})
def test_reading_them_costs_one_line_at_most(
    caplog: pytest.LogCaptureFixture, variables: dict[str, str]
) -> None:
    """Nothing is put in place: what is tried is all before that. The doctor sees what is read."""
    caplog.clear()
    caplog.set_level(logging.WARNING)
    with mock.patch.dict(os.environ, variables), mock.patch.object(installer, "installer"):
        assert startup._roots().issuperset(startup._ROOTS)
        try:
            api.activate_from_environment(variables)
        except PatchError as error:
            assert startup.is_strict() and len(str(error).splitlines()) == 1
    assert len(caplog.messages) <= 1
    assert all(len(message.splitlines()) == 1 for message in caplog.messages)
    try:
        chosen = Settings.from_environment(variables)
    except PatchError as error:
        assert str(error) in [problem.message for problem in doctor.choice_of(variables).problems]
    else:
        assert doctor.choice_of(variables).settings == chosen


ON = {VARIABLE: "reentrant-train"}  # of which the stand-in has all
NOT_ACTIVATED = "megatron_rl_patches: not activated: "
PACKAGE = "megatron_rl_patches"


#: What becomes of a file's text.
DAMAGES: dict[str, Callable[[str], bytes | None]] = {
    "gone": lambda text: None,
    "empty": lambda text: b"",
    "half of its bytes": lambda text: text.encode()[: len(text) // 2],
    "a third of its lines": lambda text: "".join(text.splitlines(True)[: text.count("\n") // 3]).encode(),
    "no Python": lambda text: b"def\n",
    "null bytes": lambda text: b"\0" * len(text),
    "raises": lambda text: b"raise OSError('two\\nlines')\n",
}


def test_startup_module_damaged_or_left_behind_alone(environment: Environment) -> None:
    file = environment.site_packages / "_megatron_rl_patches_startup.py"
    for damage, change in DAMAGES.items():
        content = change(file.read_text())
        with set_aside(file):
            if content is not None:
                file.write_bytes(content)
            complaints = {environment.complaint(code, ON) for code in (UNRELATED, FIRES, IMPORTS_MEGATRON)}
            assert environment.complaint(IMPORTS_MEGATRON, {}) == "", damage
        [complaint] = complaints
        assert complaint.startswith(NOT_ACTIVATED), damage


def test_startup_file_and_module_left_behind(environment: Environment) -> None:
    with set_aside(environment.site_packages / PACKAGE):
        assert environment.complaint(UNRELATED, ON) == ""
        complaint = environment.complaint(IMPORTS_MEGATRON, ON)
    assert complaint.startswith(f"{NOT_ACTIVATED}ModuleNotFoundError: No module named '{PACKAGE}'")


@pytest.mark.parametrize(
    ("text", "complains_of"),
    [
        (None, "wrapt"),
        ("raise RuntimeError('built for\\nanother Python')", "built for"),
        ("class FunctionWrapper: pass\ndef decorator(function): return function\n", "wrapt"),
        ("def FunctionWrapper(*args): pass\nregister_post_import_hook = FunctionWrapper\n", ""),
    ],
    ids=["missing", "raises", "too old", "no classes"],
)
def test_another_wrapt(environment: Environment, text: str | None, complains_of: str) -> None:
    folder = environment.site_packages / "wrapt"
    with set_aside(folder):
        if text is not None:
            write(folder, {"__init__.py": text})
        assert environment.complaint(UNRELATED, ON) == ""
        complaint = environment.complaint(IMPORTS_MEGATRON, ON)
    assert complaint.startswith(NOT_ACTIVATED) and complains_of in complaint
