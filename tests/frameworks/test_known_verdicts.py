"""Verdicts on known sources are as recorded in ``verdicts.json``: a changed judgement is seen.

Releases on the registry are downloaded and judged anew, always. Commits are judged anew when a repository
that has them is given: see ``checkouts.repositories``.
"""

from __future__ import annotations

import pytest

from megatron_rl_patches.engine import registry
from tests.frameworks import page, verdicts
from tests.frameworks.checkouts import REPOSITORIES, repositories
from tests.frameworks.packages import Packages
from tests.frameworks.verdicts import Known

KNOWN = verdicts.load()
RELEASES = [known for known in KNOWN if known.commit is None]
COMMITS = [known for known in KNOWN if known.commit]


@pytest.mark.slow
@pytest.mark.parametrize("known", RELEASES, ids=lambda known: known.source)
def test_releases(known: Known, packages: Packages) -> None:
    assert verdicts.judged_anew(known, packages, ()) == known


@pytest.mark.frameworks
@pytest.mark.parametrize("known", COMMITS, ids=lambda known: known.source)
def test_commits(known: Known, packages: Packages) -> None:
    anew = verdicts.judged_anew(known, packages, repositories())
    if anew is None:
        pytest.skip("no repository is given that has the commit")
    assert anew == known


def test_the_table_names_each_source_once() -> None:
    assert len({known.source for known in KNOWN}) == len({known.identity for known in KNOWN}) == len(KNOWN)


def test_runs_are_of_known_sources() -> None:
    identities = {known.identity for known in KNOWN}
    for run in page.runs_on_record():
        assert {run["source"], run["megatron"]} <= identities
        assert run["suites"]
        assert all(run["suites"].values())


def test_the_page_is_made_of_the_records() -> None:
    assert page.PAGE.read_text() == page.page_of_records(), "run python -m tests.frameworks.verdicts"


@pytest.mark.parametrize(
    ("fitting", "text"),
    [("abc", "a to c"), ("ab", "up to b"), ("a", "a"), ("bc", "b to c"), ("c", "c"), ("ac", "a, c")],
)
def test_a_range_of_releases(fitting: str, text: str) -> None:
    assert page._range([*fitting], [*"abc"]) == text


def test_the_matrix_says_what_fits_what_does_not_and_what_nobody_checked() -> None:
    def known(source: str, verdict: str) -> Known:
        sites = {site.target: verdict for site in registry.patches()["scheduler-resume"].sites[:1]}
        return Known(source, "", "", {"slime": {"scheduler-resume": sites}})

    table = [known("slime main", "not needed: it is fixed"), known("slime v0.10.0", "fits")]
    found = page.matrix(
        [*table, known("slime v0.9.0", "fits"), known("Megatron-LM for slime v0.9.0", "fits")]
    )
    assert list(found) == list(page.FRAMEWORKS) and set(page.FRAMEWORKS) > REPOSITORIES.keys()
    assert found["slime"]["scheduler-resume"] == "up to v0.10.0"
    assert found["slime"]["lean-loss"] == page.NOT_CHECKED and "expert-norm" not in found["slime"]
    assert page.matrix(table[:1])["slime"]["scheduler-resume"] == page.NOT_NEEDED
    assert page.matrix([known("slime main", "drifted: x")])["slime"]["scheduler-resume"] == "drifted"
