"""The tests, the demo and the benchmarks of a machine with a GPU, in under ten minutes: ``make gpu``.

    python -m benchmarks.gpu [--dry] [--folder FOLDER] [--only STEP ...]

Each step is a process of its own with a time limit. If one fails, the others still run, the exit code is 1,
and ``gpu.json`` has the error. Without ``--dry`` there must be a GPU, and ``gpu.md`` and ``gpu.json`` are
written into docs/benchmarks. ``--dry`` runs every step at a small size on the CPU and writes into a temporary
folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from .page import join, left_out, machine, table

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = "gpu.md", "gpu.json"
TOTAL_SECONDS, _DRY_SECONDS = 570.0, 300.0
_STOPPING_SECONDS = 10.0
_ERROR_CHARACTERS = 6000


@dataclass(frozen=True)
class Step:
    """A step: its title, the function that it calls, as ``module:function``, and how long it may take.

    The limits leave room. All steps together are not given more than ``TOTAL_SECONDS``.
    """

    name: str
    title: str
    function: str
    seconds: float


_MODULE = "benchmarks.gpu_steps"
STEPS = (
    Step("tests", "Tests", f"{_MODULE}:tests", 150),
    Step("demo", "Demo", f"{_MODULE}:demo", 90),
    Step("losses", "Losses over logits", f"{_MODULE}:losses", 130),
    Step("head", "Output layer with its loss", f"{_MODULE}:head", 120),
    Step("topk", "Top-k", f"{_MODULE}:topk", 50),
    Step("memory", "Memory of an inference-only model", f"{_MODULE}:memory", 50),
    Step("hooks", "Added cost of a call", f"{_MODULE}:hooks", 40),
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
    folder = options.folder or (tempfile.mkdtemp(prefix="gpu-") if options.dry else ROOT / "docs/benchmarks")
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    return run(steps, options.dry, Path(folder))


def run(steps: Sequence[Step], dry: bool, folder: Path) -> int:
    """Run the steps, write their results, and return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "machine": machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "dry": dry,
        "steps": {},
    }
    print(report["machine"], flush=True)
    deadline = time.monotonic() + TOTAL_SECONDS
    # Measurements must not disturb each other. A dry run has none.
    with ThreadPoolExecutor(2 if dry else 1) as pool:
        for step, outcome in zip(
            steps, pool.map(lambda step: _outcome(step, dry, deadline), steps), strict=True
        ):
            report["steps"][step.name] = outcome
            # After each step, so that the figures survive if a later one takes the machine down.
            (folder / FIGURES).write_text(json.dumps(report, indent=1) + "\n")
            (folder / PAGE).write_text(render(steps, report))
            print(section(step, outcome), flush=True)
    failed = [name for name, outcome in report["steps"].items() if outcome["status"] != "ok"]
    print(f"written: {folder / PAGE}, {folder / FIGURES}")
    print(f"failed: {', '.join(failed)}" if failed else "all steps succeeded")
    return int(bool(failed))


def _outcome(step: Step, dry: bool, deadline: float) -> dict[str, Any]:
    """Run a step in a process of its own; return its status, its seconds, and its result or its error."""
    started = time.monotonic()
    # The small steps of a dry run take as long as their imports and compilers, on however busy a machine.
    limit = min(_DRY_SECONDS if dry else step.seconds, deadline - started)
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder, "log"), Path(folder, "result.json")
        code = _run(step, dry, limit, log, result)
        seconds = round(time.monotonic() - started, 1)
        if code == 0:
            return {"status": "ok", "seconds": seconds, "result": json.loads(result.read_text())}
        status = "failed" if code is not None else f"not done in {limit:.0f} s"
        output = log.read_text(errors="replace") if log.exists() else ""
        return {"status": status, "seconds": seconds, "error": output[-_ERROR_CHARACTERS:]}


def _run(step: Step, dry: bool, limit: float, log: Path, result: Path) -> int | None:
    """Return the exit code of the step, or ``None`` if it took longer than ``limit`` seconds."""
    if limit <= 0:
        return None
    command = [sys.executable, "-m", "benchmarks.gpu", "--step", step.function, str(result), str(int(dry))]
    with (
        log.open("w") as output,
        psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            return process.wait(limit)
        except psutil.TimeoutExpired:
            started = process.children(recursive=True)  # also those in a session of their own
            process.send_signal(signal.SIGINT)  # so that the log shows where it was
            with suppress(psutil.TimeoutExpired):
                process.wait(_STOPPING_SECONDS)
            for remaining in [process, *started]:
                with suppress(psutil.NoSuchProcess):
                    remaining.kill()
            return None


def _step(function: str, file: str, dry: str) -> None:
    """Call the function of a step, in its own process."""
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(bool(int(dry)))
    Path(file).write_text(json.dumps(asdict(result)))


def render(steps: Sequence[Step], report: dict[str, Any]) -> str:
    """Return the page."""
    dry = "**A dry run on the CPU at small sizes: these are no measurements.**" if report["dry"] else ""
    outcomes = report["steps"]
    sections = [section(step, outcomes[step.name]) for step in steps if step.name in outcomes]
    run_on = f"`make gpu`: {report['machine']}, CUDA {report['cuda']}."
    return join("# On a GPU", run_on, dry, EXPLANATION, *sections) + "\n"


EXPLANATION = """\
- ms: median of calls that take turns, by CUDA events.
- Peak: of the CUDA allocator beyond what was allocated before the call, without the gradients of
  hidden states and weight of an output layer.
- Kernels: how many a call starts, and the three that take the longest, by torch's profiler.
- Copy: the bytes that any way to the same results reads and writes, per second, relative to what
  a copy on the device reads and writes."""


def section(step: Step, outcome: dict[str, Any]) -> str:
    head = join(f"## {step.title}", f"{outcome['status']}, {outcome['seconds']} s")
    if "result" not in outcome:
        return join(head, f"```text\n{outcome['error'].strip()}\n```")
    result = outcome["result"]
    return join(
        head,
        "\n".join(f"- {name}: {value}" for name, value in result["figures"].items()),
        table(result["claims"]),
        table(result["table"]),
        *(
            table({case: way, **_cells(cost)} for way, cost in costs.items())
            for case, costs in result["costs"].items()
        ),
        left_out(result["left_out"]),
    )


def _cells(cost: dict[str, Any]) -> dict[str, str]:
    longest = ", ".join(f"`{name}` {ms:.2f}" for name, ms in cost["longest"].items())
    return {
        "ms": f"{cost['milliseconds']:.3g}",
        "peak (GiB)": f"{cost['peak_bytes'] / (1 << 30):.3f}",
        "kernels": str(cost["kernels"]),
        "copy": f"{cost['share_of_copy']:.0%}" if cost["share_of_copy"] else "",
        "longest kernels (ms)": longest.replace("|", "\\|"),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        _step(*sys.argv[2:])
    else:
        sys.exit(main())
