"""The only module that changes foreign objects: hooks, wrapping, rebinding, locking, revert."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PatchError
from ..settings import Settings
from . import announce
from .imports import ImportHooks, is_loaded
from .judge import Verdict, hold_back, judge_site
from .placement import Placement
from .report import SiteStatus
from .sources import Environment
from .spec import Adapter, Patch, Site

_log = logging.getLogger("megatron_rl_patches")


class Record:
    """One selected site: what was judged, and where its layer sits."""

    def __init__(self, patch: Patch, site: Site, must: bool) -> None:
        self.patch = patch
        self.site = site
        self.must = must
        self.reverted = False
        self.verdict: Verdict | None = None
        self.placement: Placement | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.patch.name, self.site.target

    @property
    def is_in_place(self) -> bool:
        return self.placement is not None and self.placement.in_place()

    @property
    def is_settled(self) -> bool:
        """In place, or nothing to put there."""
        return (
            self.reverted
            or self.is_in_place
            or (self.verdict is not None and self.verdict.state == "not needed")
        )


class Installer:
    """State of one process. All functions of :mod:`.api` act on one instance of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: dict[tuple[str, str], Record] = {}
        #: Name of a patch -> settings that it was last applied with; read by adapters at every call.
        self.settings: dict[str, Settings] = {}
        self._imports = ImportHooks(loaded=self._loaded, settle=self._import_ended)
        self._has_failed = False

    def add(
        self, patches: Collection[Patch], settings: Settings, must: bool, replace_settings: bool = True
    ) -> list[Record]:
        """Put the patches in place, now or when their hosts are imported; gives what was not selected yet.

        Patches that are selected already go on with their former settings unless ``replace_settings``.

        Raises:
            PatchError: ``must`` is set and an imported host's code does not fit.

        Whatever is raised, nothing of this call stays.
        """
        with self._lock:
            before, settings_before = dict(self._records), dict(self.settings)
            must_before = {record: record.must for record in before.values()}
            selected = {record.patch.name for record in before.values() if not record.reverted}
            for patch in patches:
                if replace_settings or patch.name not in selected:
                    self.settings[patch.name] = settings
            records = [
                self._select(patch, site, must) for patch in patches for site in patch.sites_for(settings)
            ]
        added = [record for record in records if before.get(record.key) is not record]
        try:
            self._start(records)
        except Exception as error:
            with self._lock:
                self.remove(added)
                self._records, self.settings = before, settings_before
                for record, was_must in must_before.items():
                    record.must = was_must
                self._has_failed |= not isinstance(error, PatchError)  # whoever called tells of it
            raise
        return added

    def _start(self, records: Collection[Record]) -> None:
        # Outside the lock: a hook may fire at once, or another thread may be importing the module.
        open_sites = [record.site for record in records if not record.is_settled]
        for module in sorted({site.module for site in open_sites if not site.only_tells}):
            self._imports.watch(module)
        faults = self._settle(mend=True)
        announce.warn(faults)
        environment = Environment()
        absent = (self._status_of(record, environment) for record in records if record.verdict is None)
        faults += [status for status in absent if status.is_fault]
        if refused := [fault for fault in faults if self._record_of(fault).must]:
            raise refusal(refused)

    def _select(self, patch: Patch, site: Site, must: bool) -> Record:
        record = self._records.get((patch.name, site.target))
        if record is None or record.reverted:
            record = Record(patch, site, must)
            # To the end: reverting in reverse order unwraps first what was wrapped last.
            self._records.pop(record.key, None)
            self._records[record.key] = record
        record.must |= must
        return record

    def remove(self, records: Collection[Record]) -> None:
        """Take the layers away, the last first; what cannot be taken away is switched off."""
        with self._lock:
            for record in reversed([*records]):
                self._take_away(record)
                record.reverted = True

    def records_of(self, names: Collection[str]) -> list[Record]:
        with self._lock:
            return [record for record in self._records.values() if record.patch.name in names]

    def status(self) -> list[SiteStatus]:
        """States of all selected sites, read from the live objects."""
        self._settle_and_warn()
        environment = Environment()
        with self._lock:
            return [self._status_of(record, environment) for record in self._records.values()]

    def _loaded(self, module_name: str) -> None:
        """A watched module has just been imported; raising makes that import fail."""
        with self._lock:
            must = any(record.must for record in self._records.values() if record.site.module == module_name)
        with self._sparing_the_host(must):
            faults = self._settle(module_name)
            announce.warn(faults)
            if any(self._record_of(fault).must for fault in faults):
                self._imports.watch_again(module_name)
                raise refusal(faults)

    def _import_ended(self) -> None:
        with self._sparing_the_host():
            self._settle_and_warn()

    @contextmanager
    def _sparing_the_host(self, must: bool = False) -> Iterator[None]:
        """Around what hosts run into: a fault of our own, as of a damaged install, costs them one line.

        Not through :mod:`.announce`, which may be what is damaged.
        """
        try:
            yield
        except PatchError:
            raise
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            if must:
                raise PatchError(f"megatron_rl_patches: something of its own is wrong: {told}") from error
            if not self._has_failed:
                self._has_failed = True
                _log.warning("megatron_rl_patches: something of its own is wrong: %s; going on without", told)

    def _settle_and_warn(self) -> None:
        announce.warn(self._settle())

    def _settle(self, just_loaded: str = "", mend: bool = False) -> list[SiteStatus]:
        """Judge and wrap what is imported and not settled; gives what cannot be.

        ``mend`` what was lost, too: only when asked to, not while reporting that it is.
        """
        with self._lock:
            open_records = [
                record
                for record in self._records.values()
                if not record.is_settled
                and _is_there(record.site, just_loaded)
                and (mend or record.placement is None or record.site.module == just_loaded)
            ]
            groups = dict.fromkeys((record.patch.name, record.site.host) for record in open_records)
            return [fault for group in groups for fault in self._settle_group(*group, just_loaded)]

    def _settle_group(self, patch: str, host: str, just_loaded: str) -> list[SiteStatus]:
        group = [
            record
            for record in self._records.values()
            if (record.patch.name, record.site.host) == (patch, host) and not record.reverted
        ]
        environment = Environment()
        verdicts = hold_back({r.site: self._judge(r, environment, just_loaded) for r in group})
        for record in group:
            if verdicts[record.site].state == "fits" and _is_there(record.site, just_loaded):
                verdicts[record.site] = self._put_in_place(record, verdicts[record.site])
        if any(verdict.is_fault for verdict in verdicts.values()):
            for record in group:
                self._take_away(record)
            verdicts = hold_back(verdicts)
        for record in group:
            record.verdict = verdicts[record.site]
        return [self._status_of(r, environment) for r in group if verdicts[r.site].is_fault]

    def _judge(self, record: Record, environment: Environment, just_loaded: str) -> Verdict:
        if record.is_in_place and record.verdict is not None:
            return record.verdict
        there = _is_there(record.site, just_loaded)
        verdict = judge_site(record.site, environment, sys.modules[record.site.module] if there else None)
        if verdict.state == "conflict" and record.placement and record.placement.is_overwritten():
            # Whoever overwrote it may well call it: it stays as it is, and is reported as lost.
            return Verdict("applied", "in place", verdict.fingerprint)
        return verdict

    def _put_in_place(self, record: Record, verdict: Verdict) -> Verdict:
        site = record.site
        self._take_away(record)
        try:
            adapter = self._adapter_of(record)
            record.placement = Placement.make(record.patch.name, sys.modules[site.module], site, adapter)
        except Exception as error:
            return Verdict("failed", f"wrapping it raised {type(error).__name__}: {error}")
        return Verdict("applied", "in place", verdict.fingerprint)

    def _adapter_of(self, record: Record) -> Adapter:
        """Its first call tells the log what is in place: by then every host is imported."""
        adapter = record.site.adapter

        def call(
            wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            if not announce.done:
                with self._sparing_the_host():
                    announce.once(self.status())
            if record.site.with_settings:
                return adapter(wrapped, instance, args, kwargs, settings=self.settings[record.patch.name])
            return adapter(wrapped, instance, args, kwargs)

        return call

    def _take_away(self, record: Record) -> None:
        if record.placement:
            record.placement.take_away()
            record.placement = None

    def _record_of(self, status: SiteStatus) -> Record:
        return self._records[status.patch, status.target]

    def _status_of(self, record: Record, environment: Environment) -> SiteStatus:
        site, verdict = record.site, record.verdict
        if verdict is None and site.only_tells and environment.has_package(site.host):
            verdict = judge_site(site, environment)
        fingerprint = verdict.fingerprint if verdict else ""

        def told(state: Any, reason: str) -> SiteStatus:
            return SiteStatus(record.patch.name, site.host, site.target, state, reason, fingerprint)

        if record.reverted:
            return told("reverted", "reverted")
        if record.placement:
            return (
                told("applied", "in place")
                if record.is_in_place
                else told("lost", record.placement.why_lost())
            )
        if verdict is not None and verdict.state != "fits":
            return told(verdict.state, verdict.reason)
        if environment.file_of(site.module) is not None or site.module in sys.modules:
            return told("waiting", f"waits for the import of {site.module}")
        if environment.has_package(site.host):
            return told("missing", f"no source of module {site.module} is found")
        return told("waiting", f"{site.host} is not installed")

    def after_fork_in_child(self) -> None:
        # Another thread of the parent may have held it at the moment of the fork.
        self._lock = threading.RLock()

    def at_exit(self) -> None:
        with self._sparing_the_host():
            announce.at_exit(self.status())


def _is_there(site: Site, just_loaded: str) -> bool:
    """Is the site's module imported? The one whose hook is running looks half imported, and is not."""
    return site.module == just_loaded or is_loaded(site.module)


def refusal(faults: list[SiteStatus]) -> PatchError:
    """The error for sites that must take effect and cannot."""
    told = "\n  ".join(map(str, faults))
    return PatchError(
        f"cannot take effect:\n  {told}\nThe code of the host is not what the patch was written for. Exclude "
        "the patch (apply(exclude=...), MEGATRON_RL_PATCHES=all,-NAME), or use a release in "
        "docs/compatibility.md."
    )


installer = Installer()
atexit.register(installer.at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=installer.after_fork_in_child)
