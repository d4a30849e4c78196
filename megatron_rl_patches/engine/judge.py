"""Judges by a framework's code, and not by its version, if a patch fits. Nothing is changed or imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import ModuleType

from ..errors import PatchError
from .patch import Patch, Site, third_party
from .settings import Settings
from .sources import Source
from .statuses import PATCHED, SiteStatus, State, status_of
from .target_source import TargetSource, from_source, layers, resolve, runs_when_called

_REPLACED = (
    "replaced by {}, which has no __wrapped__ to say what it stands for; "
    "put this patch in place before it, give it functools.wraps, or exclude this patch"
)
_WHEN_READ = "it is a {}, which runs when it is read and not when it is called"


@lru_cache(maxsize=256)  # it is asked with the same text at the import of each module of the site's group
def _judge_text(site: Site, text: str) -> tuple[State, str, str]:
    """Return state, reason and fingerprint of a site by the text of its module."""
    target = from_source(site.module, site.qualname, text)
    try:
        with third_party("checking it"):
            state, reason = _judge_code(site, target)
    except PatchError as error:
        state, reason = "failed", str(error)
    return state, reason, target.fingerprint


def _judge_code(site: Site, target: TargetSource) -> tuple[State, str]:
    if target.function is None:
        if target.imported_from is not None:
            return "drifted", f"moved: {site.module} imports it from {target.imported_from}"
        if site.introduced_with and not target.mentions(site.introduced_with, in_module=True):
            return "not needed", f"{site.module} does not contain {site.introduced_with}"
        return "missing", f"{site.module} does not define {site.qualname}"
    decorators = map(ast.unparse, target.function.decorator_list)
    if any(name.endswith(("property", ".getter", ".setter", ".deleter")) for name in decorators):
        return "drifted", _WHEN_READ.format("property")
    if site.skip_if and (reason := site.skip_if(target)):
        return "not needed", reason
    if not target.runs_when_called:
        return "drifted", "it is a generator or a coroutine function: it runs after the call is over"
    if absent := [name for name in site.parameters if name not in target.parameters]:
        return "drifted", f"it no longer takes {', '.join(absent)}"
    if absent := [name for name in site.requires_names if not target.mentions(name)]:
        return "drifted", f"its body no longer uses {', '.join(absent)}"
    return "fits", f"helps {', '.join(site.helps)}" if site.helps else "has the bug that the patch fixes"


def _read_object(module: ModuleType, qualname: str) -> tuple[str, str]:
    """Return where the live function comes from, if not from its module, and its type if it is a property."""
    owner, name = resolve(module, qualname)
    all_layers = list(layers(vars(owner)[name]))
    original = all_layers[-1]
    descriptor = next((type(layer).__name__ for layer in all_layers if not runs_when_called(layer)), "")
    namespace = getattr(original, "__globals__", None)  # that of the module that the function is made in
    if namespace is None or namespace.get("__name__") == module.__name__:
        return "", descriptor
    return f"{getattr(original, '__module__', None)}.{getattr(original, '__qualname__', '?')}", descriptor


def judge_site(site: Site, source: Source, module: ModuleType | None = None) -> SiteStatus:
    """Judge a site by the text of its module and, where that is imported, by the live module too."""
    replaced_by = descriptor = ""
    try:
        text = source.read(site.module)
        state, reason, fingerprint = _judge_text(site, text or "")
        if fingerprint and module is not None:
            replaced_by, descriptor = _read_object(module, site.qualname)
        for other in () if fingerprint else site.elsewhere:
            if from_source(other, site.qualname, source.read(other) or "").function is not None:
                return status_of(site, "not needed", f"this release has it in {other}")
    except (SyntaxError, UnicodeError, ImportError) as error:  # written for another Python, say
        return status_of(site, "failed", f"{site.module} cannot be parsed: {error}")
    except AttributeError as error:
        return status_of(site, "missing", f"{site.target} is in the source but not in the module: {error}")
    if text is None:
        state = "not needed" if site.optional_module else "missing"
        reason = f"no source of module {site.module} is found"
    elif replaced_by:
        state, reason = "conflict", _REPLACED.format(replaced_by)
    elif descriptor:
        state, reason = "drifted", _WHEN_READ.format(descriptor)
    return status_of(site, state, reason, fingerprint)


def judge_all(source: Source, patches: Iterable[Patch], settings: Settings) -> list[SiteStatus]:
    """Judge all sites of the patches by a source: what would take effect there, and why not."""
    statuses: list[SiteStatus] = []
    for patch in patches:
        try:
            of_patch = patch.sites_for(settings.options_of(patch))
        except PatchError as error:
            statuses += [SiteStatus(patch.name, patch.name, f"{patch.name}.configured", "failed", str(error))]
            continue
        for framework in dict.fromkeys(site.framework for site in of_patch):
            sites = [site for site in of_patch if site.framework == framework]
            # A framework may be a bare folder. As any checkout is one, only its modules say that it is there.
            if any(map(source.has_package, (framework, *(site.module for site in sites)))):
                statuses += all_or_nothing({site: judge_site(site, source) for site in sites}).values()
            else:
                statuses += [status_of(site, "absent", f"no {framework} in {source.name}") for site in sites]
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
    reason = f"another function of this patch cannot be patched: {fault.target}: {fault.reason}"
    others = {
        site: replace(status, state=fault.state, reason=reason, fingerprint="", because_of=fault.target)
        for site, status in statuses.items()
        if status.word == PATCHED
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
            "for. Exclude the patch (apply(exclude=...), MEGATRON_RL_PATCHES=1,-NAME), or use a release in "
            "docs/compatibility.md."
        )
