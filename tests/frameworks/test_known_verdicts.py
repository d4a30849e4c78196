"""Verdicts on known sources are as recorded in ``verdicts.json``: a changed judgement is seen.

Releases on the registry are downloaded and judged anew, always. Commits are judged anew when a repository
that has them is given: see ``checkouts.repositories``.
"""

import pytest

from tests.frameworks import page, verdicts
from tests.frameworks.checkouts import repositories
from tests.frameworks.packages import Packages
from tests.frameworks.verdicts import Known

KNOWN = verdicts.load()


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(one, id=one.source, marks=pytest.mark.frameworks if one.commit else pytest.mark.slow)
        for one in KNOWN
    ],
)
def test_known_sources(known: Known, packages: Packages) -> None:
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
