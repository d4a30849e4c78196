"""The steps of ``make gpu``: tests, demo and benchmarks, each for a process of its own.

Each step takes whether the run is dry, which makes everything small, and returns a :class:`StepResult`. It
raises if the step failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from megatron_rl_patches.testing import spawn_ranks
from tests.real import memory_cases
from tests.real.one_device import gpu_or_cpu

from . import head as output_layer
from . import inference_memory, overhead
from . import loss as logits_loss
from . import topk as logits_topk
from .candidates import calls
from .head import DEFERRED
from .logits import LogitsSetup
from .measure import COPY, DEVICE, ON_GPU, Call, Cost, Result, kernels
from .page import met

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
# Megatron asks for it where communication overlaps with computation. A rank with variables is not forked.
RANK_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
VOCABULARY = 151936
PRODUCTS = "matrix products alone"
MAX_TURNS = 50
HEAD_MILLISECONDS, HEAD_GIB = {"all rows": 65, "half of the rows": 33}, 1.2


@dataclass(frozen=True)
class GpuCost(Cost):
    """What a call costs on a GPU.

    Attributes:
        kernels: how many kernels (on the CPU, operators) it starts.
        longest: those that take most time together, with their milliseconds.
        share_of_copy: the least bytes per second, over the bytes per second that a copy reads and writes.
    """

    kernels: int = 0
    longest: dict[str, float] = field(default_factory=dict)
    share_of_copy: float = 0.0


@dataclass
class StepResult(Result):
    """What a step measured; the page shows all of it.

    Attributes:
        costs: :class:`GpuCost` by case and way.
        table: rows of a table of its own.
        claims: rows that say what is claimed, the measured value, the limit, and whether it is met.
        figures: numbers without a table, by name.
    """

    table: list[dict[str, str]] = field(default_factory=list)
    claims: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def claim(self, what: str, measured: str, limit: str, is_met: bool) -> None:
        self.claims.append({"claim": what, "measured": measured, "limit": limit, "met": met(is_met)})

    def compare(self, case: str, calls: Mapping[str, Call], seconds: float) -> None:
        """Measure calls that take turns with a copy; their errors are left to the benchmarks on the CPU."""
        size = GIB if ON_GPU else 1 << 24
        source, target = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        ready = {COPY: Call(lambda _: target.copy_(source), least_bytes=2 * size)}
        ready |= {name: replace(call, details=tuple) for name, call in calls.items()}
        self.measure(case, ready, turns=MAX_TURNS, seconds=seconds)
        copied = 2 * size / self.costs[case][COPY].milliseconds
        for name, cost in self.costs[case].items():
            number, longest = kernels(ready[name])
            share_of_copy = ready[name].least_bytes / cost.milliseconds / copied
            self.costs[case][name] = GpuCost(
                cost.milliseconds, cost.peak_bytes, (), number, longest, share_of_copy
            )


def tests(dry: bool) -> StepResult:
    """Run all tests that are marked ``gpu``; without the folder, files without the mark would be imported."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Of the machine's own plugins some refuse this suite's settings.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout")
        _run("-m", "pytest", *options, f"--junitxml={report}", "tests/gpu")
        [suite] = ElementTree.parse(report).getroot()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    if counts["skipped"] or not counts["tests"]:
        raise RuntimeError(f"expected that all tests marked gpu run: {counts}")
    return StepResult(figures=counts)


def demo(dry: bool) -> StepResult:
    """Run the demo on one rank, which has the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "demo.json")
        rollouts = "1" if dry else "12"
        _run(
            *("-m", "megatron_rl_patches", "demo", "--ranks", "1", "--rollouts", rollouts),
            *("--json", str(figures)),
        )
        measured = json.loads(figures.read_text())
    expected = "nccl" if ON_GPU else "gloo"
    if measured["backend"] != expected:
        raise RuntimeError(f"the demo ran on {measured['backend']}, expected {expected}")
    names = ("backend", "steps", "seconds", "reward_per_rollout")
    return StepResult(figures={name: measured[name] for name in names})


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)


def losses(dry: bool) -> StepResult:
    rows, vocabulary, seconds = (128, 8192, 0.1) if dry else (4096, VOCABULARY, 4.0)
    modes = (logits_loss.LOG_PROBS, logits_loss.ENTROPY_GRAD)
    setup, result = LogitsSetup(1, rows, vocabulary, torch.bfloat16), StepResult()
    with _group() as group:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        inputs = logits_loss.Inputs(setup, group)
        for mode in modes[-1:] if dry else modes:
            candidates = logits_loss.with_mode(mode)
            compared = calls(candidates, partial(inputs.both, mode), result.left_out)
            result.compare(f"{setup}, {mode}", compared, seconds)
    return result


def head(dry: bool) -> StepResult:
    rows, hidden, vocabulary = (128, 64, 4096) if dry else (8192, 4096, VOCABULARY)
    setup, result = output_layer.Setup(rows, hidden, vocabulary, torch.bfloat16), StepResult()
    for mode in output_layer.MODES:
        case, x = f"{setup}, {mode}", output_layer.inputs_of(setup, mode)
        compared = calls(output_layer.ON_GPUS, partial(output_layer.call, x), result.left_out)
        products = replace(compared[DEFERRED], run=partial(_products, x), results_bytes=0)
        result.compare(case, {PRODUCTS: products, **compared}, 0.1 if dry else 6.0)
        cost, most = result.cost(case, DEFERRED), HEAD_MILLISECONDS.get(mode)
        if cost and most and not dry:
            what, ms, gib = f"deferred, {mode}", cost.milliseconds, cost.peak_bytes / GIB
            result.claim(what, f"{ms:.1f} ms", f"<= {most} ms", ms <= most)
            result.claim(what, f"{gib:.2f} GiB", f"<= {HEAD_GIB} GiB", gib <= HEAD_GIB)
    return result


def _products(x: output_layer.Inputs, _: object) -> None:
    """Multiply as often as a loss that materializes the logits must, of the rows that it reads."""
    hidden, weight = x.used.detach(), x.weight.detach()
    logits = hidden @ weight.T
    if x.hidden.requires_grad:
        torch.mm(logits, weight)
    if x.weight.requires_grad:
        torch.mm(logits.T, hidden)


def topk(dry: bool) -> StepResult:
    rows, vocabulary, k, seconds = (64, 4096, 8, 0.1) if dry else (2048, VOCABULARY, 64, 3.0)
    setup, result = logits_topk.Setup(1, rows, vocabulary, torch.bfloat16, k), StepResult()
    with _group() as group:
        inputs = logits_topk.Inputs(setup, group)
        at_ids = calls(logits_topk.AT_IDS, inputs.at_ids, result.left_out)
        selections = calls(logits_topk.SELECTIONS, inputs.selection, result.left_out)
        result.compare(f"{setup}, at given ids", at_ids, seconds)
        result.compare(f"{setup}, selection", selections, seconds)
    return result


@contextmanager
def _group() -> Iterator[dist.ProcessGroup]:
    """Yield a process group that this process is alone in."""
    backend = "nccl" if ON_GPU else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def memory(dry: bool) -> StepResult:
    """Measure a model that trains and one that only scores, beside the estimate."""
    description = memory_cases.DENSE
    if not dry:
        description = replace(description, hidden_size=2048, ffn_hidden_size=6144, vocab_size=32000)
        description = replace(description, num_attention_heads=16, num_query_groups=8)
    cases = [
        replace(case, description=description)
        for case in inference_memory.CASES
        if case.name in ("bf16", "bf16, bf16 gradients", "bf16, bf16 gradients, distributed optimizer")
    ]
    cases = cases[-1:] if dry else cases
    measured = memory_cases.measure(cases, RANK_VARIABLES)
    result = StepResult()
    for case in cases:
        [account] = measured[case.name]
        [stage] = account.from_chunks.stages
        memory = inference_memory.Result(case.name, account, stage)
        allocated = {
            "CUDA allocator: training": f"{account.allocated_training:,}",
            "CUDA allocator: inference-only": f"{account.allocated_inference:,}",
        }
        result.table.append({"set-up": case.name, **inference_memory.compared(memory), **allocated})
        for use, (live, estimated) in memory.pairs().items():
            off = abs(live / estimated - 1)
            result.claim(f"estimate of {use}, {case.name}", f"{off:.2%} off", "<= 1%", off <= 0.01)
    [of_scoring] = spawn_ranks(_scoring, 1, cases[-1], 0.1 if dry else 2.0, env=RANK_VARIABLES)
    result.costs = of_scoring.costs
    return result


def _scoring(case: memory_cases.Case, seconds: float) -> StepResult:
    """Measure the forward pass of a model that only scores."""
    result, batch = StepResult(), 64
    with gpu_or_cpu() as device, torch.no_grad():
        memory_cases.initialize(case.parallel)
        [model] = memory_cases.inference_model(case, device)
        tokens = torch.ones(batch, memory_cases.SEQUENCE, dtype=torch.int64, device=device)
        positions = torch.arange(memory_cases.SEQUENCE, device=device).expand_as(tokens)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        forward = Call(lambda _: model(tokens, positions, None), least_bytes=weights)
        result.compare(f"inference-only, {batch} samples", {"forward": forward}, seconds)
    return result


def hooks(dry: bool) -> StepResult:
    """Measure what the patch adds to calls, and that it starts no kernels."""
    [result] = spawn_ranks(_hooks, 1, dry, timeout=100, env=RANK_VARIABLES)
    return cast(StepResult, result)


def _hooks(dry: bool) -> StepResult:
    result = StepResult()
    with overhead.patched():
        for case in overhead.cases(bf16=True):
            cost = overhead.compare(case, 3 if dry else 30)
            result.table.append(overhead.row(cost))
            if not dry:
                is_met = cost.added_us < cost.limit_us
                result.claim(cost.case, f"{cost.added_us:+.2f} µs", f"< {cost.limit_us:g} µs", is_met)
            bare, patched = (Call(partial(_without_argument, run)) for run in (case.bare, case.patched))
            result.compare(case.name, {"bare": bare, "patched": patched}, 0.1)
    return result


def _without_argument(run: Callable[[], None], _: object) -> None:
    run()
