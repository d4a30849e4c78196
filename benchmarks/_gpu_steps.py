"""The steps of ``make gpu``: tests, demo and benchmarks, each for a process of its own.

Each step takes whether the run is dry, which makes everything small, and returns a :class:`Result`. It raises
if the step failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_patches.testing import spawn_ranks
from tests.real import memory_cases
from tests.real.one_device import gpu_or_cpu

from . import _loss_candidates, _topk_candidates
from ._head_candidates import DEFERRED
from ._measure import Call, Cost, measure, why
from .bench_head import MODES, TEMPERATURE, WAYS, Inputs, Mode, Setup, Way, deferred, inputs_of, step
from .bench_inference_memory import BF16_GRADIENTS, PLAIN, PLAIN_BF16_GRADIENTS

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
# Megatron asks for it where communication overlaps with computation. A rank with variables is not forked.
RANK_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
VOCABULARY = 151936


@dataclass
class Result:
    """What a step found; the page shows all of it.

    Attributes:
        costs: case -> way -> cost.
        table: rows of a table of its own, the header first.
        claims: what is claimed, the measured value, the limit, and whether it is met.
        left_out: way -> why it was not measured.
        figures: numbers without a table, by name.
    """

    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    table: list[list[str]] = field(default_factory=list)
    claims: list[tuple[str, str, str, bool]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def measure(self, case: str, calls: dict[str, Call], seconds: float, device: torch.device) -> None:
        self.costs[case], left_out = measure(calls, seconds, device)
        self.left_out |= {f"{name}, {case}": reason for name, reason in left_out.items()}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# --- tests and demo


def tests(dry: bool) -> Result:
    """Run all tests that are marked ``gpu``. Files without the mark are not even imported."""
    files = sorted(
        str(path) for path in (ROOT / "tests").rglob("*.py") if "mark.gpu" in path.read_text(encoding="utf-8")
    )
    folders = sorted({str(Path(file).parent) for file in files})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Of the machine's own plugins some refuse this suite's settings.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout")
        _run("-m", "pytest", *options, f"--junitxml={report}", *folders)
        [suite] = ElementTree.parse(report).getroot()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    if counts["skipped"] or not counts["tests"]:
        raise RuntimeError(f"expected that all tests marked gpu run: {counts}")
    return Result(figures=counts)


def demo(dry: bool) -> Result:
    """Run the demo on one rank, which has the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "demo.json")
        rollouts = "1" if dry else "12"
        _run(
            *("-m", "megatron_rl_patches", "demo", "--ranks", "1", "--rollouts", rollouts),
            *("--json", str(figures)),
        )
        measured = json.loads(figures.read_text())
    expected = "nccl" if torch.cuda.is_available() else "gloo"
    if measured["backend"] != expected:
        raise RuntimeError(f"the demo ran on {measured['backend']}, expected {expected}")
    names = ("backend", "steps", "seconds", "reward_per_rollout")
    return Result(figures={name: measured[name] for name in names})


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)


# --- benchmarks


def losses(dry: bool) -> Result:
    rows, vocabulary, seconds = (128, 8192, 0.1) if dry else (4096, VOCABULARY, 4.0)
    device, result = _device(), Result()
    generator = torch.Generator(device).manual_seed(0)
    pristine = (2 * torch.randn(rows, vocabulary, generator=generator, device=device)).bfloat16()
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    weights = torch.randn(2, rows, generator=generator, device=device)
    one = torch.ones((), dtype=pristine.dtype, device=device, requires_grad=True)

    def gradient(loss: _loss_candidates.Loss, mode: str, logits: Tensor) -> Tensor:
        values = [value for value in loss(logits, targets, group, mode) if value.requires_grad]
        of_values = [weight.to(value.dtype) for weight, value in zip(weights, values, strict=False)]
        return torch.autograd.grad(values, logits, of_values)[0]

    with _group() as group:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        loaded = _loaded(_loss_candidates.CANDIDATES, result)
        modes = (_loss_candidates.LOG_PROBS, _loss_candidates.ENTROPY_GRAD)
        for mode in modes[-1:] if dry else modes:
            calls = {
                candidate.name: Call(
                    partial(gradient, loss, mode),
                    # Forward reads the logits. Backward reads them again and writes the gradient.
                    least_bytes=3 * pristine.nbytes,
                    # As a model hands them over: no leaf.
                    prepare=lambda: pristine * one,
                )
                for candidate, loss in loaded
                if mode in candidate.modes
            }
            result.measure(f"bfloat16 [{rows}, {vocabulary}], {mode}", calls, seconds, device)
    return result


def head(dry: bool) -> Result:
    setup = Setup(128, 64, 4096, torch.bfloat16) if dry else Setup(8192, 4096, VOCABULARY, torch.bfloat16)
    device, result = _device(), Result()
    ways = dict(WAYS)
    ways |= {
        f"deferred, tiles of {mib} MiB": partial(deferred, tile_bytes=mib << 20) for mib in OTHER_TILES_MIB
    }
    for name, load in OTHER_HEADS.items():
        try:
            ways[name] = load()
        except Exception as error:  # triton raises what it likes where there is no driver
            result.left_out[name] = why(error)
    for mode in MODES:
        x = inputs_of(setup, mode, device)
        read = sum(tensor.nbytes for tensor in (x.hidden, x.weight))
        gradients = sum(tensor.nbytes for tensor in (x.hidden, x.weight) if tensor.requires_grad)
        # Forward and backward read hidden states and weight, and backward writes their gradients.
        least_bytes = read * (1 + mode.trains) + gradients
        calls = {PRODUCTS: Call(partial(_products, x, mode), least_bytes)}
        calls |= {
            name: Call(partial(_step, way, x, mode), least_bytes, results_bytes=gradients)
            for name, way in ways.items()
        }
        result.measure(f"{setup}, {mode.name}", calls, 0.1 if dry else 6.0, device)
        cost = result.costs[f"{setup}, {mode.name}"].get(DEFERRED)
        if cost is not None and mode.name in HEAD_MILLISECONDS and not dry:
            limit = HEAD_MILLISECONDS[mode.name]
            milliseconds, gib = cost.milliseconds, cost.peak_bytes / GIB
            result.claims += [
                (f"deferred, {mode.name}", f"{milliseconds:.1f} ms", f"<= {limit} ms", milliseconds <= limit),
                (f"deferred, {mode.name}", f"{gib:.2f} GiB", f"<= {HEAD_GIB} GiB", gib <= HEAD_GIB),
            ]
    return result


OTHER_TILES_MIB = (128, 2048)
HEAD_MILLISECONDS, HEAD_GIB = {"all rows": 65, "half of the rows": 33}, 1.2
PRODUCTS = "matrix products alone"


def _step(way: Way, x: Inputs, mode: Mode, _: object) -> list[Tensor]:
    return step(way, x, mode)


def _products(x: Inputs, mode: Mode, _: object) -> None:
    """Multiply as often as a loss that makes the logits must, of the rows that it reads."""
    hidden, weight = _rows_of(x).detach(), x.weight.detach()
    logits = hidden @ weight.T
    if mode.trains_hidden:
        torch.mm(logits, weight)
    if mode.trains_weight:
        torch.mm(logits.T, hidden)


def _rows_of(x: Inputs) -> Tensor:
    return x.hidden if x.rows is None else x.hidden[x.rows]


def liger() -> Way:
    """Load a loss that weighs all tokens alike, without a temperature: it computes gradients in forward."""
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        LigerFusedLinearCrossEntropyFunction,
    )

    def way(x: Inputs) -> Tensor:
        options = (None, None, -100, 0.0, 0.0, "sum")
        loss = LigerFusedLinearCrossEntropyFunction.apply(_rows_of(x), x.weight, x.targets, *options)[0]
        return -loss.expand(len(x.targets))

    return way


def verl() -> Way:
    from verl.utils.kernel.linear_cross_entropy import (  # type: ignore[import-not-found, unused-ignore]
        linear_cross_entropy,
    )

    def way(x: Inputs) -> Tensor:
        log_probs = linear_cross_entropy(_rows_of(x), x.weight, x.targets, TEMPERATURE, "none", None)
        return cast(Tensor, log_probs[0])

    return way


OTHER_HEADS: dict[str, Callable[[], Way]] = {"Liger": liger, "verl's kernel": verl}


def topk(dry: bool) -> Result:
    rows, vocabulary, k, seconds = (64, 4096, 8, 0.1) if dry else (2048, VOCABULARY, 64, 3.0)
    device, result = _device(), Result()
    generator = torch.Generator(device).manual_seed(0)
    pristine = (2 * torch.randn(rows, vocabulary, generator=generator, device=device)).bfloat16()
    ids = torch.rand(rows, vocabulary, generator=generator, device=device).topk(k).indices
    one = torch.ones((), dtype=pristine.dtype, device=device, requires_grad=True)

    def gradient(at_ids: _topk_candidates.AtIds, logits: Tensor) -> Tensor:
        values = at_ids(logits, ids, group)
        return torch.autograd.grad([value.sum() for value in values], logits)[0]

    case = f"bfloat16 [{rows}, {vocabulary}], K = {k}"
    with _group() as group:
        calls = {
            candidate.name: Call(partial(gradient, at_ids), 3 * pristine.nbytes, lambda: pristine * one)
            for candidate, at_ids in _loaded(_topk_candidates.AT_IDS, result)
        }
        result.measure(f"{case}, at given ids", calls, seconds, device)
        calls = {
            candidate.name: Call(lambda _, select=select: select(pristine, k, group), pristine.nbytes)  # type: ignore[misc]
            for candidate, select in _loaded(_topk_candidates.SELECTIONS, result)
        }
        result.measure(f"{case}, selection", calls, seconds, device)
    return result


@contextmanager
def _group() -> Iterator[dist.ProcessGroup]:
    """Yield a process group that this process is alone in."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _loaded(candidates: Iterable[Any], result: Result) -> list[tuple[Any, Any]]:
    loaded = []
    for candidate in candidates:
        try:
            loaded.append((candidate, candidate.load()))
        except Exception as error:
            result.left_out[candidate.name] = why(error)
    return loaded


def memory(dry: bool) -> Result:
    """Measure a model that trains and one that only scores, beside the estimate."""
    description = memory_cases.DENSE
    if not dry:
        description = replace(
            description,
            hidden_size=2048,
            ffn_hidden_size=6144,
            num_attention_heads=16,
            num_query_groups=8,
            vocab_size=32000,
        )
    optimizers = {
        "bf16": PLAIN,
        "bf16, bf16 gradients": PLAIN_BF16_GRADIENTS,
        "bf16, bf16 gradients, distributed optimizer": BF16_GRADIENTS,
    }
    cases = [
        memory_cases.Case(name, description, optimizer=optimizer) for name, optimizer in optimizers.items()
    ]
    cases = cases[-1:] if dry else cases
    measured = memory_cases.measure(cases, RANK_VARIABLES)
    result = Result(table=[["", "bytes", "live", "CUDA allocator", "estimated", "live − estimated"]])
    for case in cases:
        [account] = measured[case.name]
        [stage] = account.from_chunks.stages
        for use, live, allocated, estimated in (
            ("training", account.live_training, account.allocated_training, stage.training),
            ("inference-only", account.live_inference, account.allocated_inference, stage.inference_only),
        ):
            total = estimated.device.total
            row = [case.name, use, f"{live:,}", f"{allocated:,}", f"{total:,}", f"{live / total - 1:+.3%}"]
            result.table.append(row)
            off = abs(live / total - 1)
            claim = f"estimate of {use}, {case.name}"
            result.claims.append((claim, f"{off:.2%} off", "<= 1%", off <= 0.01))
    [of_scoring] = spawn_ranks(_scoring, 1, cases[-1], 0.1 if dry else 2.0, env=RANK_VARIABLES)
    result.costs = of_scoring.costs
    return result


def _scoring(case: memory_cases.Case, seconds: float) -> Result:
    """Measure the forward pass of a model that only scores."""
    result, batch = Result(), 64
    with gpu_or_cpu() as device, torch.no_grad():
        memory_cases.initialize(case.parallel)
        [model] = memory_cases.inference_model(case, device)
        tokens = torch.ones(batch, memory_cases.SEQUENCE, dtype=torch.int64, device=device)
        positions = torch.arange(memory_cases.SEQUENCE, device=device).expand_as(tokens)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        forward = Call(lambda _: model(tokens, positions, None), weights)
        result.measure(
            f"inference-only, {batch} samples", {"forward": forward}, seconds, torch.device(device)
        )
    return result


def hooks(dry: bool) -> Result:
    """Measure what the patch adds to calls, and that it starts no kernels."""
    [result] = spawn_ranks(_hooks, 1, dry, timeout=100, env=RANK_VARIABLES)
    return cast(Result, result)


def _hooks(dry: bool) -> Result:
    # By its importable name: the patch looks for the function there.
    from benchmarks import bench_overhead

    result = Result(table=[["call", "bare (µs)", "patched (µs)", "added (µs)", "claim (µs)"]])
    with bench_overhead.patched() as device:
        for case in bench_overhead.cases(bf16=True):
            cost = bench_overhead.compare(case, 3 if dry else 30)
            limit = f"< {cost.limit_us:g}"
            times = [f"{value:.2f}" for value in (cost.bare_us, cost.patched_us)]
            result.table.append([cost.case, *times, f"{cost.added_us:+.2f}", limit])
            if not dry:
                met = cost.added_us < cost.limit_us
                result.claims.append((cost.case, f"{cost.added_us:+.2f} µs", limit + " µs", met))
            both = {"bare": case.bare, "patched": case.patched}
            calls = {name: Call(lambda _, run=run: run(), 0) for name, run in both.items()}  # type: ignore[misc]
            result.measure(case.name, calls, 0.1, torch.device(device))
    return result
