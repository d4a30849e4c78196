"""What doctor gathers: from small hosts, and in fresh Pythons with and without the startup file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import doctor
from megatron_rl_patches.doctor import Choice, Startup, choice_of, problems_of
from megatron_rl_patches.engine.report import SiteStatus
from megatron_rl_patches.engine.sources import Folder
from megatron_rl_patches.engine.spec import Patch
from megatron_rl_patches.engine.survey import survey
from megatron_rl_patches.settings import Settings

ROOT = Path(__file__).parents[2]


def patch_with(*sites: tuple[str, str], **options: object) -> Patch:
    patch = Patch("test-patch", "for tests")
    for module, qualname in sites:
        patch.wrap(module, qualname, **options)(lambda wrapped, instance, args, kwargs: None)
    return patch


def make_host(folder: Path, text: str) -> Folder:
    (folder / "host").mkdir()
    (folder / "host" / "__init__.py").touch()
    (folder / "host" / "model.py").write_text(text)
    return Folder(folder)


class TestSurvey:
    @pytest.mark.parametrize(
        ("text", "state"),
        [
            ("def train(model): ...", "fits"),
            ("def train(model, fixed): ...", "not needed"),
            ("def train(chunks): ...", "drifted"),
            ("from .other import train", "drifted"),
            ("", "missing"),
            ("def train(model: ...", "failed"),
        ],
    )
    def test_states(self, tmp_path: Path, text: str, state: str) -> None:
        patch = patch_with(
            ("host.model", "train"),
            uses=("model",),
            not_needed=lambda facts: "it is fixed" if "fixed" in facts.parameters else None,
        )
        (finding,) = survey(make_host(tmp_path, text), [patch], Settings())
        assert (finding.patch, finding.host, finding.target) == ("test-patch", "host", "host.model.train")
        assert finding.state == state
        assert finding.is_fault is (state in {"drifted", "missing", "failed"})

    def test_an_absent_host_is_no_fault(self, tmp_path: Path) -> None:
        (finding,) = survey(Folder(tmp_path), [patch_with(("host.model", "train"))], Settings())
        assert finding.state == "absent"
        assert not finding.is_fault

    def test_all_or_none(self, tmp_path: Path) -> None:
        patch = patch_with(("host.model", "train"), ("host.model", "save"))
        findings = survey(make_host(tmp_path, "def train(): ..."), [patch], Settings())
        assert [finding.state for finding in findings] == ["missing", "missing"]
        assert findings[0].reason.startswith("held back: host.model.save")


class TestChoice:
    @pytest.mark.parametrize(
        ("environ", "selected"),
        [
            ({}, False),
            ({"MEGATRON_RL_PATCHES": "0"}, False),
            ({"MEGATRON_RL_PATCHES": "1"}, True),
            ({"MEGATRON_RL_PATCHES": "reentrant-train"}, True),
            ({"MEGATRON_RL_PATCHES": "all,-reentrant-train"}, False),
            ({"AUTOWRAPT_BOOTSTRAP": "other,megatron_rl_patches"}, True),
            ({"AUTOWRAPT_BOOTSTRAP": "megatron_rl_patches", "MEGATRON_RL_PATCHES": "0"}, False),
        ],
    )
    def test_selection(self, environ: dict[str, str], selected: bool) -> None:
        choice = choice_of(environ)
        assert ("reentrant-train" in choice.patches) is selected
        assert choice.problems == ()

    @pytest.mark.parametrize(
        ("environ", "told"),
        [
            ({"MEGATRON_RL_PATCHES": "nonsense"}, "unknown patch 'nonsense'; known: "),
            ({"MEGATRON_RL_PATCHES_STRICT": "maybe"}, "expected 1 or 0"),
            ({"MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS": "nonsense"}, "expected 'package.module:function'"),
            ({"MEGATRON_RL_PATCHES_STRIKT": "1"}, "MEGATRON_RL_PATCHES_STRIKT: no such variable; known: "),
        ],
    )
    def test_problems(self, environ: dict[str, str], told: str) -> None:
        (problem,) = choice_of(environ).problems
        assert told in problem


FIRES = Startup("file", True, "")
FAULT = SiteStatus("patch", "slime", "slime.train", "drifted", "why")


@pytest.mark.parametrize(
    ("patches", "autowrapt", "findings", "startup", "wrapt", "problem"),
    [
        ((), False, [FAULT], Startup(None, False, ""), "2.5.2", None),
        (("patch",), False, [], FIRES, "2.5.2", None),
        (("patch",), False, [FAULT], FIRES, "2.5.2", "patch: slime.train: drifted: why"),
        (("another",), False, [FAULT], FIRES, "2.5.2", None),
        (("patch",), False, [], Startup(None, False, "of -S"), "2.5.2", "startup file does not fire: of -S"),
        (("patch",), True, [], Startup(None, False, ""), "2.5.2", "autowrapt is not installed"),
        ((), False, [], FIRES, None, "wrapt is not installed"),
        ((), False, [], FIRES, "1.15.0", "wrapt 1.15.0 is out of range"),
        ((), False, [], FIRES, "1.16.0rc1", None),
        ((), False, [], FIRES, "3.0.0", "wrapt 3.0.0 is out of range"),
    ],
)
def test_problems_of(
    patches: tuple[str, ...],
    autowrapt: bool,
    findings: list[SiteStatus],
    startup: Startup,
    wrapt: str | None,
    problem: str | None,
) -> None:
    choice = Choice(patches, Settings(), autowrapt, ())
    problems = problems_of(choice, findings, startup, wrapt, autowrapt=None)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_the_wrapt_range_is_the_one_that_is_required() -> None:
    assert f'"wrapt{doctor.WRAPT_RANGE}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("MAJOR = 0\nMINOR = 16\nPATCH = 0\nPRE_RELEASE = 'rc0'\n", "0.16.0rc0"),
        ("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\nVERSION = (MAJOR, MINOR)\n", "0.16.1"),
        ("__version__ = '1'\n", None),
    ],
)
def test_version_in(text: str, version: str | None) -> None:
    assert doctor.version_in(text) == version


def test_a_host_in_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_host(tmp_path, "")
    (tmp_path / "host/package_info.py").write_text("MAJOR = 1\nMINOR = 2\nPATCH = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.examine_host("host") == doctor.Host("host", str(tmp_path / "host"), "1.2.3")
    assert doctor.examine_host("mrp_nowhere") == doctor.Host("mrp_nowhere", None, None)


def test_the_hosts_are_those_of_the_patches() -> None:
    patch = patch_with(("megatron.core.part", "f"), ("host.model", "g"), copied_by=("copier",))
    assert doctor.host_names([patch], Settings()) == ["copier", "host", "megatron.core"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder


class TestStartup:
    """In fresh Pythons that find the package on PYTHONPATH."""

    @pytest.fixture
    def site_packages(self, environment: Path) -> Path:
        (found,) = environment.glob("lib/python*/site-packages")
        for file in found.glob("*megatron_rl_patches*"):
            file.unlink()
        return found

    def examine(self, environment: Path, *path: Path, **variables: str) -> dict[str, Any]:
        code = (
            "import dataclasses, json, sys\n"
            "from megatron_rl_patches import doctor\n"
            "found = doctor.examine()\n"
            "assert not {'torch', 'wrapt', 'typer', 'rich', 'megatron'} & sys.modules.keys()\n"
            "print(json.dumps(dataclasses.asdict(found)))"
        )
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("MEGATRON_RL_PATCHES", "PYTHON"))
        }
        done = subprocess.run(
            [environment / "bin/python", "-c", code],
            env={**inherited, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), **variables},
            cwd=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def test_fires_from_site_packages(self, environment: Path, site_packages: Path) -> None:
        file = shutil.copy(ROOT / "startup" / doctor.STARTUP_FILE, site_packages)
        found = self.examine(environment)
        assert found["startup"] == {
            "file": str(file),
            "fires": True,
            "reason": "a new process of this Python has the import trigger",
        }

    def test_does_not_fire_from_pythonpath(self, environment: Path, site_packages: Path) -> None:
        found = self.examine(environment, MEGATRON_RL_PATCHES="1")
        assert found["startup"]["fires"] is False
        assert "PYTHONPATH or in a source tree; install it with pip" in str(found["startup"])
        assert "MEGATRON_RL_PATCHES is set, but the startup file does not fire" in str(found["problems"])

    def test_does_not_fire_from_a_target_folder(
        self, environment: Path, site_packages: Path, tmp_path: Path
    ) -> None:
        file = shutil.copy(ROOT / "startup" / doctor.STARTUP_FILE, tmp_path)
        found = self.examine(environment, tmp_path)["startup"]
        assert (found["file"], found["fires"]) == (str(file), False)
        assert "Python reads no .pth file there" in found["reason"]

    def test_a_startup_file_that_fails(self, environment: Path, site_packages: Path) -> None:
        (site_packages / doctor.STARTUP_FILE).write_text("import mrp_nowhere\n")
        found = self.examine(environment)["startup"]
        assert found["fires"] is False
        assert found["file"] == str(site_packages / doctor.STARTUP_FILE)
        assert found["reason"]

    def test_without_torch_megatron_and_wrapt(self, environment: Path, site_packages: Path) -> None:
        found = self.examine(environment)
        assert found["torch"] is None
        assert found["wrapt"] is None
        assert {host["path"] for host in found["hosts"]} == {None}
        assert {site["state"] for site in found["sites"]} == {"absent"}
        assert found["problems"] == ["wrapt is not installed; needed: wrapt>=1.16,<3"]


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = doctor.examine_startup({})
    assert not found.fires
    assert "could not be tried" in found.reason


def test_a_host_that_the_trigger_does_not_know_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = SiteStatus("patch", "my_host", "my_host.loop.train", "fits", "")
    choice = Choice(("patch",), Settings(), False, ())
    startup = Startup("file", True, "")

    def problems() -> list[str]:
        return problems_of(choice, [finding], startup, "2.0", None)

    assert problems() == [
        "the import of my_host does not activate anything: add it to MEGATRON_RL_PATCHES_ROOTS"
    ]
    monkeypatch.setenv("MEGATRON_RL_PATCHES_ROOTS", "my_host")
    assert problems() == []
