"""Site and facts in, verdict out. Pure: touches nothing, judges by the code, never by a version number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from . import facts as facts_of
from .facts import Facts
from .sources import Source
from .spec import Site

State = Literal[
    "fits",
    "absent",
    "applied",
    "waiting",
    "not needed",
    "missing",
    "drifted",
    "conflict",
    "failed",
    "lost",
    "reverted",
]
#: States in which a patch that was asked for is not there.
FAULTS: frozenset[State] = frozenset({"missing", "drifted", "conflict", "failed"})


@dataclass(frozen=True)
class Verdict:
    """``fits``: the patch has work to do there, and can."""

    state: State
    reason: str
    fingerprint: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in FAULTS


def judge(site: Site, facts: Facts | None) -> Verdict:
    """What would become of the site; ``facts`` is ``None`` when its module is not there."""
    if facts is None:
        return _verdict(site, "missing", f"no source of module {site.module} is found")
    try:
        state, reason = _judge(site, facts)
    except Exception as error:
        state, reason = "failed", f"judging it raised {type(error).__name__}: {error}"
    return _verdict(site, state, reason, facts.fingerprint)


def _verdict(site: Site, state: State, reason: str, fingerprint: str = "") -> Verdict:
    if site.only_tells and state != "not needed":
        # Where nothing is ever wrapped, code that has moved is no fault.
        return Verdict("not needed", f"nothing to do is known there ({state}: {reason})", fingerprint)
    return Verdict(state, reason, fingerprint)


def _judge(site: Site, facts: Facts) -> tuple[State, str]:
    if facts.function is None:
        if facts.imported_from is not None:
            return "drifted", f"moved: {site.module} imports it from {facts.imported_from}"
        if site.predates_without and site.predates_without not in facts.module_names:
            return "not needed", f"{site.module} does not know {site.predates_without}"
        return "missing", f"{site.module} does not define {site.qualname}"
    if facts.replaced_by:
        return "conflict", (
            f"replaced by {facts.replaced_by}, which has no __wrapped__ to say what it stands for; "
            "put this patch in place before it, give it functools.wraps, or exclude this patch"
        )
    if site.not_needed and (reason := site.not_needed(facts)):
        return "not needed", reason
    if not facts.runs_when_called:
        return "drifted", "it is a generator or a coroutine function: it runs after the call is over"
    if absent := [name for name in site.uses if name not in facts.parameters]:
        return "drifted", f"it no longer takes {', '.join(absent)}"
    if absent := [name for name in site.mentions if name not in facts.names]:
        return "drifted", f"its body no longer uses {', '.join(absent)}"
    return "fits", "has the fault that the patch mends"


def judge_from_source(sites: tuple[Site, ...], source: Source) -> dict[Site, Verdict]:
    """Verdicts on the sites of one patch in one host, from source text alone.

    They take effect together or not at all: a fault in one holds back all that fit.
    """
    return hold_back({site: judge_site(site, source) for site in sites})


def judge_site(site: Site, source: Source, live: ModuleType | None = None) -> Verdict:
    """Verdict on one site, from its source text and, where it is imported, from the live module."""
    try:
        text = source.read(site.module)
        facts = None if text is None else facts_of.from_source(site.module, site.qualname, text)
        if live is not None and facts is not None and facts.function is not None:
            facts = facts.with_live(live, site.qualname)
    except (SyntaxError, UnicodeError, ImportError) as error:  # written for another Python, say
        return _verdict(site, "failed", f"{site.module} cannot be parsed: {error}")
    except AttributeError as error:
        return _verdict(site, "missing", f"{site.target} is in the source but not in the module: {error}")
    return judge(site, facts)


def by_host(sites: Iterable[Site]) -> dict[str, tuple[Site, ...]]:
    """The sites that take effect together."""
    grouped: dict[str, tuple[Site, ...]] = {}
    for site in sites:
        grouped[site.host] = (*grouped.get(site.host, ()), site)
    return grouped


def hold_back(verdicts: dict[Site, Verdict]) -> dict[Site, Verdict]:
    """All or none: where one site is at fault, those that fit (or are in place) share its state."""
    fault = next(((site, verdict) for site, verdict in verdicts.items() if verdict.is_fault), None)
    if fault is None:
        return verdicts
    site, culprit = fault
    held = Verdict(culprit.state, f"held back: {site.target}: {culprit.reason}")
    return {
        site: held if verdict.state in ("fits", "applied") else verdict for site, verdict in verdicts.items()
    }
