"""What doctor gathers: from small frameworks, and in fresh Pythons with and without the startup file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import PatchError, apply, doctor
from megatron_rl_patches.doctor import Choice, Problem, Startup, choice_of, problems_of
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.engine.judge import judge_all
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.settings import Settings
from megatron_rl_patches.engine.sources import Environment
from megatron_rl_patches.engine.statuses import SiteStatus
from megatron_rl_patches.errors import InvalidInputError

ROOT = Path(__file__).parents[2]


def patch_with(*sites: tuple[str, str], **options: object) -> Patch:
    patch = Patch("test-patch", "for tests")
    for module, qualname in sites:
        patch.wrap(module, qualname, **options)(lambda call: None)
    return patch


NAME = "MEGATRON_RL_PATCHES"


@pytest.mark.parametrize(
    ("variable", "value", "message", "remedy"),
    [
        (
            NAME,
            "lean-los,reentrant-train,nonsense",
            "unknown patch 'lean-los', 'nonsense'; known: ",
            f"export {NAME}=reentrant-train",
        ),
        (NAME, "all,-lean-los", "unknown patch '-lean-los'; known: ", f"export {NAME}=all"),
        (NAME, "nonsense", "unknown patch 'nonsense'; known: ", f"export {NAME}=all"),
        (f"{NAME}_STRICT", "maybe", "expected 1 or 0", f"unset {NAME}_STRICT"),
        (
            f"{NAME}_TRAIN_FUNCTIONS",
            "nonsense",
            "expected 'module:function'",
            f"unset {NAME}_TRAIN_FUNCTIONS",
        ),
        (f"{NAME}_TRAIN_FUNCTIONS", "__main__:train", "decorate this one", f"unset {NAME}_TRAIN_FUNCTIONS"),
        (
            f"{NAME}_STRIKT",
            "1",
            f"{NAME}_STRIKT: no such variable; there is {NAME}_STRICT",
            f"unset {NAME}_STRIKT; export {NAME}_STRICT=1",
        ),
        (
            NAME[:-2],
            "1",
            f"{NAME[:-2]}: no such variable; there is {NAME}",
            f"unset {NAME[:-2]}; export {NAME}=1",
        ),
        (f"{NAME}_XYZ", "1", f"{NAME}_XYZ: no such variable; known: {NAME}, ", f"unset {NAME}_XYZ"),
    ],
)
def test_problems_of_variables(variable: str, value: str, message: str, remedy: str) -> None:
    (problem,) = choice_of({variable: value}).problems
    assert message in problem.message and problem.remedy == remedy
    both = choice_of({variable: value, f"{NAME}_LEAN_HEAD_TILE_BYTES": "-1"}).problems
    assert {one.remedy for one in both} == {remedy, f"unset {NAME}_LEAN_HEAD_TILE_BYTES"}


FIRES = Startup("file", True, "")
FAULT = SiteStatus("patch", "slime", "slime.train", "drifted", "why")
SHARES_IT = replace(FAULT, target="slime.save", because_of="slime.train")
INSTALL_WRAPT = f"{shlex.quote(sys.executable)} -m pip install 'wrapt>=1.16,<3'"


REINSTALL = f"{shlex.quote(sys.executable)} -m pip install --no-deps --editable {shlex.quote(str(ROOT))}"
DEAD = Startup(None, False, "of -S")


@pytest.mark.parametrize(
    ("patch", "statuses", "startup", "wrapt", "message", "remedy"),
    [
        ("", [FAULT], DEAD, "2.5.2", "", ""),
        ("patch", [], FIRES, "2.5.2", "", ""),
        ("another", [FAULT], FIRES, "2.5.2", "", ""),
        ("patch", [FAULT, SHARES_IT], FIRES, "2.5.2", "patch: slime.train: drifted: why", f"export {NAME}=0"),
        ("patch", [], DEAD, "2.5.2", "startup file does not fire: of -S", REINSTALL),
        ("", [], FIRES, None, "wrapt is not installed", INSTALL_WRAPT),
        ("", [], FIRES, "1.15.0", "wrapt 1.15.0 is out of range", INSTALL_WRAPT),
        ("", [], FIRES, "1.16.0rc1", "", ""),
        ("", [], FIRES, "3.0.0", "wrapt 3.0.0 is out of range", INSTALL_WRAPT),
    ],
)
def test_problems_of(
    patch: str, statuses: list[SiteStatus], startup: Startup, wrapt: str | None, message: str, remedy: str
) -> None:
    choice = Choice((patch,) if patch else (), Settings(), (), {NAME: "1"})
    problems = problems_of(choice, statuses, startup, wrapt)
    assert len(problems) == bool(message)
    assert all(message in problem.message and problem.remedy == remedy for problem in problems)


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        (
            "1",
            [
                "expert-norm",
                "finite-loss",
                "finite-step",
                "inference-only",
                "reentrant-train",
                "router-replay",
                "scheduler-resume",
            ],
        ),
        (
            "all,-inference-only",
            [
                "expert-norm",
                "finite-loss",
                "finite-step",
                "reentrant-train",
                "router-replay",
                "scheduler-resume",
            ],
        ),
        ("lean-loss,reentrant-train", ["reentrant-train"]),
        ("lean-loss", []),
    ],
)
def test_one_line_leaves_out_all_patches_that_do_not_fit(value: str, selected: list[str]) -> None:
    faults = [replace(FAULT, patch=patch) for patch in ("lean-loss", "lean-head")]
    choice = choice_of({"MEGATRON_RL_PATCHES": value})
    problems = problems_of(choice, faults, FIRES, "2.5.2")
    (remedy,) = {problem.remedy for problem in problems}
    variable, _, value = remedy.removeprefix("export ").partition("=")
    assert sorted(choice_of({variable: value}).patches) == selected


def test_without_a_source_tree_the_package_is_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "__file__", "/venv/site-packages/megatron_rl_patches/doctor.py")
    (problem,) = problems_of(Choice(("patch",), Settings(), (), {}), [], Startup(None, False, ""), "2.5.2")
    assert problem.remedy.endswith(" -m pip install --no-deps --force-reinstall megatron-rl-patches")


def test_the_wrapt_range_is_the_one_that_is_required() -> None:
    assert f'"wrapt{doctor.WRAPT_RANGE}"' in (ROOT / "pyproject.toml").read_text()


def install(site_packages: Path, **files: str) -> None:
    """Install the distribution ``framework`` 1.2.3, with these files beside its METADATA."""
    folder = site_packages / "framework-1.2.3.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: framework\nVersion: 1.2.3\n")
    for name, text in files.items():
        (folder / name).with_suffix(".json").write_text(text)


def package(folder: Path) -> Path:
    (folder / "framework").mkdir(parents=True)
    (folder / "framework" / "__init__.py").touch()
    return folder


class TestFramework:
    def test_in_this_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install(package(tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        assert doctor.examine_framework("framework") == doctor.Framework(
            "framework", str(tmp_path / "framework"), "1.2.3"
        )
        assert doctor.examine_framework("mrp_nowhere") == doctor.Framework("mrp_nowhere", None, None)

    def test_a_folder_that_hides_a_package_does_not_have_its_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(package(tmp_path / "site-packages"))
        monkeypatch.syspath_prepend(tmp_path / "site-packages")
        monkeypatch.syspath_prepend(package(tmp_path / "checkout"))
        found = doctor.examine_framework("framework")
        assert found == doctor.Framework("framework", str(tmp_path / "checkout" / "framework"), None)

    def test_an_editable_install_has_its_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkout = package(tmp_path / "a checkout")
        url = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
        install(tmp_path / "site-packages", direct_url=json.dumps(url))
        monkeypatch.syspath_prepend(tmp_path / "site-packages")
        monkeypatch.syspath_prepend(checkout)
        assert doctor.examine_framework("framework").version == "1.2.3"


def test_the_frameworks_are_those_of_the_patches() -> None:
    patch = patch_with(("megatron.core.part", "f"), ("framework.model", "g"))
    statuses = judge_all(Environment(), [patch], Settings())
    assert doctor.framework_names([patch], statuses) == ["framework", "megatron.core"]


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
            "diagnosis = doctor.examine()\n"
            "assert not {'torch', 'wrapt', 'typer', 'rich', 'megatron'} & sys.modules.keys()\n"
            "print(json.dumps(dataclasses.asdict(diagnosis)))"
        )
        ours = ("MEGATRON_RL_PATCHES", "PYTHON")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environ = {**inherited, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), **variables}
        command = [environment / "bin/python", "-c", code]
        done = subprocess.run(
            command, env=environ, cwd=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_fires_from_site_packages(self, environment: Path, site_packages: Path) -> None:
        file = shutil.copy(ROOT / "startup" / doctor.STARTUP_FILE, site_packages)
        found = self.examine(environment)
        assert found["startup"] == {
            "file": str(file),
            "fires": True,
            "reason": "a new process of this Python has the import trigger",
        }

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

    def test_on_pythonpath_without_torch_megatron_and_wrapt(
        self, environment: Path, site_packages: Path
    ) -> None:
        diagnosis = self.examine(environment, MEGATRON_RL_PATCHES="1")
        assert diagnosis["torch"] is diagnosis["wrapt"] is None
        assert {framework["path"] for framework in diagnosis["frameworks"]} == {None}
        assert {site["state"] for site in diagnosis["sites"]} == {"absent"}
        startup = diagnosis["startup"]
        assert not startup["fires"] and "source tree; install it with pip" in startup["reason"]
        assert [problem["message"] for problem in diagnosis["problems"]] == [
            "wrapt is not installed; needed: wrapt>=1.16,<3",
            f"MEGATRON_RL_PATCHES is set, but the startup file does not fire: {startup['reason']}",
        ]


def test_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = doctor.examine_startup({})
    assert not found.fires
    assert "could not be tried" in found.reason


def test_roots_and_the_frameworks_of_the_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework must be named where the trigger does not know it; a name must be one of a package."""
    (package(tmp_path) / "framework" / "loop.py").write_text("def train(model): ...")
    monkeypatch.syspath_prepend(tmp_path)
    status = SiteStatus("patch", "framework", "framework.loop.train", "fits", "")

    def problems(**roots: str) -> tuple[Problem, ...]:
        for name, value in roots.items():
            monkeypatch.setenv(name, value)
        return tuple(problems_of(Choice(("patch",), Settings(), (), roots), [status], FIRES, "2.0"))

    message = "the import of framework does not activate anything: add it to MEGATRON_RL_PATCHES_ROOTS"
    assert problems() == (Problem(message, "export MEGATRON_RL_PATCHES_ROOTS=framework"),)
    (problem,) = problems(MEGATRON_RL_PATCHES_ROOTS="json")
    assert problem.remedy == "export MEGATRON_RL_PATCHES_ROOTS=json,framework"
    absent, problem = problems(MEGATRON_RL_PATCHES_ROOTS="framwork,json")
    assert absent.message == "MEGATRON_RL_PATCHES_ROOTS names framwork, which is not in this environment"
    assert absent.remedy == problem.remedy == "export MEGATRON_RL_PATCHES_ROOTS=json,framework"
    assert problems(MEGATRON_RL_PATCHES_ROOTS="framework") == ()


class TestConfiguredFunctions:
    """What doctor says of ``MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS``, in a framework that nobody knows."""

    @pytest.fixture(params=["__init__.py", "nothing.txt"], ids=["package", "bare folder"])
    def problems(
        self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[str], list[Problem]]:
        (tmp_path / "mrp_framework").mkdir()
        (tmp_path / "mrp_framework" / request.param).touch()
        (tmp_path / "mrp_framework" / "loop.py").write_text(
            "def train(model): ...\nclass Trainer:\n    def fit(self, model): ..."
        )
        (tmp_path / "mrp_single.py").write_text("def train(model): ...")
        monkeypatch.syspath_prepend(tmp_path)

        def examine(functions: str) -> list[Problem]:
            environ = {"MEGATRON_RL_PATCHES": "1", "MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS": functions}
            choice = choice_of(environ)
            patch = registry.patches()["reentrant-train"]
            statuses = judge_all(Environment(), [patch], choice.settings)
            monkeypatch.setenv("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", functions)
            return problems_of(choice, statuses, FIRES, "2.0")

        return examine

    @pytest.mark.parametrize(
        ("functions", "problem", "others"),
        [
            ("mrp_single:train,mrp_framework.loop:trian", "loop does not define trian", "mrp_single:train"),
            ("mrp_framework.loop:Trainer.run", "loop does not define Trainer.run", "''"),
            ("mrp_framework.lop:train", f"{NAME}_TRAIN_FUNCTIONS names it", "''"),
            ("mrp_singel:train", f"no mrp_singel in this environment; {NAME}_TRAIN_FUNCTIONS names it", "''"),
        ],
    )
    def test_one_that_is_not_there(
        self, problems: Callable[[str], list[Problem]], functions: str, problem: str, others: str
    ) -> None:
        (only,) = problems(functions)
        assert problem in only.message
        assert only.remedy == f"export {NAME}_TRAIN_FUNCTIONS={others}"

    def test_those_that_are_there(self, problems: Callable[[str], list[Problem]]) -> None:
        assert problems("mrp_framework.loop:train,mrp_framework.loop:Trainer.fit,mrp_single:train") == []


@pytest.mark.parametrize("required", [True, False])
def test_a_patch_whose_own_code_fails_is_alone(
    required: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def configured(options: object) -> tuple[Any, ...]:
        raise ValueError("not today")

    def notes(statuses: object) -> list[str]:
        sys.exit(0)

    broken = Patch("broken", "", configured=configured, notes=notes)
    broken.wrap("mrp_nowhere.model", "train")(lambda wrapped, instance, args, kwargs: None)
    patches = {"test-patch": patch_with(("mrp_nowhere.model", "save")), "broken": broken}
    monkeypatch.setattr(registry, "patches", lambda: patches)
    fresh = installer.Installer()
    monkeypatch.setattr(installer, "installer", fresh)
    message = "patch 'broken' is left out: its function `configured` raised ValueError: not today"
    if required:
        with pytest.raises(PatchError, match=message):
            apply(strict=True)
    else:
        assert [site.target for site in apply()] == ["mrp_nowhere.model.save"]
        assert message in caplog.text
    diagnosis = doctor.examine({"MEGATRON_RL_PATCHES": "1"})
    assert [problem.message for problem in diagnosis.problems if "broken" in problem.message] == [
        f"broken: broken.configured: failed: {message}"
    ]
    assert "broken: its function `notes` raised SystemExit: 0" in diagnosis.notes


HOOK = "megatron_rl_patches.hooks.on_megatron_init"


@pytest.mark.parametrize(
    ("command", "variables", "hook"),
    [
        (f"python train.py --custom-megatron-init-path {HOOK}", {}, HOOK),
        (
            "python3 -m verl x=1 a.external_lib=megatron_rl_patches.hooks.verl",
            {},
            "megatron_rl_patches.hooks.verl",
        ),
        (f"{NAME}=all,-lean-loss torchrun train.py", {NAME: "all,-lean-loss"}, None),
        ("python train.py +ray.env_vars.MEGATRON_RL_PATCHES=all", {NAME: "all"}, None),
        (
            f"""python train.py "+ray.env_vars.{NAME}='lean-loss,lean-head'" """,
            {NAME: "lean-loss,lean-head"},
            None,
        ),
        (
            f"""ray submit --runtime-env-json='{{"env_vars": {{"{NAME}": "1", "{NAME}_STRICT": "1"}}}}'""",
            {NAME: "1", f"{NAME}_STRICT": "1"},
            None,
        ),
        ("python train.py --lr 1e-6", {}, None),
    ],
)
def test_what_a_command_line_switches_on(command: str, variables: dict[str, str], hook: str | None) -> None:
    assert doctor.read_command(command) == (variables, hook)


def test_a_command_that_no_shell_can_read() -> None:
    with pytest.raises(InvalidInputError, match="no shell can read: No closing quotation"):
        doctor.read_command("python train.py 'x")


def test_a_hook_needs_neither_variable_nor_startup_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_startup", lambda environ: DEAD)
    named = doctor.examine({}, f"python train.py --custom-megatron-init-path {HOOK}")
    assert named.hook == HOOK and "reentrant-train" in named.selected
    assert not [problem for problem in named.problems if "startup" in problem.message]
    assert [p for p in doctor.examine({NAME: "1"}).problems if "startup" in p.message]
