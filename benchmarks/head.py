"""Memory, time and error of an output layer with its loss: materialized logits, and deferred ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    deferred_logits,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)
from tests.references.heads import BASE, DEFERRED, KEPT, Setup, share_of_logits

from .candidates import Candidate, calls, checkout, definition, revisions
from .measure import DEVICE, TURNS, Call, Result, largest_error, on_ranks
from .page import Benchmark, bars, join, left_out, number, table

REFERENCE_ROWS, TEMPERATURE = 64, 0.8
ALL_ROWS, HALF, FROZEN, SCORING = MODES = ("all rows", "half of the rows", "frozen head", "scoring")
#: On the CPU, memory and errors alone.
ENTROPY = "entropy"


SETUPS = (
    Setup(1024, 1024, 32768),
    Setup(512, 512, 151936),
    Setup(512, 512, 151936, torch.bfloat16),
)
# Memory alone, at the sizes of real runs.
LARGE = (Setup(8192, 256, 65536), Setup(4096, 256, 151936, torch.bfloat16))
QUICK = (Setup(256, 64, 8192),)


@dataclass
class Inputs:
    """What a step is given; targets and advantages [t] are those of all rows or of some.

    Attributes:
        hidden: hidden states [T, h].
        weight: [V, h].
        entropy: whether the step is that of the entropies, not of the log-probabilities.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    rows: Tensor | None = None
    entropy: bool = False

    @property
    def used(self) -> Tensor:
        """The hidden states of the rows that have targets."""
        return self.hidden if self.rows is None else self.hidden[self.rows]


def inputs_of(setup: Setup, mode: str) -> Inputs:
    options: dict[str, Any] = {"generator": torch.Generator(DEVICE).manual_seed(0), "device": DEVICE}
    hidden = torch.randn(setup.rows, setup.hidden, **options).to(setup.dtype)
    weight = (3 * torch.randn(setup.vocabulary, setup.hidden, **options) / setup.hidden**0.5).to(setup.dtype)
    n, rows = setup.rows, None
    if mode == HALF:
        # Responses stand between prompts: pieces, not one range.
        rows = torch.arange(n, device=DEVICE).view(-1, 16)[::2].flatten()
        n = len(rows)
    return Inputs(
        hidden.requires_grad_(mode != SCORING),
        weight.requires_grad_(mode not in (SCORING, FROZEN)),
        torch.randint(setup.vocabulary, (n,), **options),
        torch.randn(n, **options),
        rows,
        mode == ENTROPY,
    )


#: Log-probs and, where asked for and where there is one, the entropies.
Values = tuple[Tensor, ...]
Head = Callable[[Inputs], Values]


def naive(x: Inputs) -> Values:
    """``log_softmax`` of float32 logits, as frameworks without such functions write it."""
    logits = linear(x.hidden, x.weight).float()
    return _formula(logits if x.rows is None else logits[x.rows], x)


def _formula(logits: Tensor, x: Inputs) -> Values:
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    log_probs = log_p.gather(1, x.targets[:, None]).squeeze(1)
    return (log_probs, -(log_p.exp() * log_p).sum(-1)) if x.entropy else (log_probs,)


def made(x: Inputs) -> Values:
    """Logits in float32, as Megatron's ``Float16Module`` returns them."""
    return _ours(linear(x.hidden, x.weight).float(), x)


def deferred(x: Inputs, tile_bytes: int | None = None) -> Values:
    return _ours(deferred_logits(x.hidden, x.weight, tile_bytes=tile_bytes), x)


def deferred_keeping(x: Inputs, share: float) -> Values:
    keep_bytes = share_of_logits(len(x.targets), x.weight, share)
    return _ours(deferred_logits(x.hidden, x.weight, keep_bytes=keep_bytes), x)


def _ours(logits: Tensor, x: Inputs) -> Values:
    options: dict[str, Any] = {"rows": x.rows, "temperature": TEMPERATURE}
    if x.entropy:
        return vocab_parallel_log_probs_and_entropy(logits, x.targets, entropy_grad=True, **options)
    return (vocab_parallel_log_probs(logits, x.targets, **options),)


def nemo_rl(module: Any, x: Inputs) -> Values:
    """With what its training step does next: divide what the model returned by the temperature."""
    step = Path(module.__file__).parents[1] / "models" / "megatron" / "train.py"
    log_probs = module.ChunkedDistributedHiddenStatesToLogprobs.apply(
        *(x.hidden[:, None], x.targets[None], x.weight, 0, len(x.weight)),
        *(256, dist.group.WORLD, False),
    )
    scale = definition(step, "apply_temperature_scaling")
    return (scale(log_probs, SimpleNamespace(temperature=TEMPERATURE))[0],)


def skyrl(module: Any, x: Inputs, chunk_size: int) -> Values:
    # It takes tokens, of which each is the target of the row before, and leaves out the last row.
    rows = torch.cat([x.hidden, x.hidden[:1]])[None]
    tokens = torch.cat([x.targets[:1], x.targets])[None]
    options = {"chunk_size": chunk_size, "temperature": TEMPERATURE}
    group = dist.group.WORLD
    log_probs = module.from_parallel_hidden_to_logprobs(
        rows, x.weight, tokens, 0, len(x.weight), group, **options
    )
    if not x.entropy:
        return (log_probs[0],)
    entropies = module._fused_vocab_parallel_entropy_from_hidden(x.hidden[None], x.weight, group, **options)
    return log_probs[0], entropies[0]


def trl(module: Any, x: Inputs) -> Values:
    names = ("entropy",) if x.entropy else ()
    outputs = module.ChunkedLogProbFunction.apply(
        x.hidden, x.weight, None, x.targets, TEMPERATURE, 32768, None, 1.0, names
    )
    return outputs[: 1 + x.entropy]


def liger(module: Any, x: Inputs) -> Values:
    """With the environment variable ``LIGER_KERNEL_IMPL=cutile``, that of cuTile."""
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    losses = function.apply(x.used, x.weight, x.targets, TEMPERATURE, -100, 1, x.entropy)
    return (-losses[0], losses[1]) if x.entropy else (-losses,)


def verl(module: Any, x: Inputs) -> Values:
    return tuple(module.linear_cross_entropy(x.used, x.weight, x.targets, TEMPERATURE, "none", None))


NAIVE, NEMO_RL, LIGER, VERL = "naive autograd", "NeMo-RL, chunks of 256", "Liger", "verl's kernel"
OURS = (
    Candidate(NAIVE, naive),
    Candidate(BASE, made),
    Candidate(DEFERRED, deferred),
    *(Candidate(name, partial(deferred_keeping, share=share)) for name, share in KEPT.items()),
)
WAYS = [candidate.name for candidate in OURS]
SKYRL = checkout("SkyRL", "skyrl.backends.skyrl_train.distributed.megatron.model_utils")
OTHERS = (
    Candidate(NEMO_RL, nemo_rl, checkout("nemo-rl", "nemo_rl.distributed.model_utils")),
    Candidate("SkyRL, chunks of 1024", partial(skyrl, chunk_size=1024), SKYRL),
    Candidate("SkyRL, chunks of 128", partial(skyrl, chunk_size=128), SKYRL),
    Candidate("TRL", trl, checkout("trl", "trl.kernels.chunked_logprob")),
)
ON_GPUS = (
    *OURS,
    Candidate("deferred, tiles of 128 MiB", partial(deferred, tile_bytes=128 << 20)),
    Candidate("deferred, tiles of 2048 MiB", partial(deferred, tile_bytes=2048 << 20)),
    Candidate(LIGER, liger, partial(import_module, "liger_kernel.ops")),
    Candidate(VERL, verl, partial(import_module, "verl.utils.kernel.linear_cross_entropy")),
)
# Tiles are kept for a backward alone, and NeMo-RL's head has no entropy.
CANDIDATES = {
    ALL_ROWS: OURS + OTHERS,
    HALF: OURS,
    FROZEN: OURS + OTHERS,
    SCORING: [candidate for candidate in OURS if candidate.name not in KEPT],
    ENTROPY: [candidate for candidate in OURS + OTHERS if candidate.name not in (*KEPT, NEMO_RL)],
}


def step(x: Inputs, head: Head) -> list[Tensor]:
    """Forward and backward; return log-probabilities or entropies, and gradients."""
    trained = [tensor for tensor in (x.hidden, x.weight) if tensor.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        values = head(x)[int(x.entropy)]
    gradients = torch.autograd.grad((values * x.advantages).sum(), trained) if trained else ()
    return [values.detach(), *gradients]


def call(x: Inputs, head: Head, details: Callable[[], tuple[float, ...]] = tuple) -> Call:
    """Return the call of a step."""
    read = x.hidden.nbytes + x.weight.nbytes
    gradients = sum(tensor.nbytes for tensor in (x.hidden, x.weight) if tensor.requires_grad)
    # Forward and backward read hidden states and weight, and backward writes their gradients.
    least_bytes = read * (2 if gradients else 1) + gradients
    return Call(lambda _: step(x, head), least_bytes=least_bytes, results_bytes=gradients, details=details)


@dataclass
class Results:
    large: list[Result]
    setups: list[Result]


def measure(quick: bool) -> Results:
    large, setups = (QUICK, QUICK) if quick else (LARGE, SETUPS)
    turns = 1 if quick else TURNS
    without_naive = [candidate for candidate in OURS + OTHERS if candidate.name != NAIVE]
    return Results(
        on_ranks(partial(_measure, {ALL_ROWS: without_naive}), large, turns=0),
        on_ranks(partial(_measure, CANDIDATES), setups, turns),
    )


def _measure(candidates: Mapping[str, Sequence[Candidate]], setup: Setup, turns: int) -> Result:
    """Measure the candidates of each mode; without turns, memory alone."""
    result = Result(setup, BASE)
    for mode, of_mode in candidates.items():
        call_of = partial(_call, setup, mode, inputs_of(setup, mode), turns > 0)
        steps = calls(of_mode, call_of, result.left_out)
        result.measure(mode, steps, 0 if mode == ENTROPY else turns, clock=time.process_time)
    return result


def _call(setup: Setup, mode: str, x: Inputs, with_details: bool, head: Head) -> Call:
    """Return the call of a step, with its errors; if the head is frozen, with whether that saves nothing."""
    details = {ALL_ROWS: _errors, ENTROPY: _errors, FROZEN: _computes_frozen}.get(mode)
    return call(x, head, partial(details, setup, mode, head) if details and with_details else tuple)


def _errors(setup: Setup, mode: str, head: Head) -> tuple[float, float]:
    """Return the largest errors of values and of gradients."""
    x, expected = _expected(setup, mode)
    values, *gradients = map(largest_error, step(x, head), expected)
    return values, max(gradients)


@functools.cache
def _expected(setup: Setup, mode: str) -> tuple[Inputs, list[Tensor]]:
    """Return inputs of a few rows, and the results of a step in float64."""
    x = inputs_of(replace(setup, rows=REFERENCE_ROWS), mode)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (x.hidden, x.weight))

    def exact(of: Inputs) -> Values:
        # In 16 bits the model's logits are what they are rounded to; gradients flow as if they were not.
        logits = linear(of.hidden, of.weight)
        if setup.dtype != torch.float32:
            logits = logits + (linear(x.hidden, x.weight).double() - logits).detach()
        return _formula(logits, of)

    return x, step(replace(x, hidden=hidden, weight=weight, advantages=x.advantages.double()), exact)


def _computes_frozen(setup: Setup, mode: str, head: Head) -> tuple[float]:
    """Return 1 if backward makes a gradient of the weight that nobody asked for."""
    x = inputs_of(replace(setup, rows=8), mode)
    made: list[Tensor] = []

    def hook(gradients: Sequence[Tensor | None], _: Any) -> None:
        made.extend(g for g in gradients if g is not None and g.shape == x.weight.shape)

    log_probs = head(x)[0]
    nodes = [log_probs.grad_fn]
    for node in nodes:
        if node is not None:
            node.register_hook(hook)
            nodes.extend(following for following, _ in node.next_functions)
    torch.autograd.grad(log_probs.sum(), x.hidden)
    return (float(bool(made)),)


def parts(results: Results) -> dict[str, str]:
    setups, everything = results.setups, results.large + results.setups
    missing = {name: why for result in everything for name, why in result.left_out.items()}
    return {
        "memory": table(
            {"setup": str(result.setup), **{way: _memory(result, ALL_ROWS, way) for way in WAYS}}
            for result in everything
        ),
        "time": table(
            {"setup": str(result.setup), "rows": mode, **{way: _time(result, mode, way) for way in WAYS}}
            for result in setups
            for mode in MODES
        ),
        "errors": table(
            {"setup": str(result.setup), **{way: _both_errors(result, ALL_ROWS, way) for way in WAYS}}
            for result in setups
        ),
        "others": join(
            table(row for result in everything for row in _beside(result)),
            revisions("Others", "nemo-rl", "SkyRL", "trl"),
            left_out(missing),
        ),
    }


def _memory(result: Result, mode: str, way: str) -> str:
    return number(result.memory(mode, way), ".3f")


def _time(result: Result, mode: str, way: str) -> str:
    return number(result.duration(mode, way), ".2f")


def _both_errors(result: Result, mode: str, way: str) -> str:
    cost = result.cost(mode, way)
    return "{:.1e}, {:.1e}".format(*cost.details) if cost and cost.details else "–"


def _beside(result: Result) -> Iterator[dict[str, str]]:
    for name in result.costs[ALL_ROWS]:
        if name not in KEPT:
            yield {
                "setup": str(result.setup),
                "head": name,
                "memory": _memory(result, ALL_ROWS, name),
                "time": _time(result, ALL_ROWS, name),
                "time, frozen head": _time(result, FROZEN, name),
                "log-probs, gradients: errors": _both_errors(result, ALL_ROWS, name),
                "entropy, gradient: errors": _both_errors(result, ENTROPY, name),
                "memory with the entropy's gradient": _memory(result, ENTROPY, name),
                "leaves out": "; ".join(_leaves_out(result, name)) or "–",
            }


def _leaves_out(result: Result, name: str) -> Iterator[str]:
    """Say what a head does not do, by what this run measured."""
    cost, entropy, frozen = (result.cost(mode, name) for mode in (ALL_ROWS, ENTROPY, FROZEN))
    if cost is None or not cost.details:
        return
    if name in (NAIVE, BASE):
        yield "materializes the logits"
        return
    if cost.details[0] > 1e-4:
        yield "the temperature" if cost.details[0] > 1e-2 else "exact values"
    if entropy is None:
        yield "the entropy"
    elif entropy.details[1] > 0.1:
        yield "the entropy's gradient"
    elif entropy.peak_bytes > 1.5 * cost.peak_bytes:
        yield "the entropy's gradient in chunks"
    if frozen and frozen.details[0]:
        yield "the saving of a frozen weight"


def plot(results: Results, figure: Any) -> None:
    memory, duration = figure.subplots(2, 1)
    of_setup = {str(result.setup): result for result in results.large + results.setups}
    first = results.setups[0]
    label = "peak beyond gradients, in float32 logits"
    bars(memory, label, WAYS, of_setup, lambda way, setup: of_setup[setup].memory(ALL_ROWS, way))
    label = "time, logits materialized with lean-loss = 1"
    bars(duration, label, WAYS, MODES, lambda way, mode: first.duration(mode, way))
    duration.set_title(str(first.setup))
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower left")


BENCHMARK = Benchmark(measure, parts, plot, image="head_memory_and_time.svg", height=8)
