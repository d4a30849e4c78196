"""Whatever variables and files are, a process that imports no framework runs on, with at most one complaint.

Processes are tried in an environment of this Python with the product in it, made without pip: cheap enough to
be broken often. It holds the files that a wheel puts there, wrapt, a stand-in for Megatron, and two packages
of nobody's: `bystander`, and `megatron.bystander`, which shares its root with Megatron, so that importing it
fires the trigger.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES

ROOT = Path(__file__).parents[2]
UNRELATED = "import bystander, decimal"
FIRES = "import megatron.bystander"
IMPORTS_MEGATRON = "import megatron.core.distributed.distributed_data_parallel"


@dataclass(frozen=True)
class Environment:
    path: Path

    @classmethod
    def make(cls, path: Path) -> Environment:
        venv.EnvBuilder(symlinks=True).create(path)
        environment = cls(path)
        site_packages = environment.site_packages
        shutil.copy(ROOT / "startup" / "megatron_rl_patches_startup.pth", site_packages)
        shutil.copy(startup.__file__, site_packages)
        for module in (megatron_rl_patches, wrapt):
            source = Path(str(module.__file__)).parent
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, site_packages / source.name, ignore=ignore)
        (site_packages / "stand_in.pth").write_text(f"{ROOT / 'tests/packaging/stand_in'}\n")
        for name in ("bystander", "megatron/bystander"):
            (site_packages / name).mkdir(parents=True)
            (site_packages / name / "__init__.py").touch()
        return environment

    @property
    def site_packages(self) -> Path:
        [folder] = self.path.glob("lib/python*/site-packages")
        return folder

    def run(self, code: str, variables: Mapping[str, str], *options: str) -> tuple[str, str]:
        """Return the one line on stderr, or none, and stdout; the process sees these variables alone."""
        command = [self.path / "bin" / "python", *options, "-c", code]
        done = subprocess.run(command, env=dict(variables), cwd=self.path, capture_output=True, timeout=60)
        first, *others = os.fsdecode(done.stderr).split("\n")
        assert done.returncode == 0 and others in ([], [""]), done
        return first, os.fsdecode(done.stdout)

    def complaint(self, code: str, variables: Mapping[str, str], *options: str) -> str:
        return self.run(code, variables, *options)[0]


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

Variables = dict[str, str]

_LONGEST = 100_000  # Linux takes 128 KiB for one variable
_WORDS = (
    *("1", "0", "all", "none", "maybe", "-1", "1e999", "nan", "9" * 5000, "٣"),
    *("mine.model:train", "os.path:join", ":", "=", "a=/b", "-"),
    *DIVERGENCES,
)
_MODULES = sorted(sys.stdlib_module_names)


def _values(*words: str) -> st.SearchStrategy[str]:
    """Nearly right, wholly wrong, bytes of no encoding, and far too long."""
    word = st.sampled_from([*words, *(f"-{word}" for word in words[:5])]) | st.text(max_size=5)
    listed = st.lists(word, max_size=5).map(",".join)
    raw = st.binary(max_size=20).map(os.fsdecode)
    some = st.one_of(st.sampled_from(words), listed, raw, st.text())
    value = st.one_of(some, st.builds(lambda text: text * (_LONGEST // (4 * len(text) + 4)), some))
    return value.map(lambda text: text.replace("\0", "")).filter(_can_be_passed)


def _can_be_passed(value: str) -> bool:
    try:
        return len(os.fsencode(value)) < _LONGEST
    except UnicodeEncodeError:  # half a pair of surrogates: no environment holds it
        return False


def _environments(*words: str) -> st.SearchStrategy[Variables]:
    value = _values(*registry.patches(), *_WORDS, *words)
    others = {name: value for name in VARIABLES if name != VARIABLE}
    return st.fixed_dictionaries({VARIABLE: value}, optional=others)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.make(tmp_path_factory.mktemp("environment") / "venv")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(), options=st.lists(st.sampled_from(INTERPRETER_OPTIONS), max_size=3))
def test_an_unrelated_process_never_hears_of_us(
    environment: Environment, variables: Variables, options: list[str]
) -> None:
    """Strict or not, and to the last line: nothing is said before a framework is imported."""
    assert environment.complaint(UNRELATED, variables, *options) == ""


@pytest.fixture(scope="module")
def added() -> Iterator[mock.Mock]:
    """Nothing is put in place: what is tried is all before that."""
    with mock.patch.object(installer, "installer") as replaced:
        yield replaced.add


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(*_MODULES))
@example({VARIABLE: "nothing", STRICT_VARIABLE: "maybe"})
def test_reading_them_costs_one_line_at_most(
    added: mock.Mock, caplog: pytest.LogCaptureFixture, variables: Variables
) -> None:
    added.reset_mock()
    caplog.clear()
    with caplog.at_level(logging.WARNING), mock.patch.dict(os.environ, variables):
        assert startup._roots().issuperset(startup._ROOTS)
        if startup.is_strict():
            try:
                api.activate_from_environment(variables)
            except PatchError as error:
                assert len(str(error).splitlines()) == 1
        else:
            api.activate_from_environment(variables)
    assert len(caplog.messages) <= 1
    assert all(len(message.splitlines()) == 1 for message in caplog.messages)


@settings(max_examples=50)
@given(variables=_environments())
def test_the_doctor_sees_what_the_activation_sees(variables: Variables) -> None:
    try:
        chosen = Settings.from_environment(variables)
    except PatchError as error:
        assert str(error) in [problem.message for problem in doctor.choice_of(variables).problems]
    else:
        assert doctor.choice_of(variables).settings == chosen


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
def loaded(environment: Environment) -> list[Path]:
    """The files that a process loads when it imports the framework."""
    print_files = (
        f"import sys; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('{PACKAGE}')))"
    )
    complaint, stdout = environment.run(f"{IMPORTS_MEGATRON}; {print_files}", ON)
    assert "2 applied" in complaint
    return sorted(map(Path, stdout.split()))


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
            complaint = environment.complaint(IMPORTS_MEGATRON, ON)
        if file.name == "__init__.py" or file.parent.name == "patches":
            continue  # what is left is a namespace, or the patches there are
        assert complaint.startswith(NOT_ACTIVATED) and file.stem in complaint


@pytest.mark.parametrize("damage", DAMAGES)
def test_startup_module_damaged_or_left_behind_alone(environment: Environment, damage: str) -> None:
    with damaged(environment.site_packages / STARTUP, damage):
        complaints = {environment.complaint(code, ON) for code in (UNRELATED, FIRES, IMPORTS_MEGATRON)}
        assert environment.complaint(IMPORTS_MEGATRON, {}) == ""
    if damage == "most of its lines":  # all but what it would complain with
        return
    [complaint] = complaints
    assert complaint.startswith(NOT_ACTIVATED)


def test_startup_file_and_module_left_behind(environment: Environment) -> None:
    with set_aside(environment.site_packages / PACKAGE):
        assert environment.complaint(UNRELATED, ON) == ""
        complaint = environment.complaint(IMPORTS_MEGATRON, ON)
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
        assert environment.complaint(UNRELATED, ON) == ""
        complaint = environment.complaint(IMPORTS_MEGATRON, ON)
    assert complaint.startswith(NOT_ACTIVATED)
    assert "wrapt" in complaint or kind in ("raises", "no classes")
