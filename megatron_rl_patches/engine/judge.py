"""Site and facts in, verdict out. Pure: touches nothing, judges by the code, never by a version number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from . import facts as facts_of
from .facts import Facts
from .sources import Source
from .spec import Site

State = Literal[
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
    """``waiting`` means: fits, and has work to do."""

    state: State
    reason: str
    fingerprint: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in FAULTS


def judge(site: Site, facts: Facts | None) -> Verdict:
    """What would become of the site; ``facts`` is ``None`` when its module is not there."""
    if facts is None:
        return Verdict("missing", f"no source of module {site.module} is found")
    try:
        state, reason = _judge(site, facts)
    except Exception as error:
        state, reason = "failed", f"judging it raised {type(error).__name__}: {error}"
    return Verdict(state, reason, facts.fingerprint)


def _judge(site: Site, facts: Facts) -> tuple[State, str]:
    if facts.function is None:
        if facts.imported_from is not None:
            return "drifted", f"moved: {site.module} imports it from {facts.imported_from}"
        return "missing", f"{site.module} does not define {site.qualname}"
    if facts.replaced_by:
        return "conflict", (
            f"replaced by {facts.replaced_by}, which does not say what it wraps; "
            "apply this patch before that one, or exclude one of the two"
        )
    if site.not_needed and (reason := site.not_needed(facts)):
        return "not needed", reason
    if absent := [name for name in site.uses if name not in facts.parameters]:
        return "drifted", f"it no longer takes {', '.join(absent)}"
    if absent := [name for name in site.mentions if name not in facts.names]:
        return "drifted", f"its body no longer uses {', '.join(absent)}"
    return "waiting", "fits"


def judge_from_source(sites: tuple[Site, ...], source: Source) -> dict[Site, Verdict]:
    """Verdicts on the sites of one patch in one host, from source text alone.

    They take effect together or not at all: a fault in one holds back all that fit.
    """
    return hold_back({site: _judge_from_source(site, source) for site in sites})


def _judge_from_source(site: Site, source: Source) -> Verdict:
    try:
        facts = facts_from(source, site)
    except (SyntaxError, UnicodeError, ImportError) as error:  # written for another Python, say
        return Verdict("failed", f"{site.module} cannot be parsed: {error}")
    return judge(site, facts)


def hold_back(verdicts: dict[Site, Verdict]) -> dict[Site, Verdict]:
    """All or none: where one site is at fault, those that fit (or are in place) share its state."""
    fault = next(((site, verdict) for site, verdict in verdicts.items() if verdict.is_fault), None)
    if fault is None:
        return verdicts
    site, culprit = fault
    held = Verdict(culprit.state, f"held back: {site.target}: {culprit.reason}")
    return {
        site: held if verdict.state in ("waiting", "applied") else verdict
        for site, verdict in verdicts.items()
    }


def facts_from(source: Source, site: Site) -> Facts | None:
    """Facts of the site's target as the source has it; ``None`` when it has no such module."""
    text = source.read(site.module)
    return None if text is None else facts_of.from_source(site.module, site.qualname, text)
