"""A diagnosis of an environment in which patches do not take effect. Imports no framework, and no torch."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import site
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import _megatron_rl_patches_startup as startup_trigger

from . import __version__
from .engine import registry
from .engine.judge import IN_COMPANY, SiteStatus, judge_all
from .engine.options import ON, items
from .engine.patch import Patch
from .engine.settings import ROOTS_VARIABLE, VARIABLE, Settings, parse_selection, variables
from .engine.sources import Environment
from .errors import PatchError

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
    """A reason why something that is selected does not take effect, and the shell line that mends it."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Choice:
    """What the environment variables ask for, and what is wrong with them.

    ``value`` is that of ``MEGATRON_RL_PATCHES``.
    """

    patches: tuple[str, ...]
    settings: Settings
    problems: tuple[Problem, ...]
    value: str = ""


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
    """Everything that ``doctor`` shows. ``problems`` is empty when what is selected can take effect."""

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


def examine(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Gather everything; this starts one child process."""
    choice = choice_of(environ)
    patches = registry.patches().values()
    statuses = judge_all(Environment(), patches, choice.settings)
    startup = examine_startup(environ)
    wrapt = _version_of("wrapt")
    return Diagnosis(
        version=__version__,
        path=str(Path(__file__).parent),
        python=sys.version.split()[0],
        executable=sys.executable,
        torch=_version_of("torch"),
        wrapt=wrapt,
        frameworks=tuple(examine_framework(name) for name in framework_names(patches, choice.settings)),
        variables=variables_in(environ),
        selected=choice.patches,
        sites=tuple(statuses),
        startup=startup,
        notes=tuple(notes_of(choice, statuses)),
        problems=tuple(problems_of(choice, statuses, startup, wrapt)),
    )


def choice_of(environ: Mapping[str, str] = os.environ) -> Choice:
    """Return what the variables select. A value that does not parse is reported as a problem, not raised."""
    known = sorted(variables())
    unknown = {name: value for name, value in variables_in(environ).items() if name not in known}
    problems = [_unknown_variable(name, value, known) for name, value in unknown.items()]
    try:
        chosen = Settings.from_environment(environ)
    except PatchError as error:
        problems += _bad_values(environ, error)
        chosen = Settings()
    value = environ.get(VARIABLE, "")
    selection = parse_selection(value, registry.patches())
    if selection.unknown:
        message = f"{VARIABLE}: {registry.unknown_names(selection.unknown)}"
        problems.append(Problem(message, _export(VARIABLE, _with_known_names(value))))
    names = tuple(patch.name for patch in selection.patches())
    return Choice(names, chosen, tuple(problems), value)


def _unknown_variable(name: str, value: str, known: Sequence[str]) -> Problem:
    unset = f"unset {shlex.quote(name)}"
    endings = [variable.removeprefix(VARIABLE) for variable in known]
    nearest = difflib.get_close_matches(name.removeprefix(VARIABLE), endings, 1)
    if not nearest:
        return Problem(f"{name}: no such variable; known: {', '.join(known)}", unset)
    meant = VARIABLE + nearest[0]
    return Problem(f"{name}: no such variable; there is {meant}", f"{unset}; {_export(meant, value)}")


def _bad_values(environ: Mapping[str, str], error: PatchError) -> Iterator[Problem]:
    """Yield a problem for every variable that is refused on its own; ``error`` if only all together are."""
    refused = {}
    ours = [name for name in variables_in(environ) if name in variables()]
    for name in ours:
        try:
            Settings.from_environment({name: environ[name]})
        except PatchError as alone:
            refused[name] = str(alone)
    if not refused:
        yield Problem(str(error), f"unset {' '.join(name for name in ours if name != VARIABLE)}")
    for name, message in refused.items():
        yield Problem(message, f"unset {name}")


def problems_of(
    choice: Choice, statuses: Sequence[SiteStatus], startup: Startup, wrapt: str | None
) -> list[Problem]:
    """Return the reasons why something that is selected does not take effect."""
    problems = list(choice.problems)
    if wrapt is None or not _in_wrapt_range(wrapt):
        what = "wrapt is not installed" if wrapt is None else f"wrapt {wrapt} is out of range"
        remedy = _pip_install(shlex.quote(f"wrapt{WRAPT_RANGE}"))
        problems.append(Problem(f"{what}; needed: wrapt{WRAPT_RANGE}", remedy))
    if choice.patches and not startup.fires:
        message = f"{VARIABLE} is set, but the startup file does not fire: {startup.reason}"
        problems.append(Problem(message, _install_this_package()))
    selected = _of_selected_patches(choice, statuses)
    # The import trigger knows the frameworks of this package's patches. The frameworks of other packages'
    # patches must be named in a variable.
    known = startup_trigger._roots() | {"megatron_rl_patches"}
    roots = dict.fromkeys(s.target.partition(".")[0] for s in selected if s.state != "absent")
    unknown = [root for root in roots if root not in known]
    named = ",".join([*items(os.environ.get(ROOTS_VARIABLE, "")), *unknown])
    problems += [
        Problem(
            f"the import of {root} does not activate anything: add it to {ROOTS_VARIABLE}",
            _export(ROOTS_VARIABLE, named),
        )
        for root in unknown
    ]
    # Sites that share the state of a fault are left out, as the fault itself is in the list.
    faults = [s for s in selected if s.is_fault and not s.reason.startswith(IN_COMPANY)]
    leaving_out = _export(VARIABLE, _value_without(choice.value, {fault.patch for fault in faults}))
    return problems + [Problem(str(fault), leaving_out) for fault in faults]


def _value_without(value: str, patches: Collection[str]) -> str:
    """Return the value of the variable that selects what ``value`` does, but for these patches."""
    selection = parse_selection(value, registry.patches())
    if selection.names is not None:
        return ",".join(name for name in selection.names if name not in {*patches, *selection.exclude}) or "0"
    chosen = ["all" if item.lower() in ON else item for item in items(value) if item not in patches]
    return ",".join([*chosen, *(f"-{name}" for name in sorted(patches))])


def _with_known_names(value: str) -> str:
    """Return the value of the variable with the nearest known name for every unknown one, or without it."""
    known = registry.patches()
    unknown = parse_selection(value, known).unknown
    corrected = []
    for item in items(value):
        sign = "-" if item.startswith("-") else ""
        nearest = difflib.get_close_matches(item.removeprefix("-"), known, 1) if item in unknown else []
        if item not in unknown or nearest:
            corrected.append(sign + nearest[0] if nearest else item)
    return ",".join(corrected) or "all"


def _export(variable: str, value: str) -> str:
    return f"export {variable}={shlex.quote(value)}"


def _pip_install(arguments: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {arguments}"


def _install_this_package() -> str:
    """Return the line that installs the startup file: from the source tree, if this is one."""
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        return _pip_install(f"--no-deps --editable {shlex.quote(str(root))}")
    return _pip_install("--no-deps --force-reinstall megatron-rl-patches")


def notes_of(choice: Choice, statuses: Sequence[SiteStatus]) -> list[str]:
    """Return what the patches that are selected, or in place in this process, say about their sites."""
    names = dict.fromkeys((*choice.patches, *_in_this_process()))
    of_these = [status for status in statuses if status.patch in names]
    patches = (registry.patches()[name] for name in names)
    return [note for patch in patches if patch.notes for note in patch.notes(of_these)]


def _in_this_process() -> list[str]:
    # Not imported: without wrapt, which is among what `doctor` looks for, it cannot be.
    engine = sys.modules.get(f"{__package__}.engine.installer")
    statuses = engine.installer.status() if engine else []
    return [status.patch for status in statuses if status.state != "reverted"]


def _of_selected_patches(choice: Choice, statuses: Iterable[SiteStatus]) -> list[SiteStatus]:
    return [status for status in statuses if status.patch in choice.patches]


def variables_in(environ: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of ours that are set."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(VARIABLE)}


def framework_names(patches: Iterable[Patch], settings: Settings) -> list[str]:
    """Return every package that a patch changes."""
    sites = (site for patch in patches for site in patch.sites_for(settings.options_of(patch)))
    return sorted({site.framework for site in sites})


def examine_framework(name: str) -> Framework:
    file = Environment().file_of(name)
    version = _version_of(name.replace(".", "-"), file) if file else None
    return Framework(name, file and str(Path(file).parent), version)


def examine_startup(environ: Mapping[str, str] = os.environ) -> Startup:
    """Find the startup file, and try it in a child process."""
    in_site, elsewhere = find_startup_file()
    file = str(in_site) if in_site else None
    try:
        command = [sys.executable, "-c", _PROBE]
        child = subprocess.run(
            command, env={**environ, VARIABLE: "1"}, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Startup(file, False, f"a child process could not be tried: {error}")
    if child.stdout.split()[-1:] == ["True"]:
        return Startup(file, True, "a new process of this Python has the import trigger")
    if file:
        complaint = child.stderr.strip().splitlines()[-1:] or ["a new process of this Python ignores it"]
        return Startup(file, False, complaint[0])
    if elsewhere:
        reason = f"{elsewhere.parent} is on sys.path but is no site-packages (PYTHONPATH or pip --target?)"
        return Startup(str(elsewhere), False, f"{reason}: Python reads no .pth file there")
    reason = f"site-packages holds no {STARTUP_FILE}: the package is found on PYTHONPATH or in a source tree"
    return Startup(None, False, f"{reason}; install it with pip (an editable install will do)")


def find_startup_file() -> tuple[Path | None, Path | None]:
    """Return the startup file in a folder where Python reads it, and one in a folder where it does not."""
    read = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    candidates = [Path(folder, STARTUP_FILE) for folder in sorted(read.union(sys.path))]
    files = [file for file in candidates if file.is_file()]
    in_site = (file for file in files if str(file.parent) in read)
    elsewhere = (file for file in files if str(file.parent) not in read)
    return next(in_site, None), next(elsewhere, None)


def _version_of(distribution: str, file: str | None = None) -> str | None:
    """Return the version of what is installed; ``None`` if ``file`` is not a part of it.

    A folder on PYTHONPATH hides an installed package whose version is another one.
    """
    try:
        installed = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    folders = [str(installed.locate_file("")), _editable_folder(installed)]
    is_of_it = file is None or any(folder and Path(file).is_relative_to(folder) for folder in folders)
    return installed.version if is_of_it else None


def _editable_folder(distribution: metadata.Distribution) -> str | None:
    """Return the folder that an editable install leads to."""
    try:
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    return url2pathname(urlsplit(url["url"]).path) if url.get("dir_info", {}).get("editable") else None


def _in_wrapt_range(version: str) -> bool:
    return (1, 16) <= tuple(map(int, re.findall(r"\d+", version)[:2])) < (3,)
