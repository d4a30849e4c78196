"""Memory, time and error of losses over logits: ours, the usual formulas, and those of other frameworks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.losses.logits.dense import dense_log_probs_and_entropy

from .candidates import calls, revisions
from .logits import COPY, REFERENCE_ROWS, Logits, LogitsSetup, in_copies, in_logits
from .loss_candidates import (
    CANDIDATES,
    COMPILED,
    COMPILED_IN_PLACE,
    ENTROPY_GRAD,
    MODES,
    NAIVE,
    OURS,
    PLAIN,
    SLIME,
    Given,
    Loss,
    with_mode,
)
from .measure import Call, Cost, Result, largest_error, on_ranks
from .page import Benchmark, bars, join, left_out, met, number, table, versions

# The larger vocabulary and two ranks in float32 alone, so that a run takes a few minutes.
SETUPS = (
    LogitsSetup(1, 2048, 32768),
    LogitsSetup(1, 2048, 32768, torch.bfloat16),
    LogitsSetup(1, 1024, 151936),
    LogitsSetup(2, 2048, 32768),
)
READ, WRITE = "read", "read and write"
FLOOR, FORWARD = "floor", "forward: "


class Inputs(Logits):
    """What a rank's losses are given."""

    def __init__(self, setup: LogitsSetup, group: dist.ProcessGroup) -> None:
        super().__init__(setup, group)
        self.targets = torch.randint(setup.vocab, (setup.rows,), **self.options)
        self.weights = torch.randn(2, setup.rows, **self.options)

    def forward(self, mode: str, loss: Loss) -> Call:
        return Call(lambda logits: loss(Given(logits, self.targets, self.group), mode), self.fresh)

    def both(self, mode: str, loss: Loss) -> Call:
        """Return the call of forward and backward."""
        return Call(
            lambda logits: self._gradient_and_values(loss, mode, logits),
            self.fresh,
            # Forward reads the logits. Backward reads them again and writes the gradient.
            least_bytes=3 * self.pristine.nbytes,
            details=lambda: self._errors(loss, mode),
        )

    def floor(self) -> dict[str, Call]:
        target = torch.empty_like(self.pristine)
        return {
            COPY: self.copy(),
            READ: Call(lambda _: self.pristine.amax(1)),
            WRITE: Call(lambda _: target.mul_(1.0)),
        }

    def _gradient_and_values(self, loss: Loss, mode: str, logits: Tensor) -> tuple[Tensor, ...]:
        values = loss(Given(logits, self.targets, self.group), mode)
        trained = [value for value in values if value.requires_grad]
        weights = [weight.to(value.dtype) for weight, value in zip(self.weights, trained, strict=False)]
        return torch.autograd.grad(trained, logits, weights)[0], *values

    def _errors(self, loss: Loss, mode: str) -> tuple[float, ...]:
        """Return the errors of the gradient, of the log-probs and of the entropy, of the first rows."""
        leaf = self.first_rows.double().requires_grad_()
        values = dense_log_probs_and_entropy(leaf, self.targets[:REFERENCE_ROWS].cpu())
        weights = self.weights[:, :REFERENCE_ROWS].cpu().double()
        trained = 2 if mode == ENTROPY_GRAD else 1
        [gradient] = torch.autograd.grad(values[:trained], leaf, list(weights[:trained]))
        measured = self._gradient_and_values(loss, mode, self.fresh())
        expected = (gradient[:, self.columns], *values)
        return tuple(largest_error(a[:REFERENCE_ROWS], b) for a, b in zip(measured, expected, strict=False))


def measure(quick: bool) -> list[Result]:
    if quick:
        return on_ranks(_measure, [replace(setup, rows=128) for setup in SETUPS], turns=1)
    return on_ranks(_measure, SETUPS)


def _measure(setup: LogitsSetup, turns: int) -> Result:
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=setup.tp_size)
    inputs = Inputs(setup, parallel_state.get_tensor_model_parallel_group())
    result = Result(setup)
    result.measure(FLOOR, inputs.floor(), turns)
    for mode in MODES:
        copy, missing = {COPY: inputs.copy()}, result.left_out
        both = calls(with_mode(mode), partial(inputs.both, mode), missing, setup.tp_size)
        forward = calls(with_mode(mode), partial(inputs.forward, mode), missing, setup.tp_size)
        result.measure(mode, copy | both, turns)
        result.measure(FORWARD + mode, copy | forward, turns)
    return result


#: The most memory of ours, in that of the logits, where they compute the gradient in place and where not.
MEMORY = {"extra memory in place, × logits": (True, 0.02), "extra memory, × logits": (False, 1.02)}
#: By how much the first must be faster than the second, by mode.
SPEEDS = {
    "compiled beside slime": (COMPILED, SLIME, (1.5, 1.8, 2.8)),
    "compiled, in place, beside slime": (COMPILED_IN_PLACE, SLIME, (2.0, 2.0, 2.0)),
    "compiled beside naive autograd": (COMPILED, NAIVE, (0.9, 2.0, 2.5)),
    "plain beside naive autograd": (PLAIN, NAIVE, (0.9, 0.9, 0.9)),
}


def claims(results: Sequence[Result]) -> Iterator[dict[str, str]]:
    """Compare memory and speed of float32 logits on one rank with what is claimed."""

    def row(what: str, where: str, measured: str, claim: str, is_met: bool) -> dict[str, str]:
        return {"": what, "set-up": where, "found": measured, "claim": claim, "met": met(is_met)}

    for result in results:
        setup = result.setup
        if setup.dtype != torch.float32 or setup.tp_size > 1:
            continue
        for what, (in_place, most) in MEMORY.items():
            names = [candidate.name for candidate in OURS if candidate.name.endswith("in place") == in_place]
            memory = max(in_logits(result, result.costs[mode][name]) for mode in MODES for name in names)
            yield row(what, str(setup), f"{memory:.3f}", f"<= {most:g}", memory <= most)
        for mode in MODES:
            costs = result.costs[mode]
            for what, (name, other, limits) in SPEEDS.items():
                if name in costs and other in costs:
                    speed = costs[other].milliseconds / costs[name].milliseconds
                    least = limits[MODES.index(mode)]
                    yield row(what, f"{setup}, {mode}", f"{speed:.2f} ×", f">= {least:g} ×", speed >= least)


def parts(results: Sequence[Result]) -> dict[str, str]:
    peers = [
        *revisions(["slime", "verl", "nemo-rl"]),
        *versions("slime", "verl", "nemo-rl", "trl", "liger-kernel"),
    ]
    return {
        "peers": f"Beside them: {', '.join(peers)}." if peers else "",
        "claims": table(claims(results)),
        "losses": join(*(_section(result) for result in results)),
    }


def _section(result: Result) -> str:
    copy, read, write = (result.costs[FLOOR][name] for name in (COPY, READ, WRITE))
    return join(
        f"## {result.setup}",
        f"One copy of a rank's logits takes {copy.milliseconds:.1f} ms. In copies: reading them (`amax`)\n"
        f"{in_copies(result, FLOOR, read):.2f}, reading and writing them in place "
        f"{in_copies(result, FLOOR, write):.2f}.",
        table(_rows(result)),
        left_out(result.left_out),
    )


def _rows(result: Result) -> Iterator[dict[str, str]]:
    for candidate in CANDIDATES:
        memory, forward, both = {}, {}, {}
        name, last = candidate.name, None
        for short, mode in zip(("lp", "ent", "grad"), MODES, strict=True):
            cost, of_forward = result.cost(mode, name), result.cost(FORWARD + mode, name)
            last = cost or last
            memory[f"memory: {short}"] = number(in_logits(result, cost), ".2f")
            forward[f"forward: {short}"] = number(in_copies(result, FORWARD + mode, of_forward), ".2f")
            both[f"forward + backward: {short}"] = number(in_copies(result, mode, cost), ".2f")
        if last is not None:
            gradient_error, log_prob_error, *entropy_errors = last.details
            yield {
                "loss": name + (" (!)" if candidate.destroys_logits else ""),
                **memory,
                **forward,
                **both,
                "log-prob error": f"{log_prob_error:.0e}",
                "entropy error": number(entropy_errors[0] if entropy_errors else None, ".0e"),
                "gradient error": f"{gradient_error:.0e}",
            }


def plot(results: Sequence[Result], figure: Any) -> None:
    """Draw the last float32 set-up of one rank, which has the largest vocabulary."""
    result = [r for r in results if r.setup.dtype == torch.float32 and r.setup.tp_size == 1][-1]

    def by_mode(value: Callable[[str, Cost], float]) -> dict[str, dict[str, float]]:
        return {
            mode: {c.name: value(mode, cost) for c in CANDIDATES if (cost := result.cost(mode, c.name))}
            for mode in MODES
        }

    memory, duration = figure.subplots(2, 1)
    times = by_mode(lambda mode, cost: in_copies(result, mode, cost))
    bars(memory, "extra memory, × logits", by_mode(lambda _, cost: in_logits(result, cost)))
    bars(duration, "forward + backward, × one copy of the logits", times)
    floor = sum(in_copies(result, FLOOR, result.costs[FLOOR][name]) for name in (READ, WRITE))
    duration.axvline(floor, color="black", linestyle=":", label="one read, one read-and-write")
    figure.legend(*duration.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Log-probabilities and entropy\n{result.setup}")


BENCHMARK = Benchmark(
    measure,
    parts,
    plot,
    image="loss_memory_and_time.svg",
    height=9,
    is_met=lambda results: all(claim["met"] == met(True) for claim in claims(results)),
)
