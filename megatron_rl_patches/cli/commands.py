"""The commands. Each gathers facts elsewhere, shows them, and turns them into an exit code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..common.scopes import replaced
from ..doctor import OUT_OF_REACH, choice_of, examine
from ..engine import registry
from ..engine.judge import judge_all
from ..engine.sources import Environment, open_source
from ..errors import MegatronRLPatchesError
from .estimate import check_writable, estimate
from .screens import Screen, page_of, show_diagnosis, show_json, show_judged

app = typer.Typer(
    help="Run-time patches that make Megatron-core, and RL frameworks on top of it, re-enterable and lean.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich cuts off the names of options where a terminal is narrow, and draws boxes into pipes.
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
_PAGE = typer.Option(metavar="FILE", callback=check_writable, help="Write the tables as a Markdown page.")
_SOURCES = "A wheel, a folder, or REPOSITORY@REVISION of a git repository (a bare one will do)."


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script and of ``python -m megatron_rl_patches``."""
    try:
        app(arguments, prog_name="megatron-rl-patches")
    except (MegatronRLPatchesError, OSError) as error:
        _complain(str(error))
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        typer.echo(f"megatron-rl-patches {__version__}")
        raise typer.Exit


@app.command()
def doctor(
    command: Annotated[str, typer.Option(metavar="TEXT", help="Examine a job's command line, too.")] = "",
    json: Json = False,
) -> None:
    """Find out why patches do not take effect in this environment.

    Starts one child process to see whether the startup file fires. Imports no framework.

    Exit code 0: everything that is selected can take effect, or nothing is selected.

    Exit code 1: something cannot. A function is missing, drifted, in conflict or failed; the startup file
    does not fire; a variable has a bad value; or wrapt is absent or out of range.
    """
    # A program finds what is in its own folder, where most people call this command, too.
    with replaced(sys, path=[*sys.path, ""]):
        diagnosis = examine(command=command)
    if json:
        show_json({**asdict(diagnosis), "out_of_reach": OUT_OF_REACH})
    else:
        show_diagnosis(diagnosis, Screen())
    if diagnosis.problems:
        raise typer.Exit(1)


@app.command()
def check(
    sources: Annotated[list[str] | None, typer.Argument(metavar="[NAME=]SOURCE", help=_SOURCES)] = None,
    markdown: Annotated[Path | None, _PAGE] = None,
    json: Json = False,
) -> None:
    """Say whether the patches fit a release or checkout, by its code.

    Without a source, list the patches and check the frameworks of this environment. Neither the frameworks
    nor torch need be installed; nothing of them is imported.

    Exit code 0: everything fits or needs no patch.

    Exit code 1: a function is missing, drifted, or failed. Patches outside of the default set
    count where the variable selects them.

    Exit code 2: a source cannot be read, or there is no framework in any of them, or in this environment.
    """
    choice, patches = choice_of(), registry.patches().values()
    opened = [open_source(source) for source in sources] if sources else [Environment()]
    (name, count), *_ = Counter(source.name for source in opened).most_common(1)
    if count > 1:
        raise MegatronRLPatchesError(f"more than one source is called {name!r}; name them: NAME=SOURCE")
    judged = {source.name: judge_all(source, patches, choice.settings) for source in opened}
    screen = Screen()
    for patch in () if sources or json else patches:
        screen.line(f"{patch.name} ({patch.selected_by}): {patch.summary}")
    if empty := [name for name, statuses in judged.items() if all(s.state == "absent" for s in statuses)]:
        message = f"no framework that a patch knows is in {', '.join(empty)}"
        if len(empty) == len(judged):
            raise MegatronRLPatchesError(f"{message}; pass the root of a checkout")
        _complain(message)
    if markdown:
        markdown.write_text(page_of(judged), encoding="utf-8")
    if json:
        show_json([{"source": source, **asdict(s)} for source, statuses in judged.items() for s in statuses])
    else:
        show_judged(judged, screen)
    relevant = {*registry.patches_of(registry.DEFAULT), *choice.patches}
    if any(s.is_fault and s.patch in relevant for statuses in judged.values() for s in statuses):
        raise typer.Exit(1)


app.command()(estimate)


@app.command()
def demo(
    rollouts: Annotated[int, typer.Option(min=2, help="How often to sample, score and train.")] = 30,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the weights and of the sampling.")] = 0,
) -> None:
    """Train a small GPT with real Megatron-core, without the patches until it fails, then with them.

    One train() call per rollout. Needs torch and megatron-core, and no GPU.
    """
    from ..demo import run_demo

    raise typer.Exit(run_demo(rollouts=rollouts, ranks=ranks, seed=seed))


def _complain(message: str) -> None:
    Screen(Console(stderr=True)).line(f"megatron-rl-patches: {message}")
