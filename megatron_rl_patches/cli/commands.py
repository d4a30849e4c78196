"""The commands. Each gathers facts elsewhere, shows them, and turns them into an exit code."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..doctor import OUT_OF_REACH, choice_of, examine, find_startup_file
from ..engine import registry
from ..engine.judge import judge_all
from ..engine.settings import STRICT_VARIABLE, VARIABLE, parse_selection
from ..engine.sources import Environment, open_source
from ..errors import MegatronRLPatchesError
from .compatibility import Judged, as_json, as_markdown
from .conformance import conformance
from .estimate import estimate
from .output import check_plot, output_file, show_json, show_judged, show_table
from .screens import show_diagnosis, show_problems, show_status

FOUND_FAULTS = 1
CANNOT_START = 2
NOT_EXECUTABLE = 126
NOT_FOUND = 127

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


@app.command("list")
def list_patches(json: Json = False) -> None:
    """List the patches: what each one does, and the functions that it wraps.

    Exit code: 0.
    """
    settings = choice_of().settings
    patches = registry.patches().values()
    listed = []
    for patch in patches:
        chosen = patch.sites_for(settings.options_of(patch))
        sites = [{"framework": site.framework, "target": site.target} for site in chosen]
        facts = {name: getattr(patch, name) for name in ("name", "summary", "upstream", "explicit")}
        listed.append({**facts, "sites": sites})
        if not json:
            explicit = f" (not among `all`: {VARIABLE}={patch.name})" if patch.explicit else ""
            typer.echo(f"{patch.name}{explicit}: {patch.summary}")
            typer.echo(f"upstream: {', '.join(patch.upstream) or 'none'}")
            show_table(("framework", "site"), [tuple(site.values()) for site in sites])
    if json:
        show_json(listed)


@app.command()
def status(json: Json = False) -> None:
    """Show which patches the environment variables select, and whether they fit the installed frameworks.

    The frameworks are judged by their source; nothing is imported.

    Exit code: 0, whatever the states are. `doctor` turns problems into an exit code.
    """
    choice = choice_of()
    patches = [registry.patches()[name] for name in choice.patches]
    statuses = judge_all(Environment(), patches, choice.settings)
    if json:
        sites = [asdict(status) for status in statuses]
        problems = [asdict(problem) for problem in choice.problems]
        show_json({"selected": choice.patches, "problems": problems, "sites": sites})
        return
    show_status(os.environ.get(VARIABLE), choice, statuses)
    if choice.problems:
        show_problems(choice.problems, Console(stderr=True, highlight=False))


@app.command()
def doctor(json: Json = False) -> None:
    """Find out why patches do not take effect in this environment.

    Starts one child process to see whether the startup file fires. Imports no framework.

    Exit codes:

    - 0: everything that is selected can take effect, or nothing is selected
    - 1: something cannot. A site of an installed framework is missing, drifted, in conflict or cannot be
      judged; the variable is set, but the startup file does not fire; a variable has a bad value; or wrapt
      is absent or out of range
    """
    diagnosis = examine()
    if json:
        show_json({**asdict(diagnosis), "out_of_reach": OUT_OF_REACH})
    else:
        show_diagnosis(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(FOUND_FAULTS)


@app.command()
def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]SOURCE...",
            help="A wheel, a folder, or REPOSITORY@REVISION of a git repository (a bare one will do).",
        ),
    ],
    markdown: Annotated[
        Path | None, output_file("--markdown", "Write the tables as a Markdown page.")
    ] = None,
    json: Json = False,
) -> None:
    """Say whether the patches fit a release or checkout of a framework, judged by its code.

    Neither the frameworks nor torch need be installed; nothing of them is imported.

    Exit codes:

    - 0: everything fits or needs no patch
    - 1: some site is missing, drifted, or cannot be judged
    - 2: a source cannot be read, or none of them contains a framework
    """
    judged = _judge(sources)
    if markdown:
        markdown.write_text(as_markdown(judged), encoding="utf-8")
    if json:
        show_json(as_json(judged))
    else:
        show_judged(judged)
    if any(status.is_fault for one in judged for status in one.statuses):
        raise typer.Exit(FOUND_FAULTS)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to execute.")],
    patches: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Value for {VARIABLE}; by default the one that is set, or 1 where that is off.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A patch that cannot take effect is an error, not a warning.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="First write the variables and the command to stderr, as JSON.")
    ] = False,
) -> None:
    """Execute a command with the patches switched on in it and in its child processes.

    Exit codes: those of the command, and

    - 2: `--patches` names a patch that does not exist
    - 126: the command cannot be executed
    - 127: the command is not found
    """
    known = registry.patches()
    if unknown := parse_selection(patches or "", known).unknown:
        raise MegatronRLPatchesError(registry.unknown_names(unknown))
    chosen = os.environ.get(VARIABLE, "")
    variables = {VARIABLE: patches or (chosen if parse_selection(chosen, known) else "1")}
    if strict:
        variables[STRICT_VARIABLE] = "1"
    if json:
        typer.echo(jsonlib.dumps({"variables": variables, "command": command}), err=True)
    if find_startup_file()[0] is None:
        _complain(
            "no startup file in this environment, so the variable may do nothing; "
            "see `megatron-rl-patches doctor`"
        )
    _execute(command, {**os.environ, **variables})


app.command()(estimate)
app.command()(conformance)


@app.command()
def demo(
    rollouts: Annotated[int, typer.Option(min=1, help="How often to sample, score and train.")] = 60,
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the weights and of the sampling.")] = 0,
    tensor_model_parallel_size: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    pipeline_model_parallel_size: Annotated[int, typer.Option(help="Ranks that share the layers.")] = 1,
    json_file: Annotated[Path | None, output_file("--json", "Write the figures of the run.")] = None,
    plot_file: Annotated[
        Path | None, output_file("--plot", "Draw learning curves and memory.", check_plot)
    ] = None,
    distill: Annotated[
        bool, typer.Option("--distill", help="Distill two teachers into a student, without a reward.")
    ] = False,
    without_patches: Annotated[
        bool, typer.Option("--without-patches", help="Show the upstream error instead.")
    ] = False,
    without_lean_head: Annotated[
        bool, typer.Option("--without-lean-head", help="Make the logits, with all other patches.")
    ] = False,
) -> None:
    """Train a small GPT on a checkable task with real Megatron-core, one train() call per rollout.

    Needs the extra `demo`, torch and megatron-core.
    """
    from ..demo import run_demo

    raise typer.Exit(
        run_demo(
            rollouts=rollouts,
            ranks=ranks,
            seed=seed,
            tensor_parallel_size=tensor_model_parallel_size,
            pipeline_parallel_size=pipeline_model_parallel_size,
            distill=distill,
            json_file=json_file,
            plot_file=plot_file,
            without_patches=without_patches,
            without_lean_head=without_lean_head,
        )
    )


def _judge(sources: Sequence[str]) -> list[Judged]:
    settings = choice_of().settings
    patches = registry.patches().values()
    opened = [open_source(source) for source in sources]
    twice = [name for name, count in Counter(source.name for source in opened).items() if count > 1]
    if twice:
        raise MegatronRLPatchesError(f"more than one source is called {twice[0]!r}; name them: NAME=SOURCE")
    judged = [Judged(source.name, judge_all(source, patches, settings)) for source in opened]
    empty = [one.source for one in judged if all(status.state == "absent" for status in one.statuses)]
    if len(empty) == len(judged):
        raise MegatronRLPatchesError(f"no framework that a patch knows is in {', '.join(empty)}")
    for name in empty:
        _complain(f"no framework that a patch knows is in {name}")
    return judged


def _execute(command: Sequence[str], environ: dict[str, str]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), environ)
    except (FileNotFoundError, ValueError):  # the latter for an empty name
        _complain(f"command not found: {shlex.quote(command[0])}")
        raise typer.Exit(NOT_FOUND) from None
    except OSError as error:
        _complain(f"{shlex.join(command)}: {error.strerror}")
        raise typer.Exit(NOT_EXECUTABLE) from None


def _complain(message: str) -> None:
    typer.echo(f"megatron-rl-patches: {message}", err=True)
