"""What doctor gathers, in fresh Pythons, too, and its screen, which a terminal of 80 x 24 holds."""

import io
import json
import shlex
import shutil
import site
import sys
import venv
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from pytest import MonkeyPatch
from rich.console import Console

from megatron_rl_patches import doctor
from megatron_rl_patches.cli.screens import Screen, show_diagnosis
from megatron_rl_patches.doctor import Choice, Diagnosis, Framework, Problem, Startup, choice_of, problems_of
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.judge import judge_all
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.engine.settings import Settings
from megatron_rl_patches.engine.sources import Environment
from megatron_rl_patches.engine.statuses import SiteStatus
from megatron_rl_patches.errors import InvalidInputError
from tests.worlds.files import write
from tests.worlds.program import ROOT, run_program, without_ours

NAME, ERROR = "MEGATRON_RL_PATCHES", ": no such variable;"


@pytest.mark.parametrize(
    ("variable", "value", "message", "remedy"),
    [
        ("#", "lean-los,lean-loss,no", "unknown patch 'lean-los', 'no'; known: ", "export #=lean-loss"),
        ("#", "all,-lean-los", "unknown patch '-lean-los'; known: ", "export #=all,-lean-loss"),
        ("#", "no-patch", "unknown patch 'no-patch'; known: ", "export #=1"),
        ("#_STRICT", "maybe", "expected 1 or 0", "unset #_STRICT"),
        ("#_TRAIN_FUNCTIONS", "nonsense", "expected 'module:function'", "unset #_TRAIN_FUNCTIONS"),
        ("#_TRAIN_FUNCTIONS", "__main__:train", "decorate this one", "unset #_TRAIN_FUNCTIONS"),
        ("#_STRIKT", "1", f"#_STRIKT{ERROR} there is #_STRICT", "unset #_STRIKT; export #_STRICT=1"),
        (NAME[:-2], "1", f"{NAME[:-2]}{ERROR} there is #", f"unset {NAME[:-2]}; export #=1"),
        ("#_XYZ", "1", f"#_XYZ{ERROR} known: #, ", "unset #_XYZ"),
    ],
)
def test_problems_of_variables(variable: str, value: str, message: str, remedy: str) -> None:
    """``#`` stands for MEGATRON_RL_PATCHES."""
    variable, message, remedy = (text.replace("#", NAME) for text in (variable, message, remedy))
    (problem,) = choice_of({variable: value}).problems
    assert message in problem.message and problem.remedy == remedy
    both = choice_of({variable: value, f"{NAME}_LEAN_HEAD_TILE_BYTES": "-1"}).problems
    assert {one.remedy for one in both} == {remedy, f"unset {NAME}_LEAN_HEAD_TILE_BYTES"}


FIRES, DEAD = Startup("file", True, ""), Startup(None, False, "of -S")
FAULT = SiteStatus("patch", "slime", "slime.train", "drifted", "why")
SHARES_IT = replace(FAULT, target="slime.save", because_of="slime.train")
ABSENT = replace(FAULT, state="absent")
ELSEWHERE = "run doctor with the Python and the PYTHONPATH of the job"
PIP = f"{shlex.quote(sys.executable)} -m pip install"
INSTALL_WRAPT = f"{PIP} 'wrapt>=1.16,<3'"
REINSTALL = f"{PIP} --no-deps --editable {shlex.quote(str(ROOT))}"


@pytest.mark.parametrize(
    ("patch", "statuses", "startup", "wrapt", "message", "remedy"),
    [
        ("", [FAULT], DEAD, "2.5.2", "", ""),
        ("another", [FAULT], FIRES, "2.5.2", "", ""),
        ("patch", [FAULT, SHARES_IT], FIRES, "2.5.2", "patch: slime.train: drifted: why", f"export {NAME}=0"),
        ("patch", [], DEAD, "2.5.2", "startup file does not fire: of -S", REINSTALL),
        ("", [], FIRES, None, "wrapt is not installed", INSTALL_WRAPT),
        ("", [], FIRES, "1.15.0", "wrapt 1.15.0 is out of range", INSTALL_WRAPT),
        ("", [], FIRES, "3.0.0", "wrapt 3.0.0 is out of range", INSTALL_WRAPT),
        ("patch", [ABSENT], FIRES, "2.5.2", "no framework of the selected patches", ELSEWHERE),
    ],
)
def test_problems_of(
    patch: str, statuses: list[SiteStatus], startup: Startup, wrapt: str | None, message: str, remedy: str
) -> None:
    choice = Choice((patch,) if patch else (), Settings(), (), {NAME: "1"})
    problems = problems_of(choice, statuses, startup, wrapt)
    assert len(problems) == bool(message)
    assert all(message in problem.message and problem.remedy == remedy for problem in problems)


LEAN = {"lean-loss", "lean-head"}
DEFAULT = {*registry.patches_of("default")} - LEAN


@pytest.mark.parametrize(
    ("value", "selected"),
    [
        *(("1", DEFAULT), ("all,-inference-only", DEFAULT - {"inference-only"})),
        *(("lean-loss,reentrant-train", {"reentrant-train"}), ("lean-loss", set())),
    ],
)
def test_one_line_leaves_out_all_patches_that_do_not_fit(value: str, selected: set[str]) -> None:
    faults = [replace(FAULT, patch=patch) for patch in LEAN]
    problems = problems_of(choice_of({NAME: value}), faults, FIRES, "2.5.2")
    (remedy,) = {problem.remedy for problem in problems}
    variable, _, value = remedy.removeprefix("export ").partition("=")
    assert set(choice_of({variable: value}).patches) == selected


def test_the_remedies_name_what_is_there(monkeypatch: MonkeyPatch) -> None:
    """Of wrapt the range that is required; where there is no source tree the package is installed again."""
    assert f'"wrapt{doctor.WRAPT_RANGE}"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(doctor, "__file__", "/venv/site-packages/megatron_rl_patches/doctor.py")
    (problem,) = problems_of(Choice(("patch",), Settings(), (), {}), [], DEAD, "2.5.2")
    assert problem.remedy.endswith(" -m pip install --no-deps --force-reinstall megatron-rl-patches")


PACKAGE = {"mrp_framework/__init__.py": ""}


def test_frameworks_and_their_versions(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A folder that hides a package does not have its version, unless it is the one that is installed."""
    site_packages, checkout = tmp_path / "site-packages", write(tmp_path / "a checkout", PACKAGE)
    metadata = "Metadata-Version: 2.1\nName: mrp_framework\nVersion: 1.2.3\n"
    write(site_packages, {**PACKAGE, "mrp_framework-1.2.3.dist-info/METADATA": metadata})

    def found() -> tuple[str | None, str | None]:
        framework = doctor.examine_framework("mrp_framework")
        return framework.path, framework.version

    assert found() == (None, None)
    monkeypatch.syspath_prepend(site_packages)
    assert found() == (str(site_packages / "mrp_framework"), "1.2.3")
    monkeypatch.syspath_prepend(checkout)
    assert found() == (str(checkout / "mrp_framework"), None)
    write(checkout, {"mrp_framework/package_info.py": "MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = ''\n"})
    assert found() == (str(checkout / "mrp_framework"), "0.20.1")
    url = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    write(site_packages, {"mrp_framework-1.2.3.dist-info/direct_url.json": json.dumps(url)})
    assert found() == (str(checkout / "mrp_framework"), "1.2.3")


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """That of a fresh Python, whose children find the package on PYTHONPATH."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    [folder] = tmp_path.glob("venv/lib/python*/site-packages")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(folder)])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    others = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    return folder


def test_if_the_startup_file_fires(tmp_path: Path, site_packages: Path, monkeypatch: MonkeyPatch) -> None:
    """From site-packages alone, and if nothing in it fails."""
    beside = shutil.copy(ROOT / "packaging" / doctor.STARTUP_FILE, tmp_path)
    environ = without_ours() | {"PYTHONPATH": str(ROOT)}
    found = doctor.examine_startup(environ)
    assert (found.file, found.fires) == (str(beside), False)
    assert "Python reads no .pth file there" in found.reason
    file = str(shutil.copy(beside, site_packages))
    reason = "a new process of this Python has the import trigger"
    assert doctor.examine_startup(environ) == Startup(file, True, reason)
    Path(file).write_text("import mrp_nowhere\n")
    found = doctor.examine_startup(environ)
    assert (found.file, found.fires) == (file, False) and found.reason
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = doctor.examine_startup({})
    assert not found.fires and "could not be tried" in found.reason


CODE = """
import dataclasses, json, sys
from megatron_rl_patches import doctor
diagnosis = doctor.examine()
assert not {'torch', 'wrapt', 'typer', 'rich', 'megatron'} & sys.modules.keys()
print(json.dumps(dataclasses.asdict(diagnosis)))
"""


@pytest.mark.usefixtures("site_packages")
def test_a_python_without_torch_megatron_wrapt_and_startup_file(tmp_path: Path) -> None:
    done = run_program(tmp_path, {"program.py": CODE}, MEGATRON_RL_PATCHES="1")
    assert done.returncode == 0, done.stderr
    diagnosis = json.loads(done.stdout)
    assert diagnosis["torch"] is diagnosis["wrapt"] is None
    assert {framework["path"] for framework in diagnosis["frameworks"]} == {None}
    assert {site["state"] for site in diagnosis["sites"]} == {"absent"}
    startup = diagnosis["startup"]
    assert not startup["fires"] and "source tree; install it with pip" in startup["reason"]
    assert [problem["message"] for problem in diagnosis["problems"]] == [
        "wrapt is not installed; needed: wrapt>=1.16,<3",
        f"{NAME} is set, but the startup file does not fire: {startup['reason']}",
        "no framework of the selected patches is in this Python, so nothing takes effect here",
    ]


def test_roots_and_the_frameworks_of_the_patches(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A framework must be named where the trigger does not know it; a name must be one of a package."""
    monkeypatch.syspath_prepend(write(tmp_path, PACKAGE))
    status = SiteStatus("patch", "mrp_framework", "mrp_framework.loop.train", "fits", "")

    def problems(roots: str = "") -> tuple[Problem, ...]:
        monkeypatch.setenv(f"{NAME}_ROOTS", roots)
        variables = {f"{NAME}_ROOTS": roots} if roots else {}
        return tuple(problems_of(Choice(("patch",), Settings(), (), variables), [status], FIRES, "2.0"))

    message = f"the import of mrp_framework does not activate anything: add it to {NAME}_ROOTS"
    assert problems() == (Problem(message, f"export {NAME}_ROOTS=mrp_framework"),)
    remedy = f"export {NAME}_ROOTS=json,mrp_framework"
    assert [problem.remedy for problem in problems("json")] == [remedy]
    absent, problem = problems("framwork,json")
    assert absent.message == f"{NAME}_ROOTS names framwork, which is not in this environment"
    assert absent.remedy == problem.remedy == remedy
    assert problems("mrp_framework") == ()


@pytest.mark.parametrize(
    ("functions", "problem", "others"),
    [
        ("mrp_single:train,mrp_framework.loop:trian", "loop does not define trian", "mrp_single:train"),
        ("mrp_singel:train", f"no mrp_singel in this environment; {NAME}_TRAIN_FUNCTIONS names it", "''"),
        ("mrp_framework.loop:train,mrp_framework.loop:Trainer.fit,mrp_single:train", "", ""),
    ],
)
def test_configured_functions_of_a_framework_that_nobody_knows(
    tmp_path: Path, monkeypatch: MonkeyPatch, functions: str, problem: str, others: str
) -> None:
    train = "def train(model): ...\n"
    loop = f"{train}class Trainer:\n    def fit(self, model): ..."
    files = {"mrp_framework/loop.py": loop, "mrp_single.py": train}
    monkeypatch.syspath_prepend(write(tmp_path, files))
    choice = choice_of({NAME: "1", f"{NAME}_TRAIN_FUNCTIONS": functions})
    statuses = judge_all(Environment(), [registry.patches()["reentrant-train"]], choice.settings)
    monkeypatch.setenv(f"{NAME}_TRAIN_FUNCTIONS", functions)
    problems = problems_of(choice, statuses, FIRES, "2.0")
    assert [one.remedy for one in problems] == [f"export {NAME}_TRAIN_FUNCTIONS={others}"] * bool(problem)
    assert all(problem in one.message for one in problems)


def test_a_patch_whose_own_code_fails_is_alone(monkeypatch: MonkeyPatch) -> None:
    configured, notes = (Mock(side_effect=error) for error in (ValueError("not today"), SystemExit(0)))
    broken = Patch("broken", "", configured=configured, notes=notes)
    broken.wrap("mrp_nowhere.model", "train")(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {"broken": broken})
    diagnosis = doctor.examine({NAME: "1"})
    message = "function `configured` of patch 'broken' raised ValueError: not today"
    assert f"broken: broken.configured: failed: {message}" in [one.message for one in diagnosis.problems]
    assert "broken: its function `notes` raised SystemExit: 0" in diagnosis.notes
    assert diagnosis.frameworks == ()


HOOK = "megatron_rl_patches.hooks.on_megatron_init"
OF_VERL = "megatron_rl_patches.hooks.verl"
# Ray takes only text.
NUMBERS = (f"python3 -m verl +a.env_vars.{NAME}=1", f"""python3 x --train-env-vars '{{"{NAME}": 1}}'""")
IN_JSON = f"""ray submit --runtime-env-json='{{"env_vars": {{"{NAME}": "1", "{NAME}_STRICT": "1"}}}}'"""


@pytest.mark.parametrize(
    ("command", "variables", "hook"),
    [
        (f"python train.py --custom-megatron-init-path {HOOK}", {}, HOOK),
        (f"python3 -m verl x=1 a.external_lib={OF_VERL}", {}, OF_VERL),
        (f"{NAME}=all,-lean-loss torchrun train.py", {NAME: "all,-lean-loss"}, None),
        *((command, {NAME: "1"}, None) for command in NUMBERS),
        ("python train.py +env_vars.MEGATRON_RL_PATCH=all", {"MEGATRON_RL_PATCH": "all"}, None),
        (f"""python train.py "+ray.env_vars.{NAME}='lean-loss,all'" """, {NAME: "lean-loss,all"}, None),
        (IN_JSON, {NAME: "1", f"{NAME}_STRICT": "1"}, None),
        ("python train.py --lr 1e-6", {}, None),
    ],
)
def test_what_a_command_line_switches_on(command: str, variables: dict[str, str], hook: str | None) -> None:
    assert doctor.read_command(command) == (variables, hook)
    numbers = ["Ray takes only text" in problem.message for problem in doctor._numbers_in(command)]
    assert numbers == [True] * (command in NUMBERS)
    with pytest.raises(InvalidInputError, match="no shell can read: No closing quotation"):
        doctor.read_command(f"{command} 'x")


def test_what_is_wrong_in_a_command_is_corrected_in_it() -> None:
    command = f"""python train.py --train-env-vars '{{"{NAME}_STRIKT": "1"}}'"""
    remedies = {p.message: p.remedy for p in doctor.examine({f"{NAME}_XYZ": "1"}, command).problems}
    in_command = f"in the command: leave out {NAME}_STRIKT; write {NAME}_STRICT=1"
    assert remedies[f"{NAME}_STRIKT{ERROR} there is {NAME}_STRICT"] == in_command
    assert f"unset {NAME}_XYZ" in remedies.values()


def test_a_hook_needs_neither_variable_nor_startup_file(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine_startup", lambda environ: DEAD)
    named = doctor.examine({}, f"python train.py --custom-megatron-init-path {HOOK}")
    assert named.hook == HOOK and "reentrant-train" in named.selected
    assert not [problem for problem in named.problems if "startup" in problem.message]
    assert [p for p in doctor.examine({NAME: "1"}).problems if "startup" in p.message]


FITS = SiteStatus("lean-loss", "slime", "slime.loss.log_probs", "fits", "has the bug that the patch fixes")
SITES = (
    FITS,
    replace(FITS, target="slime.loss.Loss.entropy"),
    replace(FITS, target="slime.loss.gather", state="not needed", reason="it gathers nothing"),
    replace(FITS, framework="verl", target="verl.loss", state="absent", reason="no verl here"),
    SiteStatus("lean-head", "megatron.core", "megatron.core.gpt.GPT.forward", "drifted", "it is gone"),
    SiteStatus("lean-head", "megatron.core", "a.b", "drifted", "another site", because_of="GPT.forward"),
    SiteStatus("distillation", "verl", "verl.actor", "absent", "no verl here"),
)
DIAGNOSIS = Diagnosis(
    version="0.2.0",
    path="/venv/megatron_rl_patches",
    python="3.11.7",
    executable="/venv/bin/python",
    torch=None,
    wrapt="2.5.2",
    frameworks=(Framework("slime", "/slime", None), Framework("verl", None, None)),
    variables={"MEGATRON_RL_PATCHES": "lean-loss", "MEGATRON_RL_PATCHES_STRICT": "1"},
    selected=("lean-loss",),
    sites=SITES,
    startup=Startup("/venv/startup.pth", True, ""),
    notes=(),
    problems=(),
)


def screen(diagnosis: Diagnosis = DIAGNOSIS, width: int = 80, terminal: bool = False) -> list[str]:
    """Return the lines that are printed, without colors."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None)
    show_diagnosis(diagnosis, Screen(console))
    return file.getvalue().splitlines()


def test_a_row_for_each_patch_and_framework_and_reasons_for_the_rest() -> None:
    assert screen() == [
        "megatron-rl-patches 0.2.0, Python 3.11.7, torch absent, wrapt 2.5.2",
        "python                        /venv/bin/python",
        "megatron_rl_patches           /venv/megatron_rl_patches",
        "startup file         fires    /venv/startup.pth",
        "slime                unknown  /slime",
        "absent: verl",
        "",
        "MEGATRON_RL_PATCHES_STRICT=1",
        "MEGATRON_RL_PATCHES=lean-loss selects lean-loss",
        "",
        "patch         framework      functions",
        "lean-loss     slime          2 patched, 1 not needed",
        "lean-head     megatron.core  2 drifted (if selected by all)",
        "distillation  -              absent",
        "lean-head: megatron.core.gpt.GPT.forward: drifted: it is gone",
        "why a patch is not needed: megatron-rl-patches check",
        "no problems in this Python with these variables",
    ]


def test_what_is_wrong_is_shown_with_lines_to_copy(monkeypatch: MonkeyPatch) -> None:
    """Of a variable that fires nowhere, the places that it does not reach; of problems, shared remedies."""
    dead = replace(DIAGNOSIS, startup=Startup(None, False, "why"))
    unreachable = "- python -S: startup files of site-packages are not read"
    assert unreachable in screen(dead) and unreachable not in screen(replace(dead, selected=()))
    remedy = "export MEGATRON_RL_PATCHES=all,-inference-only,-lean-head,-lean-loss"
    problems = Problem("one", remedy), Problem("two", "unset B"), Problem("three", remedy)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    paths = {"executable": "/home/me/[bold]/python", "path": "/mnt/home/me/package"}
    lines = screen(replace(DIAGNOSIS, **paths, problems=problems), width=40, terminal=True)
    assert lines[-5:] == ["- one", "- three", f"  {remedy}", "- two", "  unset B"]
    assert {"  ~/[bold]/python", "  /mnt/home/me/package"} <= set(lines)
