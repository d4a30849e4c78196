"""Bytes that a model really holds in training and in scoring, beside the bytes that the estimate says.

    python -m benchmarks.bench_inference_memory

Real megatron-core: GPTModel, DistributedDataParallel, Adam after a real step; and the same model built for
inference. On one GPU where there is one (then also what the CUDA allocator says), otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl_patches.inference.memory.estimate import OptimizerSettings, ParallelSizes, StageEstimate
from tests.real import memory_cases
from tests.real.memory_cases import EXPERTS, TIED, Case, Measured

from . import _machine

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PLOT = DOCS / "benchmarks" / "inference_memory.md", DOCS / "images" / "inference_memory.png"
TOLERANCE = 0.01
PARTS = ("parameters", "gradients", "main_parameters", "main_gradients", "exp_avg", "exp_avg_sq")

PLAIN = OptimizerSettings()
BF16_GRADIENTS = OptimizerSettings(use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=False)
PLAIN_BF16_GRADIENTS = OptimizerSettings(accumulate_allreduce_grads_in_fp32=False)
EXPERT_PARALLEL = ParallelSizes(expert_model_parallel_size=2, data_parallel_size=2)

CASES = (
    Case("fp32", dtype="fp32", optimizer=PLAIN),
    Case("fp32, distributed optimizer", dtype="fp32"),
    Case("bf16, bf16 gradients", optimizer=PLAIN_BF16_GRADIENTS),
    Case("bf16", optimizer=PLAIN),
    Case("bf16, bf16 gradients, distributed optimizer", optimizer=BF16_GRADIENTS),
    Case("bf16, distributed optimizer"),
    Case("DP 2", parallel=ParallelSizes(data_parallel_size=2), optimizer=PLAIN),
    Case("DP 2, distributed optimizer", parallel=ParallelSizes(data_parallel_size=2)),
    Case("TP 2, distributed optimizer", parallel=ParallelSizes(tensor_model_parallel_size=2)),
    Case("PP 2, tied embeddings", TIED, parallel=ParallelSizes(pipeline_model_parallel_size=2)),
    Case("8 experts, EP 2", EXPERTS, parallel=EXPERT_PARALLEL),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.parse_args(arguments)
    measured: dict[str, list[Measured]] = {}
    for ranks in (1, 2):
        measured |= memory_cases.measure([case for case in CASES if case.parallel.world_size == ranks])
    results = [
        (case.name, account, _stage_of(account, case.estimate().stages))
        for case in CASES
        for account in measured[case.name]
    ]
    page = render(results)
    print(page)
    PAGE.write_text(page)
    plot(results)
    return int(
        any(abs(_difference(*pair)) > TOLERANCE for result in results for pair in _totals(*result[1:]))
    )


Result = tuple[str, Measured, StageEstimate]


def _stage_of(account: Measured, stages: Sequence[StageEstimate]) -> StageEstimate:
    return stages[account.rank if len(stages) > 1 else 0]


def _totals(account: Measured, stage: StageEstimate) -> Iterator[tuple[int, int]]:
    """Measured and estimated, for training and for scoring."""
    yield account.live_training, stage.training.device.total
    yield account.live_inference, stage.inference_only.device.total


def _difference(measured: int, estimated: int) -> float:
    return estimated / measured - 1


def render(results: Sequence[Result]) -> str:
    on_gpu = any(account.allocated_training for _, account, _ in results)
    return "\n".join(
        [
            "# Memory of an inference-only model",
            "",
            "`python -m benchmarks.bench_inference_memory`: bytes of all live tensor storages of a rank,",
            "less those before the model was built, beside what `estimate_memory` says. Training: real",
            "`DistributedDataParallel` and Adam, after a real step. Inference-only: `build_inference_model`.",
            f"{_machine.description()}.",
            f"Claim: estimate and reality agree within {TOLERANCE:.0%}.",
            "",
            *_table(
                ("set-up", *_both("training"), *_both("inference-only")),
                [(_label(result, results), *_compared(*result[1:])) for result in results],
            ),
            "",
            "![measured bytes by part](../images/inference_memory.png)",
            "",
            *(_allocator_table(results) if on_gpu else ()),
            "Not measured here are the precision-aware optimizer and CPU offload, which need",
            "TransformerEngine; the estimate follows their source.",
            "",
            "## Training by part",
            "",
            "Bytes of the storages that each part is in, and the largest difference of an estimate.",
            "Main gradients are the fp32 copies of bf16 gradients; they stay until the next `zero_grad()`.",
            "Replicas may own shards that differ by some padding; the estimate is the largest.",
            "",
            *_table(
                ("set-up", *(part.replace("_", " ") for part in PARTS), "largest difference"),
                [(_label(result, results), *_by_part(*result[1:])) for result in results],
            ),
            "",
        ]
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _both(use: str) -> tuple[str, str, str]:
    return f"{use}: live", "estimated", "difference"


def _label(result: Result, results: Sequence[Result]) -> str:
    name, account, _ = result
    ranks = sum(name == other for other, *_ in results)
    return f"{name}, rank {account.rank}" if ranks > 1 else name


def _compared(account: Measured, stage: StageEstimate) -> Iterator[str]:
    for measured, estimated in _totals(account, stage):
        yield from (f"{measured:,}", f"{estimated:,}", f"{_difference(measured, estimated):+.3%}")


def _by_part(account: Measured, stage: StageEstimate) -> Iterator[str]:
    yield from (f"{getattr(account.training, part):,}" for part in PARTS)
    pairs = memory_cases.parts_of(account.training, stage.training.device)
    yield f"{max(abs(_difference(measured, estimated)) for _, measured, estimated in pairs):.3%}"


def _allocator_table(results: Sequence[Result]) -> list[str]:
    rows = [
        (_label(result, results), f"{account.allocated_training:,}", f"{account.allocated_inference:,}")
        for result in results
        if (account := result[1]).allocated_training
    ]
    return [*_table(("set-up", "CUDA allocator: training", "inference-only"), rows), ""]


def plot(results: Sequence[Result]) -> None:
    """What rank 0 of each set-up holds while training, what inference-only, and where the estimates lie."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = [result for result in results if result[1].rank == 0]
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    positions = list(range(len(first)))
    lefts = [0.0] * len(first)
    for part in PARTS:
        widths = [getattr(account.training, part) / 1e6 for _, account, _ in first]
        axes.barh([p - 0.18 for p in positions], widths, 0.34, lefts, label=part.replace("_", " "))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    inference = [account.live_inference / 1e6 for _, account, _ in first]
    axes.barh([p + 0.2 for p in positions], inference, 0.34, color="black", label="inference-only, all of it")
    for shift, use in ((-0.18, 0), (0.2, 1)):
        estimated = [list(_totals(*result[1:]))[use][1] / 1e6 for result in first]
        axes.plot(
            estimated,
            [p + shift for p in positions],
            "|",
            color="red",
            markersize=14,
            label=None if use else "estimate",
        )
    axes.set_yticks(positions, [name for name, *_ in first])
    axes.invert_yaxis()
    axes.set(xlabel="MB on rank 0", title="Training, and the same model inference-only")
    axes.legend(fontsize="small", loc="lower right")
    _machine.stamp(figure)
    figure.savefig(PLOT, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
