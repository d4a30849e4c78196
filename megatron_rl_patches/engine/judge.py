"""Judges whether a patch fits a site, from the framework's code. Nothing is changed or imported.

Judgement rests on the code, never on a version number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

from ..errors import PatchError
from . import target_source
from .patch import Patch, Site
from .settings import Settings
from .sources import Source
from .target_source import TargetSource
from .third_party import third_party

#: How the reason begins of a site that fits, and has the state of another site of its patch.
IN_COMPANY = "another site cannot take effect"

#: States in which a patch that was asked for is not in place, and should be.
Fault = Literal["missing", "drifted", "conflict", "failed"]
State = Literal[Fault, "fits", "absent", "applied", "waiting", "not needed", "lost", "reverted"]


@dataclass(frozen=True)
class SiteStatus:
    """The state of one site, and why it is in that state.

    ``docs/how-it-works.md`` lists the states in a running process. Judged from source alone it is ``fits``
    (the patch has work to do, and can), ``absent`` (the framework is not there), ``not needed`` or a fault.
    ``detail`` says what an applied site has done in this process, such as steps that were skipped.
    """

    patch: str
    framework: str
    target: str
    state: State
    reason: str
    fingerprint: str = ""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in get_args(Fault)

    def __str__(self) -> str:
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.patch}: {self.target}: {self.state}: {self.reason}{detail}"


class Statuses(list[SiteStatus]):
    """States of sites. Printed they are a table, patches by frameworks, and lines for faults and details.

    Frameworks that are not there have no column; the list has their sites all the same.
    """

    def __str__(self) -> str:
        present = [status for status in self if status.state != "absent"]
        by_patch = grouped(present)
        frameworks = list(dict.fromkeys(status.framework for status in present))
        rows = [("patch", *frameworks)]
        for patch, sites in by_patch.items():
            rows.append((patch, *(counted(sites.get(framework, ())) for framework in frameworks)))
        lines = [plain_table(rows)] if present else []
        if idle := [patch for patch in grouped(self) if patch not in by_patch]:
            lines.append(f"no framework for these is here: {', '.join(idle)}")
        lines += [str(s) for s in present if s.is_fault or s.state == "lost" or s.detail]
        return "\n".join(lines) or "no patch is selected"

    __repr__ = __str__


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows in aligned columns, a line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def grouped(statuses: Iterable[SiteStatus]) -> dict[str, dict[str, list[SiteStatus]]]:
    """Return the statuses by patch, and of each patch by framework."""
    groups: dict[str, dict[str, list[SiteStatus]]] = {}
    for status in statuses:
        groups.setdefault(status.patch, {}).setdefault(status.framework, []).append(status)
    return groups


def counted(statuses: Iterable[SiteStatus]) -> str:
    """Return how many sites are in which state, such as ``3 applied, 1 not needed``."""
    counts = Counter(status.state for status in statuses)
    return ", ".join(
        f"{count} {'fit' if state == 'fits' and count > 1 else state}" for state, count in counts.items()
    )


def status_of(site: Site, state: State, reason: str, fingerprint: str = "") -> SiteStatus:
    """Return the status of a site."""
    return SiteStatus(site.patch, site.framework, site.target, state, reason, fingerprint)


def without_source(site: Site) -> SiteStatus:
    """Return the status of a site in a framework that does not have its module."""
    state: State = "not needed" if site.optional_module else "missing"
    return status_of(site, state, f"no source of module {site.module} is found")


def judge(site: Site, target: TargetSource | None) -> SiteStatus:
    """Judge a site by its target; ``None`` when there is no source of the module."""
    if target is None:
        return without_source(site)
    try:
        with third_party("judging it"):
            state, reason = _judge(site, target)
    except PatchError as error:
        state, reason = "failed", str(error)
    return status_of(site, state, reason, target.fingerprint)


def _judge(site: Site, target: TargetSource) -> tuple[State, str]:
    if target.function is None:
        if target.imported_from is not None:
            return "drifted", f"moved: {site.module} imports it from {target.imported_from}"
        if site.introduced_with and not target.mentions(site.introduced_with, in_module=True):
            return "not needed", f"{site.module} does not contain {site.introduced_with}"
        return "missing", f"{site.module} does not define {site.qualname}"
    if target.replaced_by:
        return "conflict", (
            f"replaced by {target.replaced_by}, which has no __wrapped__ to say what it stands for; "
            "put this patch in place before it, give it functools.wraps, or exclude this patch"
        )
    if target.descriptor:
        return "drifted", f"it is a {target.descriptor}, which runs when it is read and not when it is called"
    if site.skip_if and (reason := site.skip_if(target)):
        return "not needed", reason
    if not target.runs_when_called:
        return "drifted", "it is a generator or a coroutine function: it runs after the call is over"
    if absent := [name for name in site.parameters if name not in target.parameters]:
        return "drifted", f"it no longer takes {', '.join(absent)}"
    if absent := [name for name in site.requires_names if not target.mentions(name)]:
        return "drifted", f"its body no longer uses {', '.join(absent)}"
    if site.helps:
        return "fits", f"helps {', '.join(site.helps)}"
    return "fits", "has the bug that the patch fixes"


def judge_site(site: Site, source: Source, module: ModuleType | None = None) -> SiteStatus:
    """Judge a site by the text of its module and, where that is imported, by the live module too."""
    try:
        text = source.read(site.module)
        target = None if text is None else target_source.from_source(site.module, site.qualname, text)
        if module is not None and target is not None and target.function is not None:
            target = target.with_live(module, site.qualname)
    except (SyntaxError, UnicodeError, ImportError) as error:  # written for another Python, say
        return status_of(site, "failed", f"{site.module} cannot be parsed: {error}")
    except AttributeError as error:
        return status_of(site, "missing", f"{site.target} is in the source but not in the module: {error}")
    return judge(site, target)


def judge_all(source: Source, patches: Iterable[Patch], settings: Settings) -> list[SiteStatus]:
    """Judge all sites of the patches by a source: what would take effect there, and why not."""
    statuses: list[SiteStatus] = []
    for patch in patches:
        by_framework: dict[str, list[Site]] = {}
        try:
            sites_of_patch = patch.sites_for(settings.options_of(patch))
        except PatchError as error:
            statuses.append(
                SiteStatus(patch.name, patch.name, f"{patch.name}.configured", "failed", str(error))
            )
            continue
        for site in sites_of_patch:
            by_framework.setdefault(site.framework, []).append(site)
        for framework, sites in by_framework.items():
            # A framework may be a bare folder. As any checkout is one, only its modules say that it is there.
            if any(map(source.has_package, (framework, *(site.module for site in sites)))):
                statuses += all_or_nothing({site: judge_site(site, source) for site in sites}).values()
            else:
                reason = f"no {framework} in {source.name}"
                statuses += [status_of(site, "absent", reason) for site in sites]
    return statuses


def all_or_nothing(statuses: Mapping[Site, SiteStatus]) -> dict[Site, SiteStatus]:
    """Return the statuses of one patch in one framework, each of which depends on the others.

    A site that only helps others is not needed where none of them is, whatever its own code looks like. If a
    site that is needed is a fault, the others share that state.
    """
    statuses = {site: _with_those_helped(site, statuses) for site in statuses}
    fault = next((status for status in statuses.values() if status.is_fault), None)
    if fault is None:
        return statuses
    reason = f"{IN_COMPANY}: {fault.target}: {fault.reason}"
    others = {
        site: replace(status, state=fault.state, reason=reason, fingerprint="")
        for site, status in statuses.items()
        if status.state in ("fits", "applied")
    }
    return {**statuses, **others}


def _with_those_helped(site: Site, statuses: Mapping[Site, SiteStatus]) -> SiteStatus:
    status = statuses[site]
    helped = [statuses[other] for other in statuses if other.qualname in site.helps]
    is_idle = bool(helped) and all(one.state == "not needed" for one in helped)
    if status.state == "not needed" or not is_idle:
        return status
    reason = f"it only helps {helped[0].target}, which is not needed: {helped[0].reason}"
    return replace(status, state="not needed", reason=reason)


def refuse_faults(statuses: Iterable[SiteStatus]) -> None:
    """Raise ``PatchError`` if a site of these, which must take effect, cannot."""
    if faults := [status for status in statuses if status.is_fault]:
        sites = "\n  ".join(map(str, faults))
        raise PatchError(
            f"cannot take effect:\n  {sites}\nThe code of the framework is not what the patch was written "
            "for. Exclude the patch (apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME), or use a release in "
            "docs/compatibility.md."
        )
