"""All sites of patches judged by a source: what would take effect there, and what would not and why."""

from __future__ import annotations

from collections.abc import Iterable

from ..settings import Settings
from .judge import by_host, judge_from_source
from .report import SiteStatus
from .sources import Source
from .spec import Patch


def survey(source: Source, patches: Iterable[Patch], settings: Settings) -> list[SiteStatus]:
    """Judge all sites of the patches by the source's code."""
    findings = []
    for patch in patches:
        for host, sites in by_host(patch.sites_for(settings)).items():
            if source.has_package(host):
                findings += [
                    SiteStatus(
                        patch.name,
                        host,
                        site.target,
                        verdict.state,
                        verdict.reason,
                        verdict.fingerprint,
                    )
                    for site, verdict in judge_from_source(sites, source).items()
                ]
            else:
                told = f"no {host} in {source.name}"
                findings += [SiteStatus(patch.name, host, site.target, "absent", told) for site in sites]
    return findings
