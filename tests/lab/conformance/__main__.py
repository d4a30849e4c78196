"""Run Megatron-LM's own unit tests on CPU ranks, without and with patches: ``make conformance``."""

import argparse
import datetime
import json
import platform
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.settings import parse_selection
from tests.lab.conformance import runs
from tests.lab.conformance.runs import Change


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the patches have changed no outcome, and 1 otherwise; usage errors exit with 2."""
    options = _options(arguments)
    file, only = options.results, None
    plugin = [f"--hang-after={options.hang_after}"]
    if options.transformer_engine:
        plugin.append("--transformer-engine")
        before = runs.final_of(options.transformer_engine)
        only = [result.nodeid for result in before if result.reason == runs.TRANSFORMER_ENGINE]
    changed, differed_once = list[Change](), list[Change]()
    of_checkout = runs.Runs(options.checkout, file, plugin)
    of_checkout.run_at_smallest(options.select, options.ranks, only)
    for names in options.patches:
        of_checkout.run_with_patches(names)
        differ = of_checkout.changes(names)
        again = of_checkout.repeated_changes(differ, names)
        changed += again
        repeated = {change.without.nodeid for change in again}
        differed_once += [change for change in differ if change.without.nodeid not in repeated]
    final = runs.final_of(file)
    outcomes = Counter(result.outcome for result in final)
    reasons = Counter(result.reason for result in final if result.reason)
    runnable = len(final) - outcomes[runs.NOT_RUNNABLE]
    failed = [result for result in final if result.outcome in (runs.FAILED, runs.HANGS)]

    print(f"{len(final)} tests, {outcomes[runs.PASSED]} passed, {outcomes[runs.SKIPPED]} skipped")
    for reason, number in reasons.most_common():
        print(f"{number} cannot run here: {reason}")
    for result in failed:
        raised = next(iter(result.message.splitlines()), "")[:200]
        print(f"{result.outcome} at {result.ranks} ranks: {result.nodeid}: {raised}")
    for without, patched in changed:
        both = f"{without.outcome} without, {patched.outcome} with {patched.patches}"
        print(f"CHANGED BY PATCHES at {without.ranks} ranks: {without.nodeid}: {both}: {patched.message}")
    for without, patched in differed_once:
        print(f"differed once with {patched.patches}, and not again: {without.nodeid}")
    if options.json:
        git = ["git", "-C", options.checkout, "rev-parse", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        facts = {
            "commit": commit or None,
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "ranks": options.ranks,
            "patches": options.patches,
            "seconds": round(sum(one.seconds for one in runs.read_results(file) if not one.patches)),
            **({} if only is None else {"lacked": len(only), "with_patches": runnable}),
            "tests": len(final),
            "passed": outcomes[runs.PASSED],
            "skipped": outcomes[runs.SKIPPED],
            "not_runnable": dict(reasons.most_common()),
            "failed": [asdict(result) for result in failed],
            "changed_by_patches": [change.as_dict() for change in changed],
            "differed_once": [change.as_dict() for change in differed_once],
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(bool(changed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.conformance", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a folder of Megatron-LM")
    parser.add_argument("--select", action="append", help="file, folder or test; may be repeated")
    parser.add_argument("--ranks", type=_numbers, default="1,2,4,8", help="numbers to try, with commas")
    parser.add_argument("--patches", action="append", help="names; may be repeated; empty: none [all]")
    parser.add_argument("--hang-after", type=float, default=60.0, help="seconds until a test is cut off")
    parser.add_argument("--results", type=Path, help="a line per test; a run goes on where it ends")
    parser.add_argument(
        "--transformer-engine",
        type=Path,
        metavar="RESULTS",
        help="run with its stand-in what lacks TransformerEngine according to these results of a run before",
    )
    parser.add_argument("--json", type=Path, help="gets counts, failures and changes")
    options = parser.parse_args(arguments)
    options.select = options.select or ["tests/unit_tests"]
    options.patches = [names for names in options.patches or ["all"] if names]
    name = options.checkout.resolve().name + "-transformer-engine" * bool(options.transformer_engine)
    options.results = options.results or Path(f"conformance-{name}.jsonl")
    for names in options.patches:
        if unknown := parse_selection(names)[1]:
            parser.error(registry.unknown_names(unknown))
    for path in options.select:
        if not (options.checkout / path.partition("::")[0]).exists():
            parser.error(f"{options.checkout} has no {path}; pass a folder of Megatron-LM's sources")
    return options


def _numbers(text: str) -> list[int]:
    numbers = sorted({int(number) for number in text.split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return numbers


if __name__ == "__main__":
    # End on SIGTERM as on Ctrl-C, which ends the tests' own process, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
