"""The benchmarks, the tests and the demo of a machine with a GPU: ``make gpu``, in two commands.

    python -m benchmarks.gpu [--dry] [--folder FOLDER] [--second | --only STEP ...]

The first command measures what matters most, and ``--second`` the rest; each takes ten minutes at most. Each
step is a process of its own with a time limit. Its results are in ``gpu.json`` as soon as they are measured,
so that they stay when a process dies. If a step fails, the others still run, the exit code is 1, ``gpu.json``
has its log, and the last line is the command that runs again what failed. Without ``--dry`` there must
be a GPU, and ``gpu.md`` and ``gpu.json`` are written into docs/benchmarks. ``--dry`` runs the same steps at
a small size on the CPU and writes into a temporary folder. ``--only`` runs some steps. It and ``--second``
leave in the folder what other steps wrote there before.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from .page import Outcome, join, machine, number, table

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = "gpu.md", "gpu.json"
# The small steps of a dry run take as long as their imports and compilers, on however busy a machine.
_DRY_SECONDS = 300
_STOPPING_SECONDS = 5
_LOG_CHARACTERS = 20_000
_LONGEST = 3


@dataclass(frozen=True)
class Step:
    """A step, which is a function of the module; and how long it may take."""

    name: str
    title: str
    seconds: int
    module: str = "benchmarks.gpu_steps"


#: The steps of the first command and of the second one.
FIRST = (
    Step("card", "The card", 60),
    Step("head", "Output layer with its loss", 200),
    Step("losses", "Losses over logits", 90),
    Step("tests", "Tests", 190),
)
SECOND = (
    Step("counters", "Counters of the row passes", 90),
    Step("topk", "Top-k", 50),
    Step("demo", "Demo", 80),
    Step("memory", "Memory of an inference-only model", 90),
    Step("hooks", "Added cost of a call", 40),
)
STEPS = FIRST + SECOND


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--folder", type=Path, help=f"where {PAGE} and {FIGURES} are written")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--second", action="store_true", help="the steps of the second command")
    chosen.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GPU_DRY_RUN": "1"}
    elif not torch.cuda.is_available():
        parser.error("torch sees no GPU: make gpu DRY=1 runs the same at a small size on the CPU")
    folder = options.folder or (
        Path(tempfile.mkdtemp(prefix="gpu-")) if options.dry else ROOT / "docs/benchmarks"
    )
    steps = [step for step in STEPS if step.name in (options.only or ())]
    is_first = not (steps or options.second)
    failed = run(steps or (FIRST if is_first else SECOND), options.dry, folder, keep=not is_first)

    def command(*names: str) -> str:
        shown = [*names, *(("--folder", str(folder)) if options.folder or options.dry else ())]
        return shlex.join(["make", "gpu", *["DRY=1"] * options.dry, f"GPU_ARGS={shlex.join(shown)}"])

    if is_first:
        print(f"next: {command('--second')}")
    if failed:
        print(f"failed: {', '.join(failed)}; to run them again: {command('--only', *failed)}")
    return int(bool(failed))


def run(steps: Sequence[Step], dry: bool, folder: Path, keep: bool = False) -> list[str]:
    """Run the steps, write their results, and return the names of those that failed.

    Args:
        keep: whether outcomes of other steps that the folder has stay there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, figures = folder / PAGE, folder / FIGURES
    if not keep:
        figures.unlink(missing_ok=True)
    for step in steps:
        outcome = Outcome(figures, step.name)
        _run_step(step, dry, outcome)
        outcomes = outcome.of_all_steps()
        page.write_text(join(EXPLANATION, *map(section, outcomes.values())) + "\n")
        print(section(outcomes[step.name]), flush=True)
    print(f"written: {page}, {figures}")
    return [name for name, outcome in outcomes.items() if outcome["status"] != "ok"]


def _run_step(step: Step, dry: bool, outcome: Outcome) -> None:
    """Run a step in a process of its own, which saves its results; write how it ended."""
    note = "a dry run at a small size, no measurement" if dry else f"CUDA {torch.version.cuda}"
    outcome.begin(title=step.title, status="not ended", seconds=0.0, machine=f"{machine()}, {note}")
    started, log = time.monotonic(), outcome.figures.with_name(f"{step.name}.log")
    own = ["--step", step.module, step.name, str(outcome.figures)]
    command = [sys.executable, "-m", "benchmarks.gpu", *own]
    status = _run(command, _DRY_SECONDS if dry else step.seconds, log)
    outcome.update(status=status, seconds=round(time.monotonic() - started, 1))
    if status != "ok":
        outcome.update(log=log.read_text(errors="replace")[-_LOG_CHARACTERS:])
    log.unlink()


def _run(command: Sequence[str], seconds: float, log: Path) -> str:
    """Run a command, which is stopped before so many seconds are over; return how it ended."""
    with log.open("w") as output:
        process = psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        return "failed" if process.wait(seconds - 2 * _STOPPING_SECONDS) else "ok"
    except psutil.TimeoutExpired:
        running = [*process.children(recursive=True), process]  # also those in a session of their own
    # SIGINT, so that log and traceback show where each of them was.
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        for each in running:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal_number)
        with suppress(psutil.TimeoutExpired):
            process.wait(_STOPPING_SECONDS)
    return f"not done in {seconds} s"


EXPLANATION = """\
# On a GPU

`make gpu` measured, with each step on the machine that its section names:

- ms: median of calls that take turns, by CUDA events; × is that in the time of another way.
- Peak: of the CUDA allocator beyond what was allocated before the call, without the gradients of
  hidden states and weight of an output layer.
- Kernels: how many a call starts, and the three that take the longest, by torch's profiler.
- Copy: the bytes that any way to the same results reads and writes, per second, relative to what
  a copy on the device reads and writes.
- Measured / peer: peers were measured in the same run, except for what their authors published."""


def section(outcome: Mapping[str, Any]) -> str:
    status = f"{outcome['status']}, {outcome['seconds']} s; {outcome['machine']}"
    texts = {"log": outcome.get("log", "")}
    measured = []
    if result := outcome.get("result"):
        texts |= result["texts"]
        measured = [
            "\n".join(f"- {name}: {value}" for name, value in result["figures"].items()),
            table(result["claims"]),
            *(table(_rows(case, costs, result["units"][case])) for case, costs in result["costs"].items()),
            table({"left out": name, "why": why} for name, why in result["left_out"].items()),
        ]
    blocks = [f"```text\n{text.strip()}\n```" for text in texts.values() if text.strip()]
    return join(f"## {outcome['title']}", status, *measured, *blocks)


def _rows(case: str, costs: Mapping[str, Any], unit: str) -> Iterator[dict[str, str]]:
    of_unit = costs.get(unit, {"milliseconds": math.nan})["milliseconds"]
    for way, cost in costs.items():
        by_kernel = sorted(cost["by_kernel"].items(), key=lambda pair: -pair[1][1])
        longest = ", ".join(f"`{name[:70]}` {ms:.2f}" for name, (_, ms) in by_kernel[:_LONGEST])
        yield {
            case: way,
            "ms": f"{cost['milliseconds']:.3g}",
            f"× {unit}": number(cost["milliseconds"] / of_unit, ".2f"),
            "peak (GiB)": f"{cost['peak_bytes'] / (1 << 30):.3f}",
            "kernels": str(cost["kernels"]),
            "copy": f"{cost['share_of_copy']:.0%}" if cost["share_of_copy"] else "",
            "longest kernels (ms)": longest.replace("|", "\\|"),
        }


if __name__ == "__main__":
    # A process in the background may have been started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] != ["--step"]:
        sys.exit(main())
    # The log shows where a process was that does not return to Python.
    faulthandler.enable()
    faulthandler.register(signal.SIGINT, chain=True)
    module, name, file = sys.argv[2:]
    getattr(importlib.import_module(module), name)(Outcome(Path(file), name).save)
