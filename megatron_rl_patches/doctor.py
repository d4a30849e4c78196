"""What is to be known of an environment when patches do not take effect. Imports no host, and no torch."""

from __future__ import annotations

import ast
import os
import re
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import _megatron_rl_patches_startup as startup_trigger

from . import __version__, settings
from .engine import registry
from .engine.report import SiteStatus
from .engine.sources import Environment
from .engine.spec import Patch
from .engine.survey import survey
from .errors import PatchError
from .settings import ROOTS_VARIABLE, VARIABLE, Settings, parse_selection

AUTOWRAPT_VARIABLE = "AUTOWRAPT_BOOTSTRAP"
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
class Choice:
    """What the environment variables ask for, and what is wrong with them."""

    patches: tuple[str, ...]
    settings: Settings
    by_autowrapt: bool
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Host:
    name: str
    path: str | None
    version: str | None


@dataclass(frozen=True)
class Startup:
    """The file that activates the patches; ``fires`` says whether a new process of this Python obeys it."""

    file: str | None
    fires: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything that ``doctor`` tells. ``problems`` is empty when what is selected can take effect."""

    version: str
    python: str
    executable: str
    torch: str | None
    wrapt: str | None
    hosts: tuple[Host, ...]
    variables: dict[str, str]
    selected: tuple[str, ...]
    sites: tuple[SiteStatus, ...]
    startup: Startup
    problems: tuple[str, ...]


def examine(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Gather everything; starts one child process."""
    choice = choice_of(environ)
    patches = registry.patches().values()
    findings = survey(Environment(), patches, choice.settings)
    startup = examine_startup(environ)
    wrapt = _version_of("wrapt")
    return Diagnosis(
        version=__version__,
        python=sys.version.split()[0],
        executable=sys.executable,
        torch=_version_of("torch"),
        wrapt=wrapt,
        hosts=tuple(examine_host(name) for name in host_names(patches, choice.settings)),
        variables=variables_in(environ),
        selected=choice.patches,
        sites=tuple(findings),
        startup=startup,
        problems=tuple(problems_of(choice, findings, startup, wrapt, _version_of("autowrapt"))),
    )


def choice_of(environ: Mapping[str, str] = os.environ) -> Choice:
    """What the variables select; a value that does not fit its grammar is a problem, not an exception."""
    problems = [
        f"{name}: no such variable; known: {', '.join(sorted(_known_variables()))}"
        for name in variables_in(environ)
        if name.startswith(VARIABLE) and name not in _known_variables()
    ]
    try:
        chosen = Settings.from_environment(environ)
    except PatchError as error:
        problems.append(str(error))
        chosen = Settings()
    by_autowrapt = "megatron_rl_patches" in environ.get(AUTOWRAPT_VARIABLE, "").split(",")
    known = registry.patches()
    selection = parse_selection(environ.get(VARIABLE, "all" if by_autowrapt else ""), known)
    if selection.unknown:
        problems.append(f"{VARIABLE}: {registry.unknown_names(selection.unknown)}")
    chosen_patches = (
        registry.select(selection.names or (), selection.exclude, selection.also) if selection else []
    )
    return Choice(tuple(patch.name for patch in chosen_patches), chosen, by_autowrapt, tuple(problems))


def problems_of(
    choice: Choice, findings: Sequence[SiteStatus], startup: Startup, wrapt: str | None, autowrapt: str | None
) -> list[str]:
    """Why something that is selected does not take effect."""
    problems = list(choice.problems)
    if wrapt is None:
        problems.append(f"wrapt is not installed; needed: wrapt{WRAPT_RANGE}")
    elif not _in_wrapt_range(wrapt):
        problems.append(f"wrapt {wrapt} is out of range; needed: wrapt{WRAPT_RANGE}")
    if choice.by_autowrapt and autowrapt is None:
        problems.append(f"{AUTOWRAPT_VARIABLE} names megatron_rl_patches, but autowrapt is not installed")
    if choice.patches and not choice.by_autowrapt and not startup.fires:
        problems.append(f"{VARIABLE} is set, but the startup file does not fire: {startup.reason}")
    selected = [finding for finding in findings if finding.patch in choice.patches]
    if not choice.by_autowrapt:
        problems += _out_of_the_triggers_sight(selected)
    problems += [str(finding) for finding in findings if finding.is_fault and finding.patch in choice.patches]
    return problems


def _out_of_the_triggers_sight(findings: Sequence[SiteStatus]) -> list[str]:
    """Hosts of other packages' patches, of which the trigger can only know through a variable."""
    known = startup_trigger._roots()
    roots = dict.fromkeys(f.target.partition(".")[0] for f in findings if f.state != "absent")
    return [
        f"the import of {root} does not activate anything: add it to {ROOTS_VARIABLE}"
        for root in roots
        if root not in known | {"megatron_rl_patches"}
    ]


def variables_in(environ: Mapping[str, str]) -> dict[str, str]:
    """All variables of ours that are set, and ``AUTOWRAPT_BOOTSTRAP``."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLE) or name == AUTOWRAPT_VARIABLE
    }


def host_names(patches: Iterable[Patch], settings: Settings) -> list[str]:
    """Every package that a patch changes, or in which it looks for copies of what it changes."""
    sites = [site for patch in patches for site in patch.sites_for(settings)]
    return sorted({name for site in sites for name in (site.host, *site.copied_by)})


def examine_host(name: str) -> Host:
    file = Environment().file_of(name)
    if file is None:
        return Host(name, None, None)
    info = Environment().read(f"{name}.package_info")
    # The number in the code wins: the metadata of another installed copy may shadow that of a checkout.
    version = version_in(info) if info else None
    return Host(name, str(Path(file).parent), version or _version_of(name.replace(".", "-")))


def version_in(package_info: str) -> str | None:
    """``0.16.0rc0`` from the assignments to ``MAJOR``, ``MINOR``, ``PATCH`` and ``PRE_RELEASE``."""
    assigned = {
        target.id: node.value.value
        for node in ast.parse(package_info).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not {"MAJOR", "MINOR", "PATCH"} <= assigned.keys():
        return None
    return "{MAJOR}.{MINOR}.{PATCH}".format_map(assigned) + str(assigned.get("PRE_RELEASE", ""))


def examine_startup(environ: Mapping[str, str] = os.environ) -> Startup:
    """Find the startup file, and try it in a child process."""
    in_site, elsewhere = find_startup_file()
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**environ, VARIABLE: "1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Startup(_text(in_site), False, f"a child process could not be tried: {error}")
    if child.stdout.split()[-1:] == ["True"]:
        return Startup(_text(in_site), True, "a new process of this Python has the import trigger")
    complaint = child.stderr.strip().splitlines()[-1:]
    if in_site:
        return Startup(str(in_site), False, *complaint or ["a new process of this Python ignores it"])
    if elsewhere:
        told = f"{elsewhere.parent} is on sys.path but is no site-packages (PYTHONPATH or pip --target?)"
        return Startup(str(elsewhere), False, f"{told}: Python reads no .pth file there")
    told = f"site-packages holds no {STARTUP_FILE}: the package is found on PYTHONPATH or in a source tree"
    return Startup(None, False, f"{told}; install it with pip (an editable install will do)")


def find_startup_file() -> tuple[Path | None, Path | None]:
    """The file where Python reads it, and the file where it lies idle."""
    read = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    found = [Path(folder, STARTUP_FILE) for folder in sorted(read.union(sys.path))]
    found = [file for file in found if file.is_file()]
    in_site = [file for file in found if str(file.parent) in read]
    elsewhere = [file for file in found if str(file.parent) not in read]
    return next(iter(in_site), None), next(iter(elsewhere), None)


def _known_variables() -> set[str]:
    """Read off the module that owns them, so that one added there is known here."""
    return {value for name, value in vars(settings).items() if name.endswith("VARIABLE")}


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _in_wrapt_range(version: str) -> bool:
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    return (1, 16) <= numbers < (3,)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
