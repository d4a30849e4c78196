"""The tests, the demo and the benchmarks of a machine with a GPU, in under ten minutes: ``make gpu``.

    python -m benchmarks.gpu [--dry] [--folder FOLDER] [--only STEP ...]

Each step is a process of its own with a time limit. If one fails, the others still run, the exit code is 1,
``gpu.json`` has its traceback, and the last line is the command that runs again what failed. Without
``--dry`` there must be a GPU, and ``gpu.md`` and ``gpu.json`` are written into docs/benchmarks. ``--dry``
runs every step at a small size on the CPU and writes into a temporary folder. ``--only`` runs some steps,
and leaves in the folder what the others wrote there before.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from .page import join, left_out, machine, number, table

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = "gpu.md", "gpu.json"
# The small steps of a dry run take as long as their imports and compilers, on however busy a machine.
_DRY_SECONDS = 300
_STOPPING_SECONDS = 5
_LOG_CHARACTERS = 20_000


@dataclass(frozen=True)
class Step:
    """A step, which is a function of the module; and how long it may take."""

    name: str
    title: str
    seconds: int
    module: str = "benchmarks.gpu_steps"


STEPS = (
    Step("tests", "Tests", 140),
    Step("demo", "Demo", 80),
    Step("losses", "Losses over logits", 100),
    Step("head", "Output layer with its loss", 120),
    Step("topk", "Top-k", 50),
    Step("memory", "Memory of an inference-only model", 50),
    Step("hooks", "Added cost of a call", 40),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU")
    parser.add_argument("--folder", type=Path, help=f"where {PAGE} and {FIGURES} are written")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], metavar="STEP")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GPU_DRY_RUN": "1"}
    elif not torch.cuda.is_available():
        parser.error("torch sees no GPU: make gpu DRY=1 runs the same at a small size on the CPU")
    if options.dry and not options.folder:
        options.folder = Path(tempfile.mkdtemp(prefix="gpu-"))
    steps = [step for step in STEPS if step.name in (options.only or step.name)]
    failed = run(steps, options.dry, options.folder or ROOT / "docs/benchmarks", keep=bool(options.only))
    if failed:
        again = ["--only", *failed, *(("--folder", str(options.folder)) if options.folder else ())]
        command = ["make", "gpu", *["DRY=1"] * options.dry, f"GPU_ARGS={shlex.join(again)}"]
        print(f"failed: {', '.join(failed)}; to run them again: {shlex.join(command)}")
    return int(bool(failed))


def run(steps: Sequence[Step], dry: bool, folder: Path, keep: bool = False) -> list[str]:
    """Run the steps, write their results, and return the names of those that failed.

    Args:
        keep: whether outcomes of other steps that the folder has stay there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page, figures = folder / PAGE, folder / FIGURES
    outcomes = json.loads(figures.read_text())["steps"] if keep and figures.exists() else {}
    for step in steps:
        outcomes[step.name] = _outcome(step, dry)
        # After each step, so that the figures survive if a later one takes the machine down.
        figures.write_text(json.dumps({"steps": outcomes}, indent=1) + "\n")
        page.write_text(join(EXPLANATION, *map(section, outcomes.values())) + "\n")
        print(section(outcomes[step.name]), flush=True)
    print(f"written: {page}, {figures}")
    return [name for name, outcome in outcomes.items() if outcome["status"] != "ok"]


def _outcome(step: Step, dry: bool) -> dict[str, Any]:
    """Run a step in a process of its own; return what became of it, with its result or its traceback."""
    note = "a dry run at a small size, no measurement" if dry else f"CUDA {torch.version.cuda}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder, "log"), Path(folder, "outcome.json")
        command = [sys.executable, "-m", "benchmarks.gpu", "--step", step.module, step.name, str(file)]
        status = _run(command, _DRY_SECONDS if dry else step.seconds, log)
        outcome: dict[str, Any] = {"title": step.title, "status": status, "machine": f"{machine()}, {note}"}
        outcome["seconds"] = round(time.monotonic() - started, 1)
        if status != "ok":
            outcome["traceback"] = "none: the process died"
            outcome["log"] = log.read_text(errors="replace")[-_LOG_CHARACTERS:]
        return outcome | (json.loads(file.read_text()) if file.exists() else {})


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


def _step(module: str, name: str, file: str) -> int:
    """Call the function of a step in this process; write its result or traceback; return the exit code."""
    try:
        result = getattr(importlib.import_module(module), name)()
        outcome: dict[str, Any] = {"result": asdict(result)}
    except BaseException:  # also the KeyboardInterrupt of a step that takes too long
        outcome = {"traceback": traceback.format_exc()}
    Path(file).write_text(json.dumps(outcome))
    return int("traceback" in outcome)


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
    head = join(f"## {outcome['title']}", status)
    if "result" not in outcome:
        texts = filter(None, (outcome[name].strip() for name in ("log", "traceback")))
        return join(head, *(f"```text\n{text}\n```" for text in texts))
    result = outcome["result"]
    return join(
        head,
        "\n".join(f"- {name}: {value}" for name, value in result["figures"].items()),
        table(result["claims"]),
        *(table(_rows(case, costs, result["units"][case])) for case, costs in result["costs"].items()),
        left_out(result["left_out"]),
    )


def _rows(case: str, costs: Mapping[str, Any], unit: str) -> Iterator[dict[str, str]]:
    of_unit = costs.get(unit, {"milliseconds": math.nan})["milliseconds"]
    for way, cost in costs.items():
        longest = ", ".join(f"`{name}` {ms:.2f}" for name, ms in cost["longest"].items())
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
    sys.exit(_step(*sys.argv[2:]))
