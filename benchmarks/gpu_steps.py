"""The steps of ``make gpu``: benchmarks, tests and demo, each for a process of its own.

Each step saves a :class:`StepResult` whenever there is more in it, and raises if it failed. On the CPU it is
dry: everything is small.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl_patches.losses.vocab.output_layer import add_product
from megatron_rl_patches.testing import spawn_ranks
from tests.references import memory_cases
from tests.references.heads import DEFERRED, Setup
from tests.references.one_device import gpu_or_cpu

from . import head as output_layer
from . import inference_memory, overhead
from . import loss as logits_loss
from . import topk as logits_topk
from .candidates import calls
from .head import ALL_ROWS, ENTROPY, HALF, LIGER, LIGER_IN_TORCH, NAIVE, VERL
from .logits import LogitsSetup
from .measure import COPY, DEVICE, ON_GPU, Call, Result, kernels

DRY = not ON_GPU
GIB = 1 << 30
# Megatron asks for it where communication overlaps with computation. A rank with variables is not forked.
RANK_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
VOCABULARY = 151936
HEAD = Setup(*((128, 64, 4096) if DRY else (8192, 4096, 131072)), torch.bfloat16)
#: Rows, hidden size, and columns of the tiles that an output layer of this size may have.
TILES = (128, 64, (512, 1024)) if DRY else (8192, 4096, (8192, 16384, 32768, 65536, 131072))
PRODUCTS = "matrix products alone"
MAX_TURNS = 50
#: The most that the output layer with its loss is to take on an H100 or H200, at the size below.
HEAD_MILLISECONDS, HEAD_GIB = {"parity": 57.0, "lead": 50.0}, {"limit": 1.2}
HALF_SHARE = 0.55  # of these milliseconds, where half of the rows are read
#: Milliseconds on an H100 at this size: all rows, Liger-Kernel 62b691b7; half, linkedin/Liger-Kernel#1359.
PUBLISHED = {
    ALL_ROWS: {"Liger's CuTe kernel": 50.2, "Liger's cuTile kernel": 56.9, "verl's way in torch": 165.6},
    HALF: {"Liger's cuTile kernel": 26.15, "verl's way in torch": 82.03},
}


@dataclass
class StepResult(Result):
    """What a step measured; the page shows all of it.

    Attributes:
        units: by case, the way in whose time the page shows those of the others.
        claims: rows that say what was measured, whether it reaches its targets, and its ratio to peers.
        figures: numbers without a table, by name.
        texts: what other programs have printed, by their names.
    """

    units: dict[str, str] = field(default_factory=dict)
    claims: list[dict[str, str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def claim(
        self, what: str, measured: float, unit: str, targets: Mapping[str, float], peers: Mapping[str, float]
    ) -> None:
        """Compare what was measured with the most that each target allows, and with what peers take."""
        met = ("**no**", "yes")
        of_targets = (f"{name} <= {most:.4g}: {met[measured <= most]}" for name, most in targets.items())
        of_peers = (f"{measured / of:.2f} × {peer} ({of:.3g})" for peer, of in peers.items())
        row = {"claim": what, "measured": f"{measured:.4g} {unit}", "targets": "; ".join(of_targets)}
        self.claims.append({**row, "measured / peer": "; ".join(of_peers) or "–"})

    def compare(self, case: str, calls: Mapping[str, Call], seconds: float, unit: str | None = None) -> None:
        """Measure calls that take turns with a copy; their errors are left to the benchmarks on the CPU.

        Args:
            unit: in whose time the page shows those of the others; if none, the fastest that is not ours.
        """
        size = GIB if ON_GPU else 1 << 24
        source, target = (torch.zeros(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
        ready = {COPY: Call(lambda _: target.copy_(source), least_bytes=2 * size)}
        ready |= {name: replace(call, details=tuple) for name, call in calls.items()}
        self.measure(case, ready, turns=MAX_TURNS, seconds=seconds)
        copied = 2 * size / self.costs[case][COPY].milliseconds
        for name, cost in self.costs[case].items():
            number, by_kernel = kernels(ready[name])
            share = ready[name].least_bytes / cost.milliseconds / copied
            self.costs[case][name] = replace(cost, kernels=number, by_kernel=by_kernel, share_of_copy=share)
        costs = self.costs[case]
        others = [name for name in costs if not name.startswith((COPY, "ours"))]
        self.units[case] = unit or min(others, key=lambda name: costs[name].milliseconds, default=COPY)


#: Keeps a result from then on, whatever becomes of the process.
Save = Callable[[StepResult], None]


def card(save: Save) -> None:
    """Measure the products of tiles alone, without which a slow card cannot be told from slow code.

    A tile is multiplied again in backward, if it was not kept. Megatron's DDP has the weight's gradient in
    float32, and other training in bfloat16.
    """
    result, (rows, hidden_size, widths) = StepResult(), TILES
    if nvidia_smi := shutil.which("nvidia-smi"):
        own = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}" if ON_GPU else "--id=0"
        command = [nvidia_smi, "-q", "-d", "CLOCK,POWER", own]
        result.texts["nvidia-smi"] = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
        save(result)
    with _clocks() as clocks:
        for library, width in product(("cublas", "cublaslt") if ON_GPU else ("",), widths):
            if library:
                torch.backends.cuda.preferred_blas_library(library)
            hidden, weight = (
                torch.randn(n, hidden_size, device=DEVICE).to(torch.bfloat16) for n in (rows, width)
            )
            logits, of_weight = hidden @ weight.T, torch.zeros_like(weight)
            of_hidden, main_grad = (torch.zeros(x.shape, device=DEVICE) for x in (hidden, weight))
            products = {
                "logits": partial(torch.mm, hidden, weight.T, out=logits.clone()),
                "gradient of hidden states": partial(add_product, of_hidden, logits, weight, may_round=True),
                "gradient of weight": partial(torch.mm, logits.T, hidden, out=of_weight),
                "main_grad": partial(add_product, main_grad, logits.T, hidden, may_round=True),
            }
            case = f"[{rows}, {hidden_size}] × {width:,} {library}".rstrip()
            ways = {name: Call(partial(lambda run, _: run(), run)) for name, run in products.items()}
            result.compare(case, ways, 0.1 if DRY else 0.7, COPY)
            for name in products:
                if cost := result.cost(case, name):
                    rate = 2 * logits.numel() * hidden_size / cost.milliseconds / 1e9
                    result.figures[f"{case}, {name}"] = f"{rate:.0f} TFLOP/s"
            result.figures[f"clocks, {case}"] = clocks()
            save(result)


def tests(save: Save) -> None:
    """Run all tests that are marked ``gpu``; without the folder, files without the mark would be imported."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Of the machine's own plugins some refuse this suite's settings.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ("-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "pytest_timeout")
        subprocess.run([sys.executable, "-m", "pytest", *options, f"--junitxml={report}", "tests/gpu"])
        [suite] = ElementTree.parse(report).getroot()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    save(StepResult(figures=counts))
    if not counts.pop("tests") or any(counts.values()):
        raise RuntimeError(f"expected that all tests marked gpu run and pass: {counts}")


def demo(save: Save) -> None:
    """Run the demo on one rank, which has the GPU."""
    command = ["megatron_rl_patches", "demo", "--ranks", "1", "--rollouts", "2" if DRY else "12"]
    result = StepResult()
    if _run_and_save([sys.executable, "-m", *command], "demo", result, save):
        raise RuntimeError("the demo failed")
    output = result.texts.pop("demo")
    last_rollout, seconds = re.findall(r"^(?:rollout|Time) .*", output, re.MULTILINE)[-2:]
    backend = "nccl" if ON_GPU else "gloo"
    if f"; {backend}, seed" not in output:
        raise RuntimeError(f"the demo did not run on {backend}:\n{output}")
    result.figures = {"backend": backend, "at the end": f"{last_rollout}; {seconds}"}
    save(result)


def _run_and_save(command: Sequence[str], name: str, result: StepResult, save: Save) -> int:
    """Run a command, save what it has printed, also when this step is stopped, and return its exit code."""
    with tempfile.NamedTemporaryFile() as file:
        try:
            return subprocess.run(command, stdout=file).returncode
        finally:
            result.texts[name] = Path(file.name).read_text()
            save(result)


def losses(save: Save) -> None:
    rows, vocabulary, seconds = (128, 8192, 0.1) if DRY else (4096, VOCABULARY, 4.0)
    setup, result = LogitsSetup(1, rows, vocabulary, torch.bfloat16), StepResult()
    with _group() as group:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        inputs = logits_loss.Inputs(setup, group)
        for mode in (logits_loss.LOG_PROBS, logits_loss.ENTROPY_GRAD):
            compared = calls(logits_loss.with_mode(mode), partial(inputs.both, mode), result.left_out)
            result.compare(f"{setup}, {mode}", compared, seconds)
            save(result)


def head(save: Save) -> None:
    result = StepResult()
    with _clocks() as clocks:
        for mode in (ENTROPY, *output_layer.MODES):
            case, x = f"{HEAD}, {mode}", output_layer.inputs_of(HEAD, mode)
            # It needs the whole logits several times. One mode is enough.
            candidates = [way for way in output_layer.ON_GPUS if way.name != NAIVE or mode == ALL_ROWS]
            compared = calls(candidates, partial(output_layer.call, x), result.left_out)
            products = replace(compared[DEFERRED], run=partial(_products, x), results_bytes=0)
            result.compare(case, {PRODUCTS: products, **compared}, 0.1 if DRY else 5.0, PRODUCTS)
            if mode in (ALL_ROWS, HALF, ENTROPY):
                _claim_head(result, HEAD, mode)
            result.figures[f"clocks, {mode}"] = clocks()
            save(result)


@contextmanager
def _clocks() -> Iterator[Callable[[], str]]:
    """Yield a function that returns clock, power and temperature, as medians since it was last called."""
    samples: list[tuple[float, ...]] = []
    stopped = threading.Event()

    def sample() -> None:
        while not stopped.wait(0.2):
            samples.append((torch.cuda.clock_rate(), torch.cuda.power_draw() / 1e3, torch.cuda.temperature()))

    def medians() -> str:
        columns = [statistics.median(column) for column in zip(*samples, strict=True)]
        samples.clear()
        return "{:.0f} MHz, {:.0f} W, {:.0f} °C".format(*columns) if columns else "not known"

    sampling = threading.Thread(target=sample)
    if ON_GPU:
        sampling.start()
    try:
        yield medians
    finally:
        stopped.set()
        if ON_GPU:
            sampling.join()


def _claim_head(result: StepResult, setup: Setup, mode: str) -> None:
    """Compare deferred logits with the targets, with other heads, and with what is published."""
    costs = result.costs[f"{setup}, {mode}"]
    peers = {name: costs[name] for name in (LIGER, LIGER_IN_TORCH, VERL, NAIVE) if name in costs}
    if (of_all_rows := result.cost(f"{setup}, {ALL_ROWS}", DEFERRED)) and mode == HALF:
        peers[f"{DEFERRED}, {ALL_ROWS}"] = of_all_rows
    if ours := costs.get(DEFERRED):
        share = HALF_SHARE if mode == HALF else 1.0
        targets = {name: share * most for name, most in HEAD_MILLISECONDS.items()}
        published = PUBLISHED[HALF if mode == HALF else ALL_ROWS].items()
        milliseconds = {name: cost.milliseconds for name, cost in peers.items()}
        milliseconds |= {f"{name} with entropies, published for an H100": ms for name, ms in published}
        gib = {name: cost.peak_bytes / GIB for name, cost in peers.items()}
        result.claim(f"{DEFERRED}, {mode}", ours.milliseconds, "ms", targets, milliseconds)
        result.claim(f"{DEFERRED}, {mode}", ours.peak_bytes / GIB, "GiB", HEAD_GIB, gib)


def _products(x: output_layer.Inputs, _: object) -> None:
    """Multiply as often as a loss that materializes the logits must, of the rows that it reads."""
    hidden, weight = x.used.detach(), x.weight.detach()
    logits = hidden @ weight.T
    if x.hidden.requires_grad:
        torch.mm(logits, weight)
    if x.weight.requires_grad:
        torch.mm(logits.T, hidden)


def counters(save: Save) -> None:
    """Let NVIDIA's profiler count instructions and bytes of the row passes, of which one limits them."""
    result = StepResult()
    command = [sys.executable, "-c", f"import {__name__} as steps; steps.profiled_head()"]
    if ncu := shutil.which("ncu"):
        options = ["--profile-from-start=off", "--clock-control=none", "--kernel-name=regex:triton"]
        options += ["--set=basic", "--metrics=smsp__inst_executed.sum,dram__bytes.sum"]
        command = [ncu, *options, *command]
    else:
        result.left_out["counters"] = "there is no ncu"
    code = _run_and_save(command, "counters", result, save)
    if code and not ncu:
        raise RuntimeError("the output layer did not run")
    if code:  # counters may be reserved for administrators
        result.left_out["counters"] = f"ncu ended with exit code {code}"
        save(result)


def profiled_head() -> None:
    """Run forward and backward of the output layer, of which a profiler sees the second time."""
    x = output_layer.inputs_of(HEAD, ENTROPY)
    output_layer.step(x, output_layer.deferred)  # compiles
    with torch.cuda.profiler.profile() if ON_GPU else nullcontext():
        output_layer.step(x, output_layer.deferred)


def topk(save: Save) -> None:
    rows, vocabulary, k, seconds = (64, 4096, 8, 0.1) if DRY else (2048, VOCABULARY, 64, 3.0)
    setup, result = logits_topk.Setup(1, rows, vocabulary, torch.bfloat16, k), StepResult()
    with _group() as group:
        inputs = logits_topk.Inputs(setup, group)
        at_ids = calls(logits_topk.AT_IDS, inputs.at_ids, result.left_out)
        result.compare(f"{setup}, {logits_topk.AT_GIVEN_IDS}", at_ids, seconds)
        save(result)
        selections = calls(logits_topk.SELECTIONS, inputs.selection, result.left_out)
        result.compare(f"{setup}, {logits_topk.SELECTION}", selections, seconds)
        save(result)


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


def memory(save: Save) -> None:
    """Measure a model that trains and one that only scores, beside the estimate."""
    model = dict(memory_cases.DENSE)
    if not DRY:
        model |= {"hidden_size": 2048, "ffn_hidden_size": 6144, "vocab_size": 32000}
        model |= {"num_attention_heads": 16, "num_query_groups": 8}
    cases = [
        replace(case, model=model)
        for case in inference_memory.CASES
        if case.name in ("bf16", "bf16, bf16 gradients", "bf16, bf16 gradients, distributed optimizer")
    ]
    cases, result = cases[-1:] if DRY else cases, StepResult()
    for case in cases:
        [[account]] = memory_cases.measure([case], RANK_VARIABLES).values()
        [stage] = account.from_chunks.stages
        memory = inference_memory.Result(case.name, account, stage)
        allocated = {"training": account.allocated_training, "inference-only": account.allocated_inference}
        for use, (live, estimated) in memory.pairs().items():
            what, off = f"{use}, {case.name}", 100 * abs(live / estimated - 1)
            result.claim(f"{what}: off the estimate", off, "%", {"limit": 1.0}, {})
            result.figures[what] = (
                f"{live:,} bytes, estimate {estimated:,}, CUDA allocator {allocated[use]:,}"
            )
        save(result)
    spawn_ranks(_scoring, 1, cases[-1], 0.1 if DRY else 2.0, result, save, env=RANK_VARIABLES)


def _scoring(case: memory_cases.Case, seconds: float, result: StepResult, save: Save) -> None:
    """Measure the forward pass of a model that only scores."""
    batch = 64
    with gpu_or_cpu() as device, torch.no_grad():
        case.tiny.initialize()
        [model] = memory_cases.inference_model(case, device)
        tokens = torch.ones(batch, memory_cases.SEQUENCE, dtype=torch.int64, device=device)
        positions = torch.arange(memory_cases.SEQUENCE, device=device).expand_as(tokens)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        forward = Call(lambda _: model(tokens, positions, None), least_bytes=weights)
        result.compare(f"inference-only, {batch} samples", {"forward": forward}, seconds, COPY)
        save(result)


def hooks(save: Save) -> None:
    """Measure what the patch adds to calls, and that it starts no kernels."""
    spawn_ranks(_hooks, 1, save, timeout=100, env=RANK_VARIABLES)


def _hooks(save: Save) -> None:
    result = StepResult()
    with overhead.patched():
        for case in overhead.cases(bf16=True):
            cost = overhead.compare(case, 3 if DRY else 30)
            limit, peers = {"limit": cost.limit_us}, {"the bare call": cost.bare_us}
            result.claim(f"added to {cost.case}", cost.added_us, "µs", limit, peers)
            functions = {"bare": case.bare, "patched": case.patched}
            ways = {name: Call(partial(lambda run, _: run(), run)) for name, run in functions.items()}
            result.compare(case.name, ways, 0.1, "bare")
            save(result)
