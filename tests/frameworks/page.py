"""``docs/compatibility.md``, from what is on record: verdicts, runs, and models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_rl_patches.cli.commands import LEGEND, markdown_table, sections
from tests.frameworks import verdicts
from tests.frameworks.checkouts import REPOSITORIES
from tests.frameworks.verdicts import Known
from tests.real import matrix
from tests.recording import Run

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RUNS = Path(__file__).with_name("runs.json")
#: What ``pytest --record-models`` wrote: release -> promise -> "MODEL, LAYOUT" of the tests that passed.
MODELS = Path(__file__).parents[1] / "real" / "models.json"

_SHORT = 9

_INTRODUCTION = f"""\
# Compatibility

Do not edit this page: `python -m tests.frameworks.verdicts` writes it, from `verdicts.json` and `runs.json`
in `tests/frameworks`, and from `tests/real/models.json`.

{LEGEND}
## Sources

**Run for real**: the suites that passed on this very commit or package, unmodified, on CPU ranks
([what each shows](frameworks.md)). A patch is listed when it takes effect there. A row
that ends in "not checked" is older than the patches named there, and its commit can no longer be fetched.

"""

_MODELS = """\
## Models and layouts

Each promise was tested on each of these models ([what they are](models.md)) and layouts, on CPU ranks of real
megatron-core {releases}. **all**: the tests passed on all of these releases. Where releases are
named, the others cannot do it, for the reason below the table.

"""


def page_of_records() -> str:
    parts = page(verdicts.load(), runs_on_record()), models_section(json.loads(MODELS.read_text()))
    return "\n".join(parts)


def runs_on_record() -> list[Run]:
    recorded: list[Run] = json.loads(RUNS.read_text())
    return recorded


def page(table: Sequence[Known], runs: Sequence[Run]) -> str:
    names = {one.identity: _short_name(one) for one in table}
    rows = [
        (one.source, _revision(one), one.date, _patches(one), _run_for_real(one, runs, names))
        for one in table
    ]
    summary = markdown_table(("source", "commit", "date", "patches that fit", "run for real"), rows)
    return f"{_INTRODUCTION}{summary}\n{sections({one.source: one.judged() for one in table})}"


def models_section(record: dict[str, dict[str, list[str]]]) -> str:
    def cell(promise: str, model: str, layout: str) -> str:
        passed = [release for release, cells in record.items() if f"{model}, {layout}" in cells[promise]]
        if len(passed) == len(record):
            return "all"
        return ", ".join(passed) or ("" if matrix.reason(model, layout) else "–")

    promises = dict.fromkeys(promise for cells in record.values() for promise in cells)
    rows = [
        (promise, model, *(cell(promise, model, layout) for layout in matrix.LAYOUTS))
        for promise in promises
        for model in matrix.MODELS
    ]
    facts = markdown_table(("promise", "model", *matrix.LAYOUTS), rows)
    introduction = _MODELS.format(releases=", ".join(record))
    return f"{introduction}{facts}\n{matrix.REASONS}"


def _revision(one: Known) -> str:
    if one.commit is None:
        return "PyPI"
    short = one.commit[:_SHORT]
    repository = REPOSITORIES[one.source.split()[0]]
    return f"[`{short}`](https://github.com/{repository}/commit/{one.commit})"


def _patches(one: Known) -> str:
    faults = dict.fromkeys(f.patch for f in one.judged() if f.is_fault)
    fit = dict.fromkeys(f.patch for f in one.judged() if f.state == "fits" and f.patch not in faults)
    fitting = ", ".join([*fit, *(f"**not** {patch}" for patch in faults)]) or "none is needed"
    newer = one.not_judged()
    return f"{fitting}; not checked: {', '.join(newer)}" if newer else fitting


def _run_for_real(one: Known, runs: Sequence[Run], names: dict[str, str]) -> str:
    lines = [_line(run, names) for run in runs if run["source"] == one.identity]
    return "<br>".join(lines) or "judged only"


def _line(run: Run, names: dict[str, str]) -> str:
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for suite, ranks in run["suites"].items():
        by_ranks.setdefault(tuple(ranks), []).append(suite)
    most_ranks_first = sorted(by_ranks.items(), key=lambda item: -len(item[0]))
    suites = "; ".join(f"{', '.join(suites)} ({_ranks(ranks)})" for ranks, suites in most_ranks_first)
    on = "" if run["megatron"] == run["source"] else f" on {names[run['megatron']]}"
    return f"{suites}{on}, {run['date']}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks))} rank{'s' if ranks != (1,) else ''}"


def _short_name(one: Known) -> str:
    return one.source if one.commit is None else f"{one.source} `{one.commit[:_SHORT]}`"
