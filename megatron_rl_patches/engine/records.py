"""A selected site, its target, and copies of the target. Only this module changes foreign objects."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from _megatron_rl_patches_startup import finder

from ..errors import PatchError
from .call import Call
from .judge import judge_site
from .patch import Site, third_party
from .sources import Environment
from .statuses import SiteStatus, status_of
from .target_source import layers, resolve
from .wrapper import SwitchableWrapper

#: Old and new functions, one after the other: the new one of a pair may be the old one of a later pair.
Moves = list[tuple[Any, Any]]


@dataclass(eq=False)
class ApplyCall:
    """What a call of ``apply()``, or an ``applied()`` block, asked for."""

    required: bool  # a site that does not fit is an error
    lasts: bool  # it stays until it is reverted, and not for the length of a block


class Record:
    """One selected site.

    Its ``status`` is ``waiting`` until the module is imported, then ``applied``, ``not needed`` or a fault,
    and ``reverted`` when no call needs it. ``is_in_place`` looks for the wrapper, as others may overwrite it.

    Attributes:
        apply_calls: the calls that have selected the site and not been undone.
        group: patch and framework; all sites of a group take effect, or none.
        wrapper: what is, or was, in place of the target; ``None`` before it is wrapped, and after a revert.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.status = _waiting(site)
        self.apply_calls: set[ApplyCall] = set()
        self.group = (site.patch, site.framework)
        self.wrapper: SwitchableWrapper | None = None
        #: Wrappers of functions from before a reload, while anybody holds them.
        self._former: list[weakref.ref[SwitchableWrapper]] = []

    @property
    def is_required(self) -> bool:
        return any(each.required for each in self.apply_calls)

    @property
    def is_reverted(self) -> bool:
        return self.status.state == "reverted"

    @property
    def is_imported(self) -> bool:
        return finder.is_imported(self.site.module)

    @property
    def is_in_place(self) -> bool:
        return self.wrapper is not None and any(each is self.wrapper for each in _layers(self._live()[1]))

    @property
    def is_open(self) -> bool:
        """Whether the patch may have to be put in place here: it is not in place, reverted or unneeded."""
        return self.status.state not in ("reverted", "not needed") and not self.is_in_place

    def current(self, environment: Environment) -> SiteStatus:
        """Return the status, read from the live object, and where there is none from the environment."""
        site, status = self.site, self.status
        if self.wrapper is not None and not self.is_in_place:
            return status_of(site, "lost", self._reason_lost(), status.fingerprint)
        if status.state == "applied":
            if module := self._code_on_top():
                reason = f"{status.reason}, under code of {module}, which must call the patched function"
                status = replace(status, reason=reason)
            try:
                with third_party("its function `detail`"):
                    return replace(status, detail=self.site.detail() if self.site.detail else "")
            except PatchError as error:
                return replace(status, detail=str(error))
        if status.state != "waiting" or site.module in sys.modules or environment.has_package(site.module):
            return status
        if environment.has_package(site.framework):
            return judge_site(site, environment)
        return replace(status, state="absent", reason=f"{site.framework} is not installed")

    def judge(self, is_imported: bool) -> SiteStatus:
        """Judge the site anew, unless it is in place."""
        if self.is_in_place:
            return self.status
        status = judge_site(self.site, Environment(), sys.modules[self.site.module] if is_imported else None)
        if status.state == "conflict" and self.wrapper is not None and self._live()[0] is self.wrapper.owner:
            # The code that overwrote it may call it. So it stays as it is, and is reported as lost.
            return status_of(self.site, "applied", "in place", status.fingerprint)
        return status

    def settle(self, status: SiteStatus) -> None:
        """Take the status; a site that fits, and is not wrapped, waits for its module."""
        fits = status.state == "fits"
        self.status = _waiting(self.site, status.fingerprint) if fits else status

    def wrap(self, adapter: Callable[[Call], Any]) -> Moves:
        """Put a wrapper in place that calls the adapter; return what moved."""
        owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
        new = SwitchableWrapper(vars(owner)[name], adapter, self.site, owner)
        # An earlier revert may have switched a wrapper off and left it under another one.
        wrappers = (layer for layer in _layers(new.__wrapped__) if type(layer) is SwitchableWrapper)
        self.wrapper = next((own for own in wrappers if own.path == new.path and not own.is_on), new)
        if not self.is_in_place:
            setattr(owner, name, self.wrapper)
        self.wrapper.switch(True)
        return [(self.wrapper.__wrapped__, self.wrapper)]

    def leave(self) -> None:
        """Let go of a wrapper that a reload has replaced; in copies of the old code it stays in force."""
        if self.wrapper is not None and not self.is_in_place:
            self._former.append(weakref.ref(self.wrapper))
            self.wrapper = None

    def unwrap(self, former: bool = True) -> Moves:
        """Put the original back, and those of before reloads; return what moved."""
        wrappers = [self.wrapper]
        self.wrapper = None
        if former:
            wrappers += [reference() for reference in self._former]
            self._former.clear()
        return [self._unwrapped(wrapper) for wrapper in wrappers if wrapper is not None]

    def _unwrapped(self, wrapper: SwitchableWrapper) -> tuple[Any, Any]:
        wrapper.switch(False)  # first, for calls of other threads and copies that cannot be reached
        original = wrapper.__wrapped__
        # The original may be the wrapper of a patch that has been reverted before this one.
        while type(original) is SwitchableWrapper and not original.is_on:
            original = original.__wrapped__
        name = self.site.qualname.rpartition(".")[2]
        if vars(wrapper.owner).get(name) is wrapper:
            setattr(wrapper.owner, name, original)
        return wrapper, original

    def copies_out_of_reach(self, moves: Moves) -> int:
        """Return how many references to the original there are besides those of the wrapper and the moves."""
        holder: Any = self.wrapper
        held_once = SimpleNamespace(__wrapped__=object())
        count = sys.getrefcount(holder.__wrapped__) - sys.getrefcount(held_once.__wrapped__)
        of_moves = sum(each is holder.__wrapped__ for move in moves for each in move)
        # The wrapper's closure holds it, too, and so does a record if it is the wrapper of another patch.
        return count - of_moves - 1 - (type(holder.__wrapped__) is SwitchableWrapper)

    def report_copies(self, moves: Moves) -> None:
        """Put into the status where the original, or a function that it has replaced, is still in use."""
        reason, name = self.status.reason, self.site.qualname
        if count := self.copies_out_of_reach(moves):
            reason += f", but copies made before, in a table or a closure, are the original: {count}"
        functions = [each for each in layers(self.wrapper) if type(each) is not SwitchableWrapper]
        beneath = {id(each) for each in functions[1:] if getattr(each, "__name__", "") == name}
        modules = dict.fromkeys(module.__name__ for module, _ in _holders(beneath)) if beneath else {}
        if others := [module for module in modules if module != self.site.module]:
            reason += f", but these modules keep a function that was replaced before: {', '.join(others)}"
        self.status = replace(self.status, reason=reason)

    def _code_on_top(self) -> str:
        """Return the module of the code that other packages have put around the wrapper, or ``""``."""
        for layer in _layers(self._live()[1]):
            if layer is self.wrapper:
                break
            if type(layer) is not SwitchableWrapper:
                is_plain = type(layer) is FunctionType
                return str(layer.__globals__.get("__name__") if is_plain else type(layer).__module__)
        return ""

    def _live(self) -> tuple[Any, Any]:
        """Return the owner of the target and the target, as they are now; after a reload both are others."""
        try:
            owner, name = resolve(sys.modules[self.site.module], self.site.qualname)
            return owner, vars(owner)[name]
        except (KeyError, AttributeError):
            return None, None

    def _reason_lost(self) -> str:
        owner, current = self._live()
        if current is None:
            return f"{self.site.target} is gone"
        if self.wrapper is not None and owner is not self.wrapper.owner:
            return f"{self.site.module} was imported anew; call apply() again"
        home = f"{getattr(current, '__module__', '?')}.{getattr(current, '__qualname__', '?')}"
        return f"overwritten by {home}; the patch works only if that calls the patched function"


def current(records: Iterable[Record]) -> list[SiteStatus]:
    """Return the statuses of these records, for which each module is looked for once."""
    environment = Environment()
    return [record.current(environment) for record in records]


def _waiting(site: Site, fingerprint: str = "") -> SiteStatus:
    return status_of(site, "waiting", f"waits for the import of {site.module}", fingerprint)


def _layers(function: Any) -> Iterator[Any]:
    """Yield the layers of a function; a wrapper that is read from its class counts as the wrapper itself."""
    bound = SwitchableWrapper.__bound_function_wrapper__
    return (layer._self_parent if type(layer) is bound else layer for layer in layers(function))


def _holders(ids: Collection[int]) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules that hold one of these objects, and its name there."""
    for module in sys.modules.copy().values():  # copies, as other threads, and finalizers, may import
        if isinstance(module, ModuleType):
            yield from [(module, name) for name, value in vars(module).copy().items() if id(value) in ids]


def rebind(moves: Moves) -> None:
    """Have every module that holds an old function under some name hold the new one, found by identity."""
    final: dict[int, Any] = {}
    for old, new in reversed(moves):
        final[id(old)] = final.get(id(new), new)
    for module, name in _holders(final):
        # A module that refuses keeps the old function, like other copies that cannot be reached.
        with suppress(Exception):
            setattr(module, name, final[id(vars(module)[name])])
