"""The commands. Each gathers facts elsewhere, shows them, and turns them into an exit code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from ..common.scopes import replaced
from ..doctor import OUT_OF_REACH, choice_of, examine
from ..engine import registry
from ..engine.judge import judge_all
from ..engine.sources import Environment, open_source
from ..engine.statuses import SiteStatus
from ..errors import MegatronRLPatchesError
from .estimate import estimate
from .screens import output_file, show_diagnosis, show_json, show_table

FOUND_FAULTS = 1
CANNOT_START = 2

app = typer.Typer(
    name="megatron-rl-patches",
    help="Run-time patches that make Megatron-core, and RL frameworks on top of it, re-enterable and lean.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script and of ``python -m megatron_rl_patches``."""
    try:
        app(arguments, prog_name="megatron-rl-patches")
    except (MegatronRLPatchesError, OSError) as error:
        _complain(str(error))
        sys.exit(CANNOT_START)


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        typer.echo(f"megatron-rl-patches {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    command: Annotated[
        str, typer.Option(metavar="TEXT", help="A job's command line: its variables and hook count, too.")
    ] = "",
    json: Json = False,
) -> None:
    """Find out why patches do not take effect in this environment.

    Starts one child process to see whether the startup file fires. Imports no framework.

    Exit codes:

    - 0: everything that is selected can take effect, or nothing is selected
    - 1: something cannot. A function of an installed framework is missing, drifted, in conflict or cannot be
      checked; the variable is set, but the startup file does not fire; a variable has a bad value; or wrapt
      is absent or out of range
    """
    # A program finds what is in its own folder, where most people call this command, too.
    with replaced(sys, path=[*sys.path, ""]):
        diagnosis = examine(command=command)
    if json:
        show_json({**asdict(diagnosis), "out_of_reach": OUT_OF_REACH})
    else:
        show_diagnosis(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(FOUND_FAULTS)


@app.command()
def check(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]SOURCE]...",
            help="A wheel, a folder, or REPOSITORY@REVISION of a git repository (a bare one will do).",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, output_file("--markdown", "Write the tables as a Markdown page.")
    ] = None,
    json: Json = False,
) -> None:
    """Say whether the patches fit a release or checkout of a framework, by its code.

    Without a source, list the patches and check the frameworks of this environment. Neither the frameworks
    nor torch need be installed; nothing of them is imported.

    Exit codes:

    - 0: everything fits or needs no patch
    - 1: a function is missing, drifted, or cannot be checked. Patches outside of the default set count where
      the variable selects them
    - 2: a source cannot be read, or there is no framework in any of them, or in this environment
    """
    choice, patches = choice_of(), registry.patches().values()
    opened = [open_source(source) for source in sources] if sources else [Environment()]
    twice = [name for name, count in Counter(source.name for source in opened).items() if count > 1]
    if twice:
        raise MegatronRLPatchesError(f"more than one source is called {twice[0]!r}; name them: NAME=SOURCE")
    judged = {source.name: judge_all(source, patches, choice.settings) for source in opened}
    for patch in () if sources or json else patches:
        typer.echo(f"{patch.name} ({patch.selected_by}): {patch.summary}")
    empty = [name for name, statuses in judged.items() if all(s.state == "absent" for s in statuses)]
    if len(empty) == len(judged):
        raise MegatronRLPatchesError(
            f"no framework that a patch knows is in {', '.join(empty)}; pass the root of a checkout"
        )
    for name in empty:
        _complain(f"no framework that a patch knows is in {name}")
    if markdown:
        page = "\n".join([_INTRODUCTION, LEGEND, sections(judged)])
        markdown.write_text(page, encoding="utf-8")
    if json:
        show_json([{"source": source, **asdict(s)} for source, statuses in judged.items() for s in statuses])
    else:
        _show_judged(judged)
    relevant = {*registry.patches_of(registry.DEFAULT), *choice.patches}
    if any(s.is_fault and s.patch in relevant for statuses in judged.values() for s in statuses):
        raise typer.Exit(FOUND_FAULTS)


app.command()(estimate)


@app.command()
def demo(
    rollouts: Annotated[int, typer.Option(min=1, help="How often to sample, score and train.")] = 40,
    ranks: Annotated[
        int | None, typer.Option(min=1, show_default="2; 1 with --without-patches", help="Processes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the sampling.")] = 0,
    without_patches: Annotated[
        bool, typer.Option("--without-patches", help="Show the upstream error instead.")
    ] = False,
) -> None:
    """Train a small GPT on a checkable task with real Megatron-core, one train() call per rollout.

    Needs torch and megatron-core, and no GPU.
    """
    from ..demo import run_demo

    ranks = ranks or (1 if without_patches else 2)
    raise typer.Exit(run_demo(rollouts=rollouts, ranks=ranks, seed=seed, without_patches=without_patches))


def _complain(message: str) -> None:
    typer.echo(f"megatron-rl-patches: {message}", err=True)


# --- what `check` shows

_INTRODUCTION = """\
# Compatibility

Generated by `megatron-rl-patches check --markdown FILE NAME=SOURCE…`; do not edit.
"""
LEGEND = """\
The code of these sources was parsed, and not imported. Version numbers play no part.

- **fits**: the patch takes effect.
- **not needed**: this code has no bug to fix; the patch leaves it alone.
- **missing**, **drifted**, **failed**: the code is not what the patch was written for, or cannot be checked.
  The patch leaves this framework alone and says so; when you select it by name, that is an error.
"""


#: The status of every site in a source, by the name of the source.
Judged = Mapping[str, Sequence[SiteStatus]]


def _by_framework(judged: Judged) -> Iterator[tuple[str, Judged]]:
    """Yield each framework that is in a source, and its sites in the sources that contain it."""
    for framework in sorted({status.framework for statuses in judged.values() for status in statuses}):
        columns = {
            source: [s for s in statuses if s.framework == framework and s.state != "absent"]
            for source, statuses in judged.items()
        }
        if present := {source: statuses for source, statuses in columns.items() if statuses}:
            yield framework, present


def _verdicts(columns: Judged) -> dict[SiteStatus, list[str]]:
    """Return each verdict on a site once, with the sources for which it holds."""
    verdicts: dict[SiteStatus, list[str]] = {}
    for row in zip(*columns.values(), strict=True):
        for source, status in zip(columns, row, strict=True):
            reason = "" if status.state == "fits" else status.reason
            verdicts.setdefault(replace(status, reason=reason, fingerprint=""), []).append(source)
    return verdicts


def sections(judged: Judged) -> str:
    """Return one table per framework, with a row for each verdict."""
    parts = []
    for framework, columns in _by_framework(judged):
        rows, every_source = [], list(columns)
        for status, sources in _verdicts(columns).items():
            state = f"**{status.state}**" if status.is_fault else status.state
            verdict = f"{state}: {status.reason}" if status.reason else state
            where = "all" if sources == every_source else ", ".join(sources)
            rows.append((status.patch, f"`{status.target}`", verdict, where))
        table = markdown_table(("patch", "function", "result", "in"), rows)
        parts.append(f"## {framework}\n\nAll: {', '.join(every_source)}.\n\n{table}")
    return "\n".join(parts)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ([cell.replace("|", "\\|") for cell in cells] for cells in (header, ["---"] * len(header), *rows))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _show_judged(judged: Judged) -> None:
    for framework, columns in _by_framework(judged):
        typer.echo(framework)
        rows = [("patch", "function", *columns)]
        for row in zip(*columns.values(), strict=True):
            rows.append((row[0].patch, row[0].target, *(status.state for status in row)))
        show_table(rows)
        for status, sources in _verdicts(columns).items():
            if status.state != "fits":
                where = f"{status.patch}: {status.target} is {status.state} in {', '.join(sources)}"
                typer.echo(f"{where}: {status.reason}")
        typer.echo()
