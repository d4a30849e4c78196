"""A diagnosis of an environment in which patches do not take effect. Imports no framework, and no torch."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import site
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import _megatron_rl_patches_startup as startup_trigger

from . import __version__
from .common.lazy import version_of
from .engine import registry
from .engine.judge import judge_all
from .engine.patch import third_party
from .engine.settings import ROOTS_VARIABLE, VARIABLE, Settings, items, parse_selection, variables
from .engine.sources import Environment
from .engine.statuses import SiteStatus
from .errors import InvalidInputError, PatchError

WRAPT_RANGE = ">=1.16,<3"
STARTUP_FILE = "megatron_rl_patches_startup.pth"

#: Where the environment variable does nothing. ``megatron_rl_patches.apply()`` works in all of them.
OUT_OF_REACH = (
    "python -S: startup files of site-packages are not read",
    "the package only on PYTHONPATH, or installed with pip --target: no startup file is read there",
    "a subprocess with a cleaned environment (env={}, env -i, sudo, ssh): the variable does not get there",
    "Ray workers whose raylet was started without the variable, unless runtime_env names it in env_vars",
)

_PROBE = "import sys; print(any(type(f).__module__ == '_megatron_rl_patches_startup' for f in sys.meta_path))"


@dataclass(frozen=True)
class Problem:
    """A reason why something that is selected does not take effect, and the shell line that fixes it."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Choice:
    """What the environment variables ask for, and what is wrong with them."""

    patches: tuple[str, ...]
    settings: Settings
    problems: tuple[Problem, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Framework:
    name: str
    path: str | None
    version: str | None


@dataclass(frozen=True)
class Startup:
    """The file that activates the patches; ``fires`` says whether a new process of this Python runs it."""

    file: str | None
    fires: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``doctor`` shows. ``problems`` is empty when what is selected can take effect.

    ``hook`` is what the command names of :mod:`.hooks`, which needs neither variable nor startup file.
    """

    version: str
    path: str
    python: str
    executable: str
    torch: str | None
    wrapt: str | None
    frameworks: tuple[Framework, ...]
    variables: dict[str, str]
    selected: tuple[str, ...]
    sites: tuple[SiteStatus, ...]
    startup: Startup
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    hook: str | None = None


def read_command(command: str) -> tuple[dict[str, str], str | None]:
    """Return the variables of ours that a command line sets for what it starts, and the hook that it names.

    A variable may stand before the program, at the end of an option, as Hydra's do, or in an option's JSON.

    Raises:
        InvalidInputError: a quotation in it has no end.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidInputError(f"--command is {command!r}, which no shell can read: {error}") from None
    variables = {
        name: value.strip("'")
        for word in words
        for name, value in re.findall(r"(MEGATRON_RL_\w+)\"?\s*[=:]\s*\"?([^\"\s}]*)", word)
    }
    hook = re.search(rf"{__package__}\.hooks(\.\w+)*", command)
    return variables, hook and hook[0]


def _numbers_in(command: str) -> Iterator[Problem]:
    """Yield a variable that becomes a number in Hydra's options, or in JSON, where Ray takes only text."""
    if match := re.search(rf"(?<=\.){VARIABLE}\w*=\d+\b|\"{VARIABLE}\w*\"\s*:\s*\d", command):
        remedy = 'write default in options of Hydra, and "1" in JSON'
        yield Problem(f"{match[0]} in the command is a number, and Ray takes only text", remedy)


def _in_command(problem: Problem, variables: Collection[str]) -> Problem:
    """Return the problem, whose remedy is a change of the command if the command sets the variable."""
    if not set(re.findall(r"\w+", problem.remedy)).intersection(variables):
        return problem
    remedy = problem.remedy.replace("unset ", "leave out ").replace("export ", "write ")
    return replace(problem, remedy=f"in the command: {remedy}")


def examine(environ: Mapping[str, str] = os.environ, command: str = "") -> Diagnosis:
    """Gather everything; this starts one child process.

    The variables and the hook in ``command``, the command line of a job, count as those of this environment.
    """
    of_command, hook = read_command(command)
    environ = {**environ, **of_command}
    if hook and not environ.get(VARIABLE, "").strip():
        environ[VARIABLE] = "1"
    choice = choice_of(environ)
    patches = registry.patches().values()
    statuses = judge_all(Environment(), patches, choice.settings)
    startup = examine_startup(environ)
    wrapt = version_of("wrapt")
    problems = problems_of(choice, statuses, None if hook else startup, wrapt)
    # A patch whose own code fails stands in the place of a framework.
    names = {status.framework for status in statuses} - {patch.name for patch in patches}
    return Diagnosis(
        version=__version__,
        path=str(Path(__file__).parent),
        python=sys.version.split()[0],
        executable=sys.executable,
        torch=version_of("torch"),
        wrapt=wrapt,
        frameworks=tuple(map(examine_framework, sorted(names))),
        variables=dict(choice.variables),
        selected=choice.patches,
        sites=tuple(statuses),
        startup=startup,
        notes=tuple(notes_of(choice, statuses)),
        problems=(*_numbers_in(command), *(_in_command(problem, of_command) for problem in problems)),
        hook=hook,
    )


def choice_of(environ: Mapping[str, str] = os.environ) -> Choice:
    """Return what the variables select. A value that does not parse is reported as a problem, not raised."""
    ours = {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLE) or difflib.get_close_matches(name, [VARIABLE], 1, 0.9)
    }
    problems = [_unknown_variable(name, ours[name]) for name in ours if name not in variables()]
    settings, refused = Settings.without_bad_values(environ)
    problems += [Problem(message, f"unset {name}") for name, message in refused.items()]
    value = ours.get(VARIABLE, "")
    patches, unknown = parse_selection(value)
    if unknown:
        message = f"{VARIABLE}: {registry.unknown_names(unknown)}"
        corrected = ",".join(dict.fromkeys(_corrected(value, unknown)))
        problems.append(Problem(message, _export(VARIABLE, corrected or "1")))
    return Choice(tuple(patch.name for patch in patches), settings, tuple(problems), ours)


def _corrected(value: str, unknown: Sequence[str]) -> Iterator[str]:
    """Yield the items of a selection; an unknown one as the name that is nearest to it, if there is one."""
    for item in items(value):
        sign = "-" * item.startswith("-")
        names = (*registry.SETS, *registry.patches())
        known = [sign + name for name in names] if item in unknown else [item]
        yield from difflib.get_close_matches(item, known, 1)


def _unknown_variable(name: str, value: str) -> Problem:
    message, unset = f"{name}: no such variable", f"unset {shlex.quote(name)}"
    # What all of them begin with would make all of them alike.
    prefix = VARIABLE if name.startswith(VARIABLE) else ""
    endings = [known.removeprefix(prefix) for known in variables()]
    if meant := difflib.get_close_matches(name.removeprefix(prefix), endings, 1):
        known = prefix + meant[0]
        return Problem(f"{message}; there is {known}", f"{unset}; {_export(known, value)}")
    return Problem(f"{message}; known: {', '.join(sorted(variables()))}", unset)


def problems_of(
    choice: Choice, statuses: Sequence[SiteStatus], startup: Startup | None, wrapt: str | None
) -> list[Problem]:
    """Return why patches take no effect; ``startup`` is ``None`` if a hook of the framework applies them."""
    problems = list(choice.problems)
    number = tuple(map(int, re.findall(r"\d+", wrapt or "")[:2]))
    if not (1, 16) <= number < (3,):
        what = "wrapt is not installed" if wrapt is None else f"wrapt {wrapt} is out of range"
        remedy = _pip_install(shlex.quote(f"wrapt{WRAPT_RANGE}"))
        problems.append(Problem(f"{what}; needed: wrapt{WRAPT_RANGE}", remedy))
    if choice.patches and startup and not startup.fires:
        message = f"{VARIABLE} is set, but the startup file does not fire: {startup.reason}"
        root = Path(__file__).parents[1]
        tree = f"--editable {shlex.quote(str(root))}"
        package = tree if (root / "pyproject.toml").is_file() else "--force-reinstall megatron-rl-patches"
        problems.append(Problem(message, _pip_install(f"--no-deps {package}")))
    selected = [status for status in statuses if status.patch in choice.patches]
    if selected and all(status.state == "absent" for status in selected):
        message = "no framework of the selected patches is in this Python, so nothing takes effect here"
        problems.append(Problem(message, "run doctor with the Python and the PYTHONPATH of the job"))
    problems += _problems_of_roots(choice, selected)
    places = [(name, item) for name, value in choice.variables.items() for item in items(value)]
    named = {item.replace(":", "."): (name, item) for name, item in places}  # such as my_rl.model:train
    wrong = [s for s in selected if s.target in named and s.state in ("absent", "missing")]
    for status in wrong:
        variable, item = named[status.target]
        others = (other for other in items(choice.variables[variable]) if other != item)
        remedy = _export(variable, ",".join(others))
        problems.append(Problem(f"{status}; {variable} names it", remedy))
    faults = [s for s in selected if s.is_fault and not s.because_of and s not in wrong]
    unfit = sorted({fault.patch for fault in faults})
    without = ",".join([choice.variables.get(VARIABLE, ""), *(f"-{patch}" for patch in unfit)])
    remedy = _export(VARIABLE, without if set(choice.patches).difference(unfit) else "0")
    return problems + [Problem(str(fault), remedy) for fault in faults]


def _problems_of_roots(choice: Choice, selected: Iterable[SiteStatus]) -> Iterator[Problem]:
    """Compare the packages whose import activates the patches with those that the patches are for."""
    # The import trigger knows the frameworks of this package's patches. The frameworks of other packages'
    # patches must be named in a variable.
    known = startup_trigger._roots() | {"megatron_rl_patches"}
    needed = {s.target.partition(".")[0] for s in selected if s.state in ("fits", "not needed")}
    named = choice.variables.get(ROOTS_VARIABLE, "")
    absent = [root for root in items(named) if Environment().find_spec(root) is None]
    present = [root for root in items(named) if root not in absent]
    remedy = _export(ROOTS_VARIABLE, ",".join([*present, *sorted(needed - known - {*present})]))
    for root in absent:
        yield Problem(f"{ROOTS_VARIABLE} names {root}, which is not in this environment", remedy)
    for root in sorted(needed - known):
        message = f"the import of {root} does not activate anything: add it to {ROOTS_VARIABLE}"
        yield Problem(message, remedy)


def _export(variable: str, value: str) -> str:
    return f"export {variable}={shlex.quote(value)}"


def _pip_install(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def notes_of(choice: Choice, statuses: Sequence[SiteStatus]) -> list[str]:
    """Return what the patches that are selected, or in place in this process, say about their sites."""
    # Not imported: without wrapt, which is among what `doctor` looks for, it cannot be.
    engine = sys.modules.get(f"{__package__}.engine.installer")
    in_place = [s.patch for s in engine.installer.status() if s.state != "reverted"] if engine else []
    names = dict.fromkeys((*choice.patches, *in_place))
    of_these = [status for status in statuses if status.patch in names]
    notes: list[str] = []
    for patch in (registry.patches()[name] for name in names):
        try:
            with third_party(f"{patch.name}: its function `notes`"):
                notes += patch.notes(of_these) if patch.notes else []
        except PatchError as error:
            notes.append(str(error))
    return notes


def examine_framework(name: str) -> Framework:
    file = Environment().file_of(name)
    version = version_of(name.replace(".", "-"), file) if file else None
    return Framework(name, file and str(Path(file).parent), version)


def examine_startup(environ: Mapping[str, str] = os.environ) -> Startup:
    """Find the startup file, and try it in a child process."""
    folders_read = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    files = [Path(folder, STARTUP_FILE) for folder in sorted(folders_read.union(sys.path))]
    files = sorted(filter(Path.is_file, files), key=lambda file: str(file.parent) not in folders_read)
    file = str(files[0]) if files else None
    try:
        command = [sys.executable, "-c", _PROBE]
        child = subprocess.run(
            command, env={**environ, VARIABLE: "1"}, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Startup(file, False, f"a child process could not be tried: {error}")
    if child.stdout.split()[-1:] == ["True"]:
        return Startup(file, True, "a new process of this Python has the import trigger")
    if file is None:
        reason = f"site-packages holds no {STARTUP_FILE}: the package is on PYTHONPATH or in a source tree"
        return Startup(None, False, f"{reason}; install it with pip (an editable install will do)")
    folder = str(Path(file).parent)
    if folder not in folders_read:
        reason = f"{folder} is on sys.path but is no site-packages (PYTHONPATH or pip --target?)"
        return Startup(file, False, f"{reason}: Python reads no .pth file there")
    complaint = child.stderr.strip().splitlines()[-1:] or ["a new process of this Python ignores it"]
    return Startup(file, False, complaint[0])
