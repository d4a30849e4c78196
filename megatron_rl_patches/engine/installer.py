"""Selects sites, waits for their modules, puts patches in place and takes them away, under one lock."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from _megatron_rl_patches_startup import Listener, finder

from ..common.messages import Message
from ..common.scopes import replaced
from ..errors import PatchError
from . import registry
from .call import Call
from .judge import all_or_nothing, refuse_faults
from .patch import Patch, Site, imported, third_party
from .records import ApplyCall, Moves, Record, current, rebind
from .settings import Settings
from .statuses import Announcer, SiteStatus, Statuses, status_of

_INTERNAL_ERROR = Message(
    "internal error: {reason}",
    "The program continues without patches here.",
    "Install the package again; if that does not help, report this.",
)
#: Calls that stay until a revert, by whether they are required.
_LASTING = {required: ApplyCall(required, lasts=True) for required in (True, False)}


class Installer(Listener):
    """The state of one process, whose one instance all functions of :mod:`.api` act on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: dict[tuple[str, str], Record] = {}
        #: The options of a patch, by its name; adapters read them at every call, without a lock.
        self.options: dict[str, Any] = {}
        #: Those of patches that ``apply()`` has selected, for after the last ``applied()`` block.
        self._lasting_options: dict[str, Any] = {}
        self._has_failed = False
        #: What has been wrapped or unwrapped, while copies are not rebound yet.
        self._moved: Moves = []
        self.announcer = Announcer()

    def add(
        self,
        patches: Collection[Patch],
        settings: Settings,
        apply_call: ApplyCall,
        replace_options: bool = True,
    ) -> None:
        """Put the patches in place, now or when their frameworks are imported; raise as ``apply()`` does.

        With ``replace_options``, patches that are selected already take the options of these settings, too.
        """
        sites: list[Site] = []
        options = {patch.name: settings.options_of(patch) for patch in patches}
        for patch in patches:
            try:
                sites += patch.sites_for(options[patch.name])
            except PatchError as error:
                if apply_call.required:
                    raise
                registry.LEFT_OUT.log(error=error)
        # No other thread sees what may yet be undone. This cannot deadlock, as hooks take no other lock, and
        # nothing below waits for an import.
        with self._lock:
            before = dict(self._records)
            in_blocks = self._in_blocks()
            selected = set() if replace_options else in_blocks | self._lasting_options.keys()
            chosen = {name: options[name] for name in options if name not in selected}
            for name in in_blocks & chosen.keys():
                if chosen[name] != self.options[name]:
                    raise PatchError(
                        f"{name} is in an applied() block with {self.options[name]!r} and cannot take "
                        f"{chosen[name]!r}: wait for the end of that block, or pass its settings"
                    )
            try:
                # Hooks are registered first. A module whose import has ended by now is found in sys.modules
                # below. One whose import ends later calls its hook, which waits for the lock.
                for module in {site.module for site in sites}:
                    finder.watch(module, self)
                for site in sites:
                    record = self._records.get((site.patch, site.target))
                    if record is None or record.is_reverted:
                        self._records[site.patch, site.target] = Record(site)
                records = [self._records[site.patch, site.target] for site in sites]
                for record in records:
                    record.apply_calls.add(apply_call)
                self.options |= chosen
                skipped = self._apply_ready(r for r in records if r.is_open and r.is_imported)
                refuse_faults(current(records) if apply_call.required else ())
            except BaseException:
                self.release(apply_call)
                self._records = before
                raise
            if apply_call.lasts:
                in_force = {patch.name: self.options[patch.name] for patch in patches}
                self._lasting_options = {**in_force, **self._lasting_options, **chosen}
                for record in records:  # one of its kind, however often apply() is called
                    record.apply_calls = {*record.apply_calls - {apply_call}, _LASTING[apply_call.required]}
        self.announcer.warn(skipped)

    def _in_blocks(self) -> set[str]:
        """Return the patches that running ``applied()`` blocks have selected."""
        return {r.site.patch for r in self._records.values() if not all(each.lasts for each in r.apply_calls)}

    def release(self, apply_call: ApplyCall) -> None:
        """Undo what the call did, options included; sites that other calls have selected stay in place."""
        with self._lock:
            released = [record for record in self._records.values() if apply_call in record.apply_calls]
            for record in released:
                record.apply_calls.remove(apply_call)
            self._revert(record for record in released if not record.apply_calls)
            ended = {record.site.patch for record in released} - self._in_blocks()
            for name in ended & self._lasting_options.keys():
                self.options[name] = self._lasting_options[name]
            # A site that is gone now may have kept the others of its group from taking effect.
            self._apply_ready(self._missed())

    def remove(self, names: Collection[str]) -> None:
        """Revert the patches of these names, whichever calls selected them."""
        with self._lock:
            records = [record for record in self._records.values() if record.site.patch in names]
            for record in records:
                record.apply_calls.clear()
                self._lasting_options.pop(record.site.patch, None)
            self._revert(record for record in records if not record.is_reverted)

    def _revert(self, records: Iterable[Record]) -> None:
        records = [*records]
        for record in reversed(records):
            if record.wrapper is None:  # it was never put in place, so there is nothing to report
                del self._records[record.site.patch, record.site.target]
            self._moved += record.unwrap()
            record.status = replace(record.status, state="reverted", reason="reverted", because_of="")
        self._rebind_copies()
        awaited = {record.site.module for record in self._records.values() if not record.is_reverted}
        for module in {record.site.module for record in records} - awaited:
            finder.forget(module, self)

    def status(self) -> Statuses:
        """Return the states of all selected sites, read from the live objects."""
        self._apply_missed()
        with self._lock:
            return Statuses(current(self._records.values()))

    # --- called by hooks

    def loaded(self, module_name: str) -> None:
        """A watched module has just been imported; an exception makes that import fail."""
        faults: list[SiteStatus] = []
        with self._lock:
            records = [record for record in self._records.values() if record.site.module == module_name]
            required = any(record.is_required for record in records)
            with self._log_internal_errors(required):
                for record in records:
                    record.leave()
                faults = self._apply_ready(r for r in records if r.is_open and r.is_imported)
                refuse_faults(s for s in faults if self._records[s.patch, s.target].is_required)
        self.announcer.warn(faults)

    def import_ended(self) -> None:
        with self._log_internal_errors():
            self._apply_missed()

    @contextmanager
    def _log_internal_errors(self, required: bool = False) -> Iterator[None]:
        """Log an internal error, such as a damaged file, once, and keep it from the framework."""
        try:
            yield
        except PatchError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            if required:
                raise PatchError(f"megatron_rl_patches: internal error: {reason}") from error
            if not self._has_failed:
                self._has_failed = True
                # Not by the announcer, which may be what is damaged.
                _INTERNAL_ERROR.log(reason=reason)

    # --- judging and wrapping

    def _apply_missed(self) -> None:
        """Patch modules that were imported without a hook, and warn of faults; lost patches stay lost."""
        with self._lock:
            faults = self._apply_ready(self._missed())
        self.announcer.warn(faults)

    def _missed(self) -> list[Record]:
        return [r for r in self._records.values() if r.wrapper is None and r.is_open and r.is_imported]

    def _apply_ready(self, records: Iterable[Record]) -> list[SiteStatus]:
        """Judge and wrap the groups that these records belong to; return the faults."""
        groups = dict.fromkeys(record.group for record in records)
        try:
            return [fault for group in groups for fault in self._apply_group(group)]
        finally:
            self._rebind_copies()

    def _rebind_copies(self) -> None:
        """Have modules that hold copies of what was wrapped hold the wrapper, or the original again."""
        moves, pairs = self._moved, {(id(old), id(new)) for old, new in self._moved}
        # A revert may put back the wrapper of another patch, which has wrapped nothing now.
        wrapped = [
            record
            for record in self._records.values()
            if (wrapper := record.wrapper) is not None and (id(wrapper.__wrapped__), id(wrapper)) in pairs
        ]
        # Modules are searched after a revert, or if anybody holds what has been wrapped.
        if len(wrapped) < len(moves) or any(record.copies_out_of_reach(moves) for record in wrapped):
            rebind(moves)
        for record in wrapped:
            record.report_copies(moves)
        moves.clear()

    def _apply_group(self, name: tuple[str, str]) -> list[SiteStatus]:
        """Put one patch in place in one framework, or leave it out there altogether.

        Half a patch is worse than none, so all sites of the group are judged before one is touched, those of
        modules that are not imported yet by their source, and judged again when such a module is imported. If
        that shows a fault, or an attribute refuses to be set, what is wrapped already is unwrapped again.
        """
        group = [r for r in self._records.values() if r.group == name and not r.is_reverted]
        imported = {record for record in group if record.is_imported}
        statuses = all_or_nothing({record.site: record.judge(record in imported) for record in group})
        fitting = [r for r in group if statuses[r.site].state == "fits" and r in imported]
        try:
            for record in fitting:
                statuses[record.site] = self._wrap(record, statuses[record.site])
        except BaseException:  # KeyboardInterrupt, say
            for record in reversed(fitting):
                self._moved += record.unwrap()
            raise
        statuses = all_or_nothing(statuses)
        is_faulty = any(status.is_fault for status in statuses.values())
        for record in reversed(group):
            # A site in place is no longer needed if the functions that it helps, imported later, are not.
            if is_faulty or statuses[record.site].state == "not needed":
                self._moved += record.unwrap()
            record.settle(statuses[record.site])
        return [status for status in statuses.values() if status.is_fault]

    def _wrap(self, record: Record, status: SiteStatus) -> SiteStatus:
        self._moved += record.unwrap(former=False)
        try:
            self._moved += record.wrap(self._adapter_of(record.site))
        except Exception as error:
            return status_of(record.site, "failed", f"wrapping it raised {type(error).__name__}: {error}")
        return status_of(record.site, "applied", "in place", status.fingerprint)

    def _adapter_of(self, site: Site) -> Callable[[Call], Any]:
        """Return the site's adapter, which gets the options of the patch, and is imported at the first call.

        The first call of any adapter logs what is in place, since everything has been imported by then.
        """
        patch, options, adapter = site.patch, self.options, site.adapter
        is_first = True

        def run(call: Call) -> Any:
            nonlocal adapter, is_first
            if is_first:
                if isinstance(adapter, str):
                    with third_party(f"patch {site.patch!r}: importing its adapter {adapter}"):
                        adapter = imported(adapter)
                if not self.announcer.done:
                    with self._log_internal_errors():
                        self.announcer.once(self.status())
                is_first = False
            call.options = options[patch]
            return adapter(call)  # type: ignore[operator]

        return run

    # --- of the process

    def after_fork_in_child(self) -> None:
        # Another thread of the parent may have held the lock at the moment of the fork.
        self._lock = threading.RLock()

    def at_exit(self) -> None:
        # Logging prints tracebacks if a handler's stream is closed already.
        with replaced(logging, raiseExceptions=False), self._log_internal_errors():
            statuses = zip(self._records.values(), self.status(), strict=False)
            # A module that some releases do without need not be imported.
            of_interest = [s for r, s in statuses if s.state != "waiting" or not r.site.optional_module]
            self.announcer.at_exit(of_interest)


installer = Installer()
atexit.register(installer.at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=installer.after_fork_in_child)
