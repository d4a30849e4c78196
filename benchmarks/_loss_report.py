"""The page and the plot of ``bench_loss``."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from . import _machine
from ._loss_candidates import (
    CANDIDATES,
    CHECKOUTS,
    COMPILED,
    COMPILED_IN_PLACE,
    ENTROPY,
    ENTROPY_GRAD,
    LOG_PROBS,
    MODES,
    NAIVE,
    PLAIN,
    SLIME,
)
from ._loss_measure import REFERENCE_ROWS, Cost, Result

# A quantity, its set-up and mode, the measured value, the claim, and whether it is met.
Target = tuple[str, str, str, str, bool]

FASTER_THAN_SLIME = {LOG_PROBS: 1.5, ENTROPY: 1.8, ENTROPY_GRAD: 2.8}
FASTER_THAN_SLIME_IN_PLACE = 2.0
FASTER_THAN_NAIVE = {LOG_PROBS: 0.9, ENTROPY: 2.0, ENTROPY_GRAD: 2.5}
PLAIN_BESIDE_NAIVE = 0.9
MEMORY, MEMORY_IN_PLACE = 1.02, 0.02
BANDWIDTH = 0.85  # on a GPU, of that of a copy


def targets(results: Sequence[Result]) -> Iterator[Target]:
    """Speed of float32 logits on one rank; memory of all."""
    for result in results:
        yield from _memory_targets(result)
        if result.setup.dtype == "float32" and result.setup.tp_size == 1:
            yield from _speed_targets(result)
            if torch.cuda.is_available():
                yield from _bandwidth_targets(result)


def _memory_targets(result: Result) -> Iterator[Target]:
    if not _is_full_size(result):
        return
    for name, limit in (("in place", MEMORY_IN_PLACE), ("", MEMORY)):
        used = [
            cost.memory
            for (candidate, _), cost in result.costs.items()
            if candidate.startswith("ours") and candidate.endswith("in place") == bool(name)
        ]
        what = f"extra memory{' in place' if name else ''}, × logits"
        yield what, result.setup.name, f"{max(used):.3f}", f"<= {limit:g}", max(used) <= limit


def _is_full_size(result: Result) -> bool:
    # The claim is for float32. In bfloat16 the logits have half the bytes, and a block of rows has not.
    return result.setup.dtype == "float32" and result.setup.rows >= 1024 and result.setup.tp_size == 1


def _speed_targets(result: Result) -> Iterator[Target]:
    for mode in MODES:
        where = f"{result.setup.name}, {mode}"
        compiled, in_place, plain, naive, slime = (
            result.costs.get((name, mode)) for name in (COMPILED, COMPILED_IN_PLACE, PLAIN, NAIVE, SLIME)
        )
        if compiled is not None and slime is not None:
            speed = slime.total / compiled.total
            yield _at_least("compiled beside slime", where, speed, FASTER_THAN_SLIME[mode])
        if in_place is not None and slime is not None:
            speed = slime.total / in_place.total
            yield _at_least("compiled, in place, beside slime", where, speed, FASTER_THAN_SLIME_IN_PLACE)
        if compiled is not None and naive is not None:
            speed = naive.total / compiled.total
            yield _at_least("compiled beside naive autograd", where, speed, FASTER_THAN_NAIVE[mode])
        if plain is not None and naive is not None:
            speed = naive.total / plain.total
            yield _at_least("plain beside naive autograd", where, speed, PLAIN_BESIDE_NAIVE)


def _bandwidth_targets(result: Result) -> Iterator[Target]:
    for mode in MODES:
        if (cost := result.costs.get((COMPILED, mode))) is None:
            continue
        for way, share in _bandwidths(cost).items():
            where = f"{result.setup.name}, {mode}"
            met = share >= BANDWIDTH
            yield f"compiled {way}, bandwidth of a copy", where, f"{share:.0%}", f">= {BANDWIDTH:.0%}", met


def _bandwidths(cost: Cost) -> dict[str, float]:
    """Return the bandwidths of both passes relative to a copy, which reads and writes as backward does."""
    return {"forward": 0.5 / cost.forward, "backward": 1 / (cost.total - cost.forward)}


def _at_least(what: str, where: str, measured: float, limit: float) -> Target:
    return what, where, f"{measured:.2f} ×", f">= {limit:g} ×", measured >= limit


_BOUNDS = (
    "What bounds the times, on a CPU:",
    "",
    "- Forward and backward each take one `exp` per logit, which costs more than reading it. The floor of a",
    "  read and a read-and-write, the dotted line of the plot, is for GPUs.",
    "- A fresh gradient costs about one copy of the logits, since it is written to memory that was not read",
    "  before. slime's backward of the log-probs alone writes into the softmax that its forward kept, so",
    "  that the claim is lower there; in place there is no such difference.",
    "- Log-probs alone are one `log_softmax` for naive autograd, which reads the logits as often as ours",
    "  do; we save memory there, not time. With the larger vocabulary our functions take less time, too.",
    "- Plain operators work on blocks that stay in the cache; compiled functions save passes over these",
    "  blocks. Both compute `exp(z)` as `exp2(z * log2(e))`, since `torch.exp` takes three times as long on",
    "  some CPUs, sum in float32 over stretches of some hundred columns, and add these up in float64.",
    "- Entropy with gradient at [1024, 151936] is 2.9 × slime main, not 3.5 ×. Per logit our time is 13%",
    "  more than at [2048, 32768] (1.64 ns, 1.45 ns) and slime's 14% less (4.71 ns, 5.47 ns), measured on",
    "  2 CPU cores on 2026-11-22. The cause of either was not looked for.",
    "- Plain operators reach 0.9 × naive autograd's speed, not 1 ×, for log-probs alone at [2048, 32768]:",
    "  they save memory, not time.",
    "- Two ranks on two cores share them with everything else: their times are indicative.",
    "",
)


def render(results: Sequence[Result]) -> str:
    on_gpu = torch.cuda.is_available()
    claims = list(targets(results))
    return "\n".join(
        [
            "# Losses over logits",
            "",
            "`python -m benchmarks.bench_loss`: forward and backward of the log-probabilities of given",
            "tokens, alone (lp), with the entropy as a metric (ent), and with its gradient (grad).",
            f"{_machine.description()}; one thread per rank.",
            _versions_of_peers(),
            "",
            "- Memory: peak of live bytes beyond the logits, the gradient included, × the bytes of the",
            "  logits, as torch's allocators report them.",
            "- Time: median of calls that take turns with a copy of the logits, × the median of these",
            "  copies. What was freed stays with the process, so that fresh buffers cost no page faults;",
            "  turns with page faults do not count. With two ranks, of the slower one.",
            f"- Error: largest difference from float64 in {REFERENCE_ROWS} rows, relative to the largest",
            "  value, in the last mode that a loss has. Those of bfloat16 logits have a bfloat16 gradient.",
            "- (!): overwrites the logits that it was given, in forward.",
            "- Functions of other frameworks are their own, from a checkout or a package, called as their",
            "  framework calls them; those that want float32 logits are given a float32 copy of others.",
            "",
            "![extra memory and time](../images/loss_memory_and_time.png)",
            "",
            "## Claims",
            "",
            *_table(
                ("", "set-up", "found", "claim", "met"),
                [(*texts, "yes" if met else "**no**") for *texts, met in claims],
            ),
            "",
            *_BOUNDS,
            *(line for result in results for line in _section(result, on_gpu)),
            "" if on_gpu else "Not measured here: GPUs. There the page has bandwidths as well.",
            "",
        ]
    )


def _versions_of_peers() -> str:
    versions = []
    for package, variable in CHECKOUTS.items():
        if folder := os.environ.get(variable):
            versions.append(f"{package} {_machine.commit_of(folder)}")
    for package in ("slime", "verl", "nemo-rl", "trl", "liger-kernel"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return f"Beside them: {', '.join(versions)}." if versions else ""


def _section(result: Result, on_gpu: bool) -> Iterator[str]:
    floor = result.floor
    yield from (f"## {result.setup.name}", "")
    yield f"One copy of a rank's logits takes {floor.copy_ms:.1f} ms. In copies: reading them (`amax`)"
    yield f"{floor.read:.2f}, reading and writing them in place {floor.read_and_write:.2f}."
    yield ""
    short = ("lp", "ent", "grad")
    header = ["loss"]
    header += [f"{title}: {mode}" for title in ("memory", "forward", "forward + backward") for mode in short]
    header += [f"{title} error" for title in ("log-prob", "entropy", "gradient")]
    yield from _table(header, list(_rows(result)))
    yield ""
    if on_gpu:
        yield from (*_bandwidth_table(result), "")
    if result.missing:
        yield "Left out: " + "; ".join(f"{name} ({why})" for name, why in result.missing.items()) + "."
        yield ""


def _rows(result: Result) -> Iterator[list[str]]:
    readings: tuple[Callable[[Cost], float], ...] = (
        lambda cost: cost.memory,
        lambda cost: cost.forward,
        lambda cost: cost.total,
    )
    for candidate in CANDIDATES:
        costs = [result.costs.get((candidate.name, mode)) for mode in MODES]
        measured = [cost for cost in costs if cost is not None]
        if not measured:
            continue
        last = measured[-1]
        yield [
            candidate.name + (" (!)" if candidate.destroys_logits else ""),
            *("–" if cost is None else f"{reading(cost):.2f}" for reading in readings for cost in costs),
            f"{last.log_prob_error:.0e}",
            "–" if last.entropy_error is None else f"{last.entropy_error:.0e}",
            f"{last.gradient_error:.0e}",
        ]


def _bandwidth_table(result: Result) -> list[str]:
    rows = [
        (*key, *(f"{share:.0%}" for share in _bandwidths(cost).values()))
        for key, cost in result.costs.items()
    ]
    return _table(("bandwidth, of that of a copy", "", "forward", "backward"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def plot(results: Sequence[Result], path: Path) -> None:
    """The last float32 set-up of one rank, which has the largest vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = [r for r in results if r.setup.dtype == "float32" and r.setup.tp_size == 1][-1]
    names = [c.name for c in CANDIDATES if (c.name, LOG_PROBS) in result.costs]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 6), sharey=True, layout="constrained")
    readings: tuple[tuple[str, Callable[[Cost], float]], ...] = (
        ("extra memory, × logits", lambda cost: cost.memory),
        ("forward + backward, × one copy of the logits", lambda cost: cost.total),
    )
    for axes, (label, reading) in zip(both, readings, strict=True):
        for shift, mode in zip((-0.27, 0.0, 0.27), MODES, strict=True):
            places = [i for i, name in enumerate(names) if (name, mode) in result.costs]
            values = [reading(result.costs[names[i], mode]) for i in places]
            axes.barh([i + shift for i in places], values, 0.25, label=mode)
        axes.set(xlabel=label)
        axes.grid(axis="x", alpha=0.3)
    floor = result.floor.read + result.floor.read_and_write
    both[1].axvline(floor, color="black", linestyle=":", label="one read, one read-and-write")
    both[0].set_yticks(range(len(names)), names)
    both[0].invert_yaxis()
    both[1].legend(loc="upper right")
    figure.suptitle(f"Log-probabilities and entropy: {result.setup.name}")
    _machine.stamp(figure)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
