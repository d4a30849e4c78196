"""Memory, time and error of an output layer with its loss: materialized logits, and deferred ones."""

from __future__ import annotations

import functools
import math
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
from tests.references.heads import ALL_KEPT, BASE, DEFERRED, Setup

from . import candidates
from .candidates import Candidate, calls, checkout, definition, revisions
from .measure import DEVICE, TURNS, Call, Result, largest_error, left_out, on_ranks, rows
from .page import Benchmark, Parts, Table, number

REFERENCE_ROWS, TEMPERATURE = 64, 0.8
#: And 1 if backward makes a gradient of a frozen weight, which nobody asks for.
DETAILS = {"error of values": ".1e", "error of gradients": ".1e", "gradient of a frozen weight": ".0f"}
ALL_ROWS, HALF, FROZEN, SCORING = MODES = ("all rows", "half of the rows", "frozen head", "scoring")
#: On the CPU, memory and errors alone; and of both at once memory alone, compared with stock code.
ENTROPY, BOTH = "entropy", "log-probs and entropy"

SETUPS = (Setup(1024, 1024, 32768), Setup(512, 512, 151936), Setup(512, 512, 151936, torch.bfloat16))
# Memory alone, at the sizes of real runs.
LARGE = (Setup(8192, 256, 65536), Setup(4096, 256, 151936, torch.bfloat16))
QUICK = (Setup(256, 64, 8192),)


@dataclass
class Inputs:
    """What a step is given; targets and advantages [t] are those of all rows or of some.

    Attributes:
        hidden: hidden states [T, h].
        weight: [V, h].
        mode: says whether log-probabilities, entropies or both are trained.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    rows: Tensor | None = None
    mode: str = ALL_ROWS

    @property
    def entropy(self) -> bool:
        """Whether there are entropies besides the log-probabilities."""
        return self.mode in (ENTROPY, BOTH)

    @property
    def temperature(self) -> float:
        return 1.0 if self.mode == BOTH else TEMPERATURE  # stock code would copy the logits to divide them

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
        mode,
    )


#: Log-probs and, where asked for and where there is one, the entropies.
Values = tuple[Tensor, ...]
Head = Callable[[Inputs], Values]


def naive(x: Inputs) -> Values:
    """``log_softmax`` of float32 logits, as frameworks without such functions write it."""
    logits = linear(x.hidden, x.weight).float()
    return _formula(logits if x.rows is None else logits[x.rows], x)


def _formula(logits: Tensor, x: Inputs) -> Values:
    log_p = (logits / x.temperature).log_softmax(-1)
    log_probs = log_p.gather(1, x.targets[:, None]).squeeze(1)
    return (log_probs, -(log_p.exp() * log_p).sum(-1)) if x.entropy else (log_probs,)


def made(x: Inputs) -> Values:
    """Logits in float32, as Megatron's ``Float16Module`` returns them."""
    return _ours(linear(x.hidden, x.weight).float(), x)


def deferred(x: Inputs, tile_bytes: int | None = None) -> Values:
    return _ours(deferred_logits(x.hidden, x.weight, tile_bytes=tile_bytes), x)


def deferred_keeping(x: Inputs) -> Values:
    keep_bytes = len(x.targets) * len(x.weight) * x.weight.element_size()
    return _ours(deferred_logits(x.hidden, x.weight, keep_bytes=keep_bytes), x)


def _ours(logits: Tensor, x: Inputs) -> Values:
    options: dict[str, Any] = {"rows": x.rows, "temperature": x.temperature}
    if x.entropy:
        return vocab_parallel_log_probs_and_entropy(logits, x.targets, entropy_grad=True, **options)
    return (vocab_parallel_log_probs(logits, x.targets, **options),)


def slime(module: Any, x: Inputs) -> Values:
    """Stock code: float32 logits, and slime's own function of them."""
    logits = linear(x.hidden, x.weight).float()
    log_probs, entropies = module.calculate_log_probs_and_entropy(
        logits, x.targets, dist.group.WORLD, with_entropy=True, with_entropy_grad=True
    )
    return log_probs.view(-1), entropies


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
    options = TEMPERATURE, 32768, None, 1.0, ("entropy",) * x.entropy
    return module.ChunkedLogProbFunction.apply(x.hidden, x.weight, None, x.targets, *options)[: 1 + x.entropy]


def liger(module: Any, x: Inputs) -> Values:
    """With the environment variable ``LIGER_KERNEL_IMPL=cutile``, that of cuTile."""
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    losses = function.apply(x.used, x.weight, x.targets, TEMPERATURE, -100, 1, x.entropy)
    return (-losses[0], losses[1]) if x.entropy else (-losses,)


def liger_in_torch(module: Any, x: Inputs) -> Values:
    """Verl's way, on chunks of 512 rows, which Liger takes on GPUs that it has no kernel for."""
    function = module._FusedLinearPPOFallbackFunction
    losses = function.apply(x.used, x.weight, x.targets, TEMPERATURE, -100, x.entropy)
    return (-losses[0], losses[1]) if x.entropy else (-losses,)


def verl(module: Any, x: Inputs) -> Values:
    return tuple(module.linear_cross_entropy(x.used, x.weight, x.targets, TEMPERATURE, "none", None))


NAIVE, NEMO_RL, LIGER, VERL = "naive autograd", "NeMo-RL, chunks of 256", "Liger", "verl's kernel"
LIGER_IN_TORCH = "verl's way in torch"
OURS = (
    Candidate(NAIVE, naive),
    Candidate(BASE, made),
    Candidate(DEFERRED, deferred),
    Candidate(ALL_KEPT, deferred_keeping),
)
SKYRL = checkout("SkyRL", "skyrl.backends.skyrl_train.distributed.megatron.model_utils")
OTHERS = (
    Candidate(NEMO_RL, nemo_rl, candidates.NEMO_RL),
    Candidate("SkyRL, chunks of 128", partial(skyrl, chunk_size=128), SKYRL),
    Candidate("TRL", trl, checkout("trl", "trl.kernels.chunked_logprob")),
)
ON_GPUS = (
    *OURS,
    Candidate("deferred, tiles of 512 MiB", partial(deferred, tile_bytes=512 << 20)),
    Candidate("deferred, tiles of 2048 MiB", partial(deferred, tile_bytes=2048 << 20)),
    Candidate(LIGER, liger, partial(import_module, "liger_kernel.ops")),
    Candidate(
        LIGER_IN_TORCH,
        liger_in_torch,
        partial(import_module, "liger_kernel.ops.fused_linear_scaled_cross_entropy"),
    ),
    Candidate(VERL, verl, partial(import_module, "verl.utils.kernel.linear_cross_entropy")),
)
# Tiles are kept for a backward alone, and NeMo-RL's head has no entropy.
CANDIDATES = {
    ALL_ROWS: OURS + OTHERS,
    HALF: OURS,
    FROZEN: OURS + OTHERS,
    SCORING: [candidate for candidate in OURS if candidate.name != ALL_KEPT],
    ENTROPY: [candidate for candidate in OURS + OTHERS if candidate.name not in (ALL_KEPT, NEMO_RL)],
}
#: What a user has: without patches, with `lean-loss`, and with `lean-head`.
STOCK = (
    Candidate("stock code (slime)", slime, candidates.SLIME),
    *(candidate for candidate in OURS if candidate.name in (BASE, DEFERRED)),
)


def step(x: Inputs, head: Head) -> list[Tensor]:
    """Forward and backward; return log-probabilities or entropies, and gradients."""
    trained = [tensor for tensor in (x.hidden, x.weight) if tensor.requires_grad]
    with torch.set_grad_enabled(bool(trained)):
        of_both = head(x)
        values = torch.stack(of_both).sum(0) if x.mode == BOTH else of_both[int(x.entropy)]
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
        on_ranks(partial(_measure, {ALL_ROWS: without_naive, BOTH: STOCK}), large, turns=0),
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
    """Return the call of a step with its details."""
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


def _computes_frozen(setup: Setup, mode: str, head: Head) -> tuple[float, float, float]:
    """Return no errors, and whether backward makes a gradient of the weight."""
    x = inputs_of(replace(setup, rows=8), mode)
    made = False

    def hook(gradients: Sequence[Tensor | None], _: Any) -> None:
        nonlocal made
        made |= any(g is not None and g.shape == x.weight.shape for g in gradients)

    log_probs = head(x)[0]
    nodes = [log_probs.grad_fn]
    for node in nodes:
        if node is not None:
            node.register_hook(hook)
            nodes.extend(following for following, _ in node.next_functions)
    torch.autograd.grad(log_probs.sum(), x.hidden)
    return math.nan, math.nan, float(made)


def parts(results: Results) -> Parts:
    everything = [*results.large, *results.setups]
    return {
        "ways": Table(1, [*_ways(results)]),
        "heads": rows(everything, "mode", "head", DETAILS),
        "peers": revisions("Others", "slime", "nemo-rl", "SkyRL", "trl"),
        "left out": left_out(everything),
    }


def _ways(results: Results) -> Iterator[dict[str, str]]:
    """Yield each head's memory at the first large set-up, with entropies if it has them, and its times."""
    large, timed = results.large[0], (results.setups[0], results.setups[-1])
    cells = {f"{of.setup.vocabulary:,} ids, {mode}": (of, mode) for of in timed for mode in (ALL_ROWS, HALF)}
    for name in large.costs[BOTH] | large.costs[ALL_ROWS]:
        memory = large.memory(BOTH if name in large.costs[BOTH] else ALL_ROWS, name)
        times = {title: number(of.duration(mode, name), ".2f") for title, (of, mode) in cells.items()}
        yield {"head": name, "memory": f"{memory:.3f}", **times}


BENCHMARK = Benchmark(measure, parts)
