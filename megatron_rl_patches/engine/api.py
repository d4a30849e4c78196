"""What the package offers: put patches in place, take them away, ask for their state."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ..settings import Settings
from . import installer as engine
from . import registry
from .installer import Record, refusal
from .report import SiteStatus
from .sources import Environment
from .spec import Patch
from .survey import survey


def apply(
    *names: str, exclude: Collection[str] = (), settings: Settings | None = None, strict: bool | None = None
) -> list[SiteStatus]:
    """Put patches in place: the named ones, or all but the explicit ones. May be called before or after the
    hosts are imported, any number of times, from any thread.

    Patches asked for by name must fit every host that is present; without names, those that do not fit are
    skipped with a warning unless ``strict``.

    Args:
        names: see ``available()``; none means all, without those that only their name selects.
        exclude: names to leave out.
        settings: defaults to those that a patch is in place with, or ``Settings.from_environment()``.
        strict: overrides ``settings.strict``.

    Returns:
        the state of every selected site.

    Raises:
        PatchError: unknown name, or a patch that must take effect cannot. Nothing of this call stays.
    """
    _apply(names, exclude, settings, strict)
    return status()


def _apply(
    names: tuple[str, ...], exclude: Collection[str], settings: Settings | None, strict: bool | None
) -> list[Record]:
    given = settings is not None
    settings = settings or Settings.from_environment()
    must = bool(names) or (settings.strict if strict is None else strict)
    chosen = registry.select(names, exclude)
    if must:
        _refuse_misfits(chosen, settings)
    return engine.installer.add(chosen, settings, must, replace_settings=given)


def revert(*names: str) -> None:
    """Take patches away (all when no name is given): the original objects are back, remaining copies inert.

    Raises:
        PatchError: unknown name.
    """
    chosen = registry.select(names or registry.patches())
    engine.installer.remove(engine.installer.records_of({patch.name for patch in chosen}))


@contextmanager
def applied(
    *names: str, exclude: Collection[str] = (), settings: Settings | None = None, strict: bool | None = None
) -> Iterator[list[SiteStatus]]:
    """:func:`apply` for the length of a ``with`` block; sites that were selected before it stay."""
    settings_before = dict(engine.installer.settings)
    added = _apply(names, exclude, settings, strict)
    try:
        yield status()
    finally:
        engine.installer.remove(added)
        engine.installer.settings = settings_before


def status() -> list[SiteStatus]:
    """State of every site of the patches selected so far, read from the live objects."""
    return engine.installer.status()


def available() -> dict[str, str]:
    """Names of all registered patches, each with its one-line summary."""
    return {name: patch.summary for name, patch in registry.patches().items()}


def _refuse_misfits(patches: Collection[Patch], settings: Settings) -> None:
    """Judge the sources of all hosts that are present, before anything is changed.

    Raises:
        PatchError: a site is missing, drifted, in conflict or cannot be judged.
    """
    faults = [status for status in survey(Environment(), patches, settings) if status.is_fault]
    if faults:
        raise refusal(faults)
