"""The only module that changes foreign objects: hooks, wrapping, rebinding, locking, revert."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PatchError
from ..settings import Settings
from . import announce, registry
from .imports import ImportHooks
from .judge import Verdict, by_host, hold_back, judge_from_source, judge_site
from .placement import Placement
from .report import SiteStatus
from .sources import Environment
from .spec import Adapter, Patch, Site


class _Record:
    """One selected site: what was judged, and where its layer sits."""

    def __init__(self, patch: Patch, site: Site, must: bool) -> None:
        self.patch = patch
        self.site = site
        self.must = must
        self.verdict = Verdict("waiting", f"waits for the import of {site.module}")
        self.placement: Placement | None = None


class Installer:
    """State of one process. All public functions of the package act on one instance of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: dict[tuple[str, str], _Record] = {}
        self._imports = ImportHooks(self._settle)

    def add(self, patches: Collection[Patch], settings: Settings, must: bool) -> list[str]:
        """Put the patches in place, now or when their hosts are imported; gives the names newly added.

        Raises:
            PatchError: ``must`` is set and an imported host's code does not fit; nothing of this call stays.
        """
        with self._lock:
            added = [patch for patch in patches if patch.name not in self._active()]
            for patch in added:
                for site in patch.sites_for(settings):
                    self._records[patch.name, site.target] = _Record(patch, site, must)
            modules = {record.site.module for record in self._records.values() if self._is_open(record)}
        names = [patch.name for patch in added]
        try:
            # Outside the lock: a hook may fire at once, or another thread may be importing the module.
            for module in sorted(modules):
                self._imports.watch(module)
        except PatchError:
            self.remove(names)
            raise
        return names

    def remove(self, names: Collection[str]) -> None:
        """Take the patches away; what cannot be taken away is switched off."""
        with self._lock:
            for record in self._records.values():
                if record.patch.name in names:
                    self._take_away(record)
                    record.verdict = Verdict("reverted", "reverted")

    def status(self) -> list[SiteStatus]:
        """States of all selected sites, read from the live objects."""
        self._imports.settle_half_imported()
        environment = Environment()
        with self._lock:
            return [self._status_of(record, environment) for record in self._records.values()]

    def _active(self) -> set[str]:
        return {r.patch.name for r in self._records.values() if r.verdict.state != "reverted"}

    def _is_open(self, record: _Record) -> bool:
        """Still to be put in place: never was, did not fit the code that was there then, or is lost."""
        if record.placement:
            return not record.placement.in_place()
        return record.verdict.state == "waiting" or record.verdict.is_fault

    def _settle(self, module_name: str) -> None:
        """Judge and wrap the sites of a module that has just been imported."""
        with self._lock:
            due = [r for r in self._records.values() if r.site.module == module_name and self._is_open(r)]
            groups = {(record.patch.name, record.site.host) for record in due}
            faults = [fault for group in sorted(groups) for fault in self._settle_group(*group, module_name)]
        if not faults:
            return
        announce.warn(faults)
        if any(self._records[fault.patch, fault.target].must for fault in faults):
            self._imports.watch_again(module_name)
            raise _refusal(faults)

    def _settle_group(self, patch: str, host: str, module_name: str) -> list[SiteStatus]:
        group = [r for r in self._records.values() if (r.patch.name, r.site.host) == (patch, host)]
        environment = Environment()
        verdicts = {record.site: self._judge(record, environment, module_name) for record in group}
        verdicts = hold_back(verdicts)
        for record in group:
            record.verdict = verdicts[record.site]
            if record.site.module == module_name and record.verdict.state == "waiting":
                record.verdict = self._put_in_place(record)
        failed = [record for record in group if record.verdict.is_fault]
        if failed:
            verdicts = hold_back({record.site: record.verdict for record in group})
            for record in group:
                self._take_away(record)
                record.verdict = verdicts[record.site]
        return [self._status_of(record, environment) for record in failed]

    def _judge(self, record: _Record, environment: Environment, module_name: str) -> Verdict:
        if record.placement and record.placement.in_place():
            return record.verdict
        live = self._imports.module(module_name) if record.site.module == module_name else None
        return judge_site(record.site, environment, live)

    def _put_in_place(self, record: _Record) -> Verdict:
        site = record.site
        try:
            record.placement = Placement.make(
                self._imports.module(site.module), site, _announcing(site.adapter, self)
            )
        except Exception as error:
            return Verdict("failed", f"wrapping it raised {type(error).__name__}: {error}")
        return Verdict("applied", "in place", record.verdict.fingerprint)

    def _take_away(self, record: _Record) -> None:
        if record.placement:
            record.placement.take_away()
            record.placement = None

    def _status_of(self, record: _Record, environment: Environment) -> SiteStatus:
        site, verdict = record.site, record.verdict
        state, reason = verdict.state, verdict.reason
        if record.placement and not record.placement.in_place():
            state, reason = "lost", record.placement.why_lost()
        elif state == "waiting" and not environment.has_package(site.host):
            reason = f"{site.host} is not installed"
        return SiteStatus(record.patch.name, site.host, site.target, state, reason, verdict.fingerprint)

    def after_fork_in_child(self) -> None:
        # Another thread of the parent may have held it at the moment of the fork.
        self._lock = threading.RLock()

    def at_exit(self) -> None:
        announce.never_imported(self.status())


def _announcing(adapter: Adapter, installer: Installer) -> Adapter:
    """The first call of any adapter tells the log what is in place: by then every host is imported."""

    def call(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not announce.done:
            announce.once(installer.status())
        return adapter(wrapped, instance, args, kwargs)

    return call


def _refusal(faults: list[SiteStatus]) -> PatchError:
    told = "\n  ".join(map(str, faults))
    return PatchError(
        f"cannot take effect:\n  {told}\nThe code of the host is not what the patch was written for. Exclude "
        "the patch (apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME), or use a release in "
        "docs/compatibility.md."
    )


def refuse_misfits(patches: Collection[Patch], settings: Settings) -> None:
    """Judge the sources of all hosts that are present, before anything is changed.

    Raises:
        PatchError: a site is missing, drifted, in conflict or cannot be judged.
    """
    environment = Environment()
    faults = []
    for patch in patches:
        for host, sites in by_host(patch.sites_for(settings)).items():
            if environment.has_package(host):
                faults += [
                    SiteStatus(patch.name, host, site.target, verdict.state, verdict.reason)
                    for site, verdict in judge_from_source(sites, environment).items()
                    if verdict.is_fault
                ]
    if faults:
        raise _refusal(faults)


installer = Installer()
atexit.register(installer.at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=installer.after_fork_in_child)


def apply(
    *names: str, exclude: Collection[str] = (), settings: Settings | None = None, strict: bool | None = None
) -> list[SiteStatus]:
    """Put patches in place: the named ones, or all. May be called before or after the hosts are imported,
    any number of times, from any thread.

    Patches asked for by name must fit every host that is present; without names, those that do not fit are
    skipped with a warning unless ``strict``.

    Args:
        names: see ``available()``; none means all.
        exclude: names to leave out.
        settings: defaults to ``Settings.from_environment()``.
        strict: overrides ``settings.strict``.

    Returns:
        the state of every selected site.

    Raises:
        PatchError: unknown name, or a patch that must take effect cannot. Nothing of this call stays.
    """
    settings = settings or Settings.from_environment()
    must = bool(names) or (settings.strict if strict is None else strict)
    chosen = registry.select(names, tuple(exclude))
    if must:
        refuse_misfits(chosen, settings)
    installer.add(chosen, settings, must)
    return status()


def revert(*names: str) -> None:
    """Take patches away (all when no name is given): the original objects are back, remaining copies inert.

    Raises:
        PatchError: unknown name.
    """
    installer.remove({patch.name for patch in registry.select(names)})


@contextmanager
def applied(*names: str, **options: Any) -> Iterator[list[SiteStatus]]:
    """:func:`apply` for the length of a ``with`` block; patches that were in place before it stay."""
    before = {status.patch for status in status() if status.state != "reverted"}
    statuses = apply(*names, **options)
    try:
        yield statuses
    finally:
        added = {status.patch for status in statuses if status.state != "reverted"} - before
        installer.remove(added)


def status() -> list[SiteStatus]:
    """State of every site of the patches selected so far, read from the live objects."""
    return installer.status()


def available() -> dict[str, str]:
    """Names of all registered patches, each with its one-line summary."""
    return {name: patch.summary for name, patch in registry.patches().items()}
