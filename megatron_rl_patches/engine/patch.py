"""A patch as data: where it attaches, which of the target's names it relies on, and when it has no work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from _megatron_rl_patches_startup import is_interrupt

from ..common.text import one_line
from ..errors import PatchError
from .call import Call
from .target_source import TargetSource

#: Called in place of a function.
Adapter = Callable[[Call], Any]
Decorator = Callable[[Adapter], Adapter]
#: What switches a patch on: ``1`` and ``apply()`` do, ``all`` does, or only its name does.
SelectedBy = Literal["default", "all", "by name"]
#: Returns the reason why a site is to be left alone, or ``None``.
SkipIf = Callable[[TargetSource], "str | None"]


@dataclass(frozen=True)
class Site:
    """One function or method of a framework that a patch wraps.

    Attributes:
        module: the module that *defines* the target; a root package will do, too.
        qualname: ``function`` or ``Class.method`` in that module.
        adapter: what is called in place of the target; as text, see :func:`imported`, it is imported at the
            first call.
        parameters: parameters of the target that the adapter reads or changes.
        requires_names: names that the target's body must contain for the adapter to make sense.
        skip_if: returns a reason if the target's code shows that there is nothing to fix; it must not import
            anything.
        introduced_with: a name that came to the module together with the fault. In a release whose module
            does not contain it, a missing target is ``not needed``; elsewhere it is ``missing``.
        optional_module: some releases do not have the module, and then have nothing to patch there.
        helps: qualified names of other sites of the same patch and framework, without which this one has no
            work: where none of them is needed, this one is ``not needed`` either.
        detail: returns what the adapter has done so far, which ``status()`` shows; empty if nothing.
        elsewhere, patch: other releases' modules of the function, and the patch; :class:`Patch` sets them.
        framework: the package whose sites take effect together: ``slime``, ``megatron.core``, ...
        target: the full name of the function.
    """

    module: str
    qualname: str
    adapter: Adapter | str
    parameters: tuple[str, ...] = ()
    requires_names: tuple[str, ...] = ()
    skip_if: SkipIf | None = None
    introduced_with: str = ""
    optional_module: bool = False
    helps: tuple[str, ...] = ()
    detail: Callable[[], str] | None = None
    elsewhere: tuple[str, ...] = ()
    patch: str = ""
    framework: str = field(init=False)
    target: str = field(init=False)

    def __post_init__(self) -> None:
        vars(self).update(framework=_framework_of(self.module), target=f"{self.module}.{self.qualname}")
        for name in ("parameters", "requires_names", "helps"):  # one name as text, and lists, will do
            names = getattr(self, name)
            vars(self)[name] = (names,) if isinstance(names, str) else tuple(names)


@dataclass
class Patch:
    """A named set of sites; the adapters are attached with :meth:`wrap`.

    Attributes:
        name: how users select it; the file in ``patches/`` has the same name with underscores.
        summary: one line, in terms of what users see.
        upstream: issues and pull requests that describe the fault.
        options: a frozen dataclass with a default for every field. Its fields become keyword arguments of
            ``Settings`` and variables ``MEGATRON_RL_PATCHES_<FIELD>``. Values are converted and checked if
            the type is ``bool``, ``int``, ``float``, ``str``, ``Literal``, ``tuple[X, ...]`` of these or of
            pairs ``tuple[str, str]``, or a union of such types, of which the first that fits is taken; those
            of other types are taken as they are, and ``__post_init__`` may check them.
        configured: returns further sites that follow from the options.
        notes: says what the ``SiteStatus`` of all selected sites mean for users; ``doctor`` shows it.
        decorated: returns the states of functions that have a decorator in place of the patch.
        selected_by: ``default`` for a repair, which ``1`` and ``apply()`` put in place; ``all`` for a patch
            that is not proven enough for that; ``by name`` for one that changes on purpose what is trained.
        last: a call of ``apply()`` puts it in place after others, so that its wrappers are around theirs.
    """

    name: str
    summary: str
    upstream: tuple[str, ...] = ()
    options: type[Any] | None = None
    configured: Callable[[Any], tuple[Site, ...]] | None = None
    notes: Callable[[Sequence[Any]], list[str]] | None = None
    decorated: Callable[[], Sequence[Any]] = tuple
    sites: list[Site] = field(default_factory=list)
    selected_by: SelectedBy = "default"
    last: bool = False

    def wrap(self, modules: str | Sequence[str], qualname: str, to: str = "", **options: Any) -> Decorator:
        """Attach an adapter to ``qualname`` in one module, or in several that have the same function.

        Args:
            to: the adapter as text; without it, the decorated function is the adapter.
            **options: fields of :class:`Site`.
        """

        def attach(adapter: Any) -> Any:
            names = (modules,) if isinstance(modules, str) else modules
            for module in names:
                alike = {each for each in names if _framework_of(each) == _framework_of(module)}
                others = tuple(sorted(alike - {module}))
                self.sites += [Site(module, qualname, adapter, patch=self.name, elsewhere=others, **options)]
            return adapter

        if to:
            attach(to)
        return attach

    def sites_for(self, options: Any) -> tuple[Site, ...]:
        """Return all sites: those of the table, and those that follow from the options.

        Raises:
            PatchError: ``configured`` raises.
        """
        known = {site.target for site in self.sites}
        with third_party(f"function `configured` of patch {self.name!r}"):
            configured = self.configured(options) if self.configured else ()
            sites = (*self.sites, *(site for site in configured if site.target not in known))
            return tuple(s if s.patch == self.name else replace(s, patch=self.name) for s in sites)


def _framework_of(module: str) -> str:
    """Return the root package; below ``megatron``, which several distributions share, the package there."""
    return ".".join(module.split(".")[: 2 if module.startswith("megatron.") else 1])


def imported(path: str) -> Adapter:
    """Import ``"package.module:function"``; with a leading dot, the module is one of this package."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module, __package__.partition(".")[0]), name)


@contextmanager
def third_party(what: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raise ``PatchError`` in place of whatever the block raises, ``sys.exit()`` included.

    Ctrl-C, what the handler of a signal raises, and exceptions that are ``passing`` stay as they are.
    """
    try:
        yield
    except BaseException as error:
        if is_interrupt(error) or isinstance(error, passing):
            raise
        raise PatchError(f"{what} raised {one_line(error)}") from error
