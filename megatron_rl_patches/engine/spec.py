"""A patch is data: where it attaches, which of the target's names it relies on, and when it has no work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..settings import Settings
    from .facts import Facts

#: wrapt's convention: ``adapter(wrapped, instance, args, kwargs)``.
Adapter = Callable[..., Any]
#: Gives the reason why a site has nothing to mend, or ``None`` when it has.
NotNeeded = Callable[["Facts"], "str | None"]

# Distributions that share the namespace package ``megatron`` are hosts of their own.
_NAMESPACES = frozenset({"megatron"})


@dataclass(frozen=True)
class Site:
    """One function or method of a host that a patch wraps.

    Attributes:
        module: the module that *defines* the target; never a root package (wrapt cannot hook those).
        qualname: ``function`` or ``Class.method`` in that module.
        adapter: called in place of the target, with the target as its first argument.
        uses: parameters of the target that the adapter binds by name.
        mentions: names that the target's body must contain for the adapter to make sense.
        not_needed: judges from the target's code whether upstream has mended it; must not import anything.
        predates_without: a name; where the whole module lacks it, the target's absence means that the host
            does not have the fault yet, or no longer, not that the target moved.
        copied_by: root packages of *other* hosts that copy the name (``from module import name``).
        with_settings: the adapter is also given ``settings=``, those that the patch was last applied with.
        only_tells: nothing is ever wrapped here; ``not_needed`` tells why the patch has no work in this host.
    """

    module: str
    qualname: str
    adapter: Adapter
    uses: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    not_needed: NotNeeded | None = None
    predates_without: str = ""
    copied_by: tuple[str, ...] = ()
    with_settings: bool = False
    only_tells: bool = False

    @property
    def host(self) -> str:
        """The package whose sites take effect together: ``slime``, ``megatron.core``, ..."""
        root, _, rest = self.module.partition(".")
        return f"{root}.{rest.partition('.')[0]}" if root in _NAMESPACES else root

    @property
    def target(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass
class Patch:
    """A named set of sites; the adapters are attached with :meth:`wrap`.

    Attributes:
        name: how users select it; the file in ``patches/`` has the same name with underscores.
        summary: one line, in terms of what users see.
        upstream: issues and pull requests that describe the fault.
        configured: further sites that follow from the settings.
        explicit: it changes what is computed, on purpose, and so is never among "all"; its name selects it.
    """

    name: str
    summary: str
    upstream: tuple[str, ...] = ()
    configured: Callable[[Settings], tuple[Site, ...]] | None = None
    sites: list[Site] = field(default_factory=list)
    explicit: bool = False

    def wrap(self, module: str, qualname: str, **options: Any) -> Callable[[Adapter], Adapter]:
        """Decorator: attach the adapter to ``module.qualname``; ``options`` are fields of :class:`Site`."""

        def attach(adapter: Adapter) -> Adapter:
            self.sites.append(Site(module, qualname, adapter, **options))
            return adapter

        return attach

    def sites_for(self, settings: Settings) -> tuple[Site, ...]:
        known = {site.target for site in self.sites}
        extra = self.configured(settings) if self.configured else ()
        return (*self.sites, *(site for site in extra if site.target not in known))
