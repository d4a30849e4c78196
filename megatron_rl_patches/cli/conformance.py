"""``megatron-rl-patches conformance``: unit tests of Megatron-LM on CPU ranks, without and with patches."""

from __future__ import annotations

import datetime
import json
import platform
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine import registry
from ..engine.settings import parse_selection
from ..errors import MegatronRLPatchesError
from ..testing import conformance as tests
from ..testing.conformance import Change, Result
from .screens import check_writable, output_file, show_table

CHANGED = 1
_LISTED = 40
#: The JSON names each test that cannot run here for one of these reasons.
_NAMED = (tests.GPU_TENSOR, tests.OTHER_PACKAGE)


def conformance(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="A folder of Megatron-LM.")],
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="File, folder or test in the checkout; may be repeated."),
    ] = None,
    ranks: Annotated[
        str, typer.Option(metavar="N,N,...", help="Numbers of ranks to try, from the smallest on.")
    ] = "1,2,4,8",
    patches: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Patches to compare with none; may be repeated; empty: no comparison. [default: all]",
        ),
    ] = None,
    hang_after: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Cut off a test that hangs.")
    ] = 60.0,
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A line per test; a run goes on where it ends. [default: conformance-CHECKOUT.jsonl]",
        ),
    ] = None,
    json_file: Annotated[Path | None, output_file("--json", "Write counts, failures and changes.")] = None,
) -> None:
    """Run Megatron-LM's own unit tests on CPU ranks, without and with patches.

    Each test runs at the smallest number of ranks at which it can, and with patches at the same one. If a
    verdict differs, the whole file runs once more, both ways; the test counts as changed if it differs again.

    Needs pytest, torch, and what the tests of that Megatron-LM import.

    Exit codes:

    - 0: the patches have changed no verdict
    - 1: the patches have changed a verdict
    - 2: the checkout has no such tests, pytest cannot collect them, or a file cannot be written
    """
    counts = _numbers(ranks)
    compared = [names for names in (["all"] if patches is None else patches) if names]
    for names in compared:
        _, unknown = parse_selection(names)
        if unknown:
            raise MegatronRLPatchesError(registry.unknown_names(unknown))
    chosen = select or ["tests/unit_tests"]
    if missing := [path for path in chosen if not (checkout / path.partition("::")[0]).exists()]:
        raise MegatronRLPatchesError(
            f"{checkout} has no {missing[0]}; pass a folder of Megatron-LM's sources"
        )
    file = results or Path(f"conformance-{checkout.resolve().name}.jsonl")
    check_writable("--results", file)

    changed: list[Change] = []
    differed_once: list[Change] = []
    with _termination_as_interrupt():
        tests.run_at_smallest(checkout, chosen, ranks=counts, results=file, hang_after=hang_after)
        for names in compared:
            tests.run_with_patches(checkout, names, results=file, hang_after=hang_after)
            differ = tests.changes(file, names)
            again = tests.repeated_changes(checkout, differ, names, hang_after=hang_after)
            changed += again
            repeated = {change.without.nodeid for change in again}
            differed_once += [change for change in differ if change.without.nodeid not in repeated]
    final = tests.final_of(file)
    _show(final, changed)
    for change in differed_once:
        typer.echo(f"differed once with {change.patched.patches}, and not again: {change.without.nodeid}")
    if json_file:
        facts = {
            "commit": tests.commit_of(checkout) or None,
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "ranks": counts,
            "patches": compared,
            "seconds": round(sum(one.seconds for one in tests.read_results(file) if not one.patches)),
            **_counts(final, changed),
            "differed_once": [_as_dict(change) for change in differed_once],
        }
        json_file.write_text(json.dumps(facts, indent=1) + "\n")
    if changed:
        raise typer.Exit(CHANGED)


def _numbers(ranks: str) -> list[int]:
    try:
        numbers = sorted({int(number) for number in ranks.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise MegatronRLPatchesError(f"--ranks is {ranks!r}; pass numbers of ranks with commas between them")
    return numbers


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C, which ends the tests' own process, too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(final: Sequence[Result], changed: Sequence[Change]) -> None:
    columns = [*(outcome.replace("_", " ") for outcome in tests.OUTCOMES), "changed by patches"]
    rows = [("directory", "tests", *columns)]
    for directory, counts in _by_directory(final).items():
        changed_here = {one.without.nodeid for one in changed if _directory(one.without) == directory}
        by_outcome = (counts[outcome] for outcome in tests.OUTCOMES)
        rows.append((directory, *map(str, (sum(counts.values()), *by_outcome, len(changed_here)))))
    show_table(rows)
    typer.echo()
    show_table([("not runnable here", "tests"), *((reason, str(n)) for reason, n in _reasons(final).items())])
    failed = _failed(final)
    for result in failed[:_LISTED]:
        typer.echo(f"{result.outcome} at {_ranks(result)}: {result.nodeid}: {_first_line(result)}")
    if failed[_LISTED:]:
        typer.echo(f"and {len(failed) - _LISTED} more; --json FILE lists all")
    for without, patched in changed:
        verdict = (
            f"{without.outcome} without, {patched.outcome} with {patched.patches}: {_first_line(patched)}"
        )
        typer.echo(f"CHANGED BY PATCHES at {_ranks(without)}: {without.nodeid}: {verdict}")


def _counts(final: Sequence[Result], changed: Sequence[Change]) -> dict[str, Any]:
    outcomes = Counter(result.outcome for result in final)
    return {
        "tests": len(final),
        "passed": outcomes[tests.PASSED],
        "skipped": outcomes[tests.SKIPPED],
        "not_runnable": _reasons(final),
        "named": {
            reason: [result.nodeid for result in final if result.reason == reason] for reason in _NAMED
        },
        "failed": [asdict(result) for result in _failed(final)],
        "changed_by_patches": [_as_dict(change) for change in changed],
        "directories": _by_directory(final),
    }


def _reasons(final: Iterable[Result]) -> dict[str, int]:
    return dict(Counter(result.reason for result in final if result.reason).most_common())


def _failed(final: Iterable[Result]) -> list[Result]:
    return [result for result in final if result.outcome in (tests.FAILED, tests.HANGS)]


def _by_directory(final: Iterable[Result]) -> dict[str, Counter[str]]:
    directories: dict[str, Counter[str]] = {}
    for result in sorted(final, key=_directory):
        directories.setdefault(_directory(result), Counter())[result.outcome] += 1
    return directories


def _directory(result: Result) -> str:
    """Return the folder below ``tests/unit_tests``, or ``.`` for a file in it."""
    parts = Path(result.nodeid.partition("::")[0]).parts
    return parts[2] if len(parts) > 3 else "."


def _ranks(result: Result) -> str:
    return "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"


def _as_dict(change: Change) -> dict[str, Any]:
    return {"without": asdict(change.without), "with": asdict(change.patched)}


def _first_line(result: Result) -> str:
    return next(iter(result.message.splitlines()), "")[:200]
