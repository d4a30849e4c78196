"""Fresh environments with the package installed, and programs that run in them.

`installed` is one environment per Python version found on this machine, and an editable one.  Each has wrapt
and, in place of Megatron, a stand-in of a few lines on its path: the trigger and the engine need
neither torch nor the real thing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).with_name("stand_in")
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
BUILT = {"build", "checkouts", "dist", "site", "mutants"}
VARIABLES = re.compile("MEGATRON_RL_PATCHES|PYTHON|RAY_|COV_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--artifacts", type=Path, metavar="FOLDER", help="test its sdist and its wheel")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


run = partial(subprocess.run, text=True, capture_output=True, timeout=600)


def check_call(command: list[str | Path]) -> str:
    done = run(command)
    assert done.returncode == 0, f"{command} failed\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Environment(NamedTuple):
    """A virtual environment; `run` starts its Python with exactly the variables of ours that are given.

    It starts in the folder of the environment: in this one, `import` would find the working tree.
    """

    path: Path

    @property
    def site_packages(self) -> Path:
        [folder] = self.path.glob("lib/python*/site-packages")
        return folder

    def pip(self, command: str, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python"]
        check_call([*pip, self.path / "bin" / "python", command, *arguments])

    def install(self, *arguments: str | Path) -> None:
        self.pip("install", "--quiet", "--no-deps", *arguments)

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
        command = [self.path / "bin" / "python", *arguments]
        return run(command, env=inherited | variables, cwd=self.path)

    def program(self, code: str, *options: str, value: str | None = "1", **variables: str) -> dict[str, Any]:
        """Run `code` without a complaint of ours; return what it gave to `probe.report`."""
        if value is not None:
            variables["MEGATRON_RL_PATCHES"] = value
        done = self.run(*options, "-c", code, **variables)
        assert done.returncode == 0, done
        assert "not activated" not in done.stderr and "Traceback" not in done.stderr, done
        return json.loads(done.stdout)


class Artifacts(NamedTuple):
    """``tree`` is the unpacked sdist: editable installs are made of it, which shows that it is complete."""

    sdist: Path
    wheel: Path
    tree: Path


@pytest.fixture(scope="session")
def artifacts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """The sdist of this working tree, and the wheel made from that sdist; or those of ``--artifacts``.

    Built from a copy: setuptools writes into the tree, and pytest's workers do this at the same time.
    """
    folder = tmp_path_factory.mktemp("artifacts")
    built = request.config.getoption("--artifacts", default=None) or folder
    if built is folder:

        def not_source(place: str, names: list[str]) -> set[str]:  # inference/models, too, is source
            return NOT_SOURCE(place, names) | (BUILT if Path(place) == ROOT else set())

        source = shutil.copytree(ROOT, folder / "source", ignore=not_source)
        check_call([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source])
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return Artifacts(sdist.absolute(), wheel.absolute(), folder / sdist.name.removesuffix(".tar.gz"))


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """An empty environment (no pip in it) that sees the stand-in for Megatron."""

    def make(name: str, version: str = CURRENT) -> Environment:
        environment = Environment(tmp_path_factory.mktemp(name) / "venv")
        check_call([interpreter(version), "-m", "venv", "--without-pip", environment.path])
        (environment.site_packages / "stand_in.pth").write_text(f"{STAND_IN}\n")
        return environment

    return make


def interpreter(version: str) -> str:
    """The base interpreter of that version; skips the test if this machine has none."""
    if version == CURRENT:
        return getattr(sys, "_base_executable", sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for candidate in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        # A pyenv shim is on PATH for each version installed, whether or not it is switched on.
        if candidate and run([candidate, "-c", "import venv"]).returncode == 0:
            return str(candidate)
    pytest.skip(f"no Python {version} on this machine")


# The oldest and the newest Python. Tests with torch install the wheel for the one that runs them.
WHEELS = [VERSIONS[0], VERSIONS[-1]]
WHEELS += [pytest.param(one, marks=pytest.mark.nightly) for one in VERSIONS[1:-1]]


@pytest.fixture(scope="session", params=[*WHEELS, "editable"])
def installed(
    request: pytest.FixtureRequest, artifacts: Artifacts, make_environment: Callable[..., Environment]
) -> Iterator[Environment]:
    is_editable = request.param == "editable"
    environment = make_environment(f"of-{request.param}", CURRENT if is_editable else request.param)
    source = ["--editable", artifacts.tree] if is_editable else [artifacts.wheel]
    environment.pip("install", "--quiet", "wrapt>=1.16,<3")
    environment.install(*source)
    yield environment
    environment.pip("uninstall", "--quiet", "--yes", "megatron-rl-patches")
    assert [*environment.site_packages.glob("*megatron_rl_patches*")] == []  # startup files, too
    shutil.rmtree(environment.path)


@pytest.fixture(scope="session")
def with_torch(artifacts: Artifacts, make_environment: Callable[..., Environment]) -> Environment:
    """The wheel in an environment that sees all packages of the one that runs the tests, torch for one."""
    environment = make_environment("with-torch")
    environment.install(artifacts.wheel)
    # Only put on the path: startup files in there do not run, so an install of this package there is mute.
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (environment.site_packages / "zz_packages_of_the_tests.pth").write_text("\n".join(packages) + "\n")
    return environment
