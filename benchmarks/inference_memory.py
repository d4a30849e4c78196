"""Bytes that a model really holds in training and in scoring, beside the bytes that the estimate says.

Real megatron-core: GPTModel, DistributedDataParallel, Adam after a real step; and the same model built for
inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl_patches.inference.memory.estimate import OptimizerSettings, StageEstimate
from tests.references import memory_cases
from tests.references.memory_cases import EXPERTS, TIED, Case, Measured

from .page import Benchmark, Parts, Table

TOLERANCE = 0.01
PARTS = ("parameters", "gradients", "main_parameters", "main_gradients", "exp_avg", "exp_avg_sq")

PLAIN = OptimizerSettings()
BF16_GRADIENTS = OptimizerSettings(use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=False)
PLAIN_BF16_GRADIENTS = OptimizerSettings(accumulate_allreduce_grads_in_fp32=False)

CASES = (
    Case("fp32", dtype="fp32", optimizer=PLAIN),
    Case("fp32, distributed optimizer", dtype="fp32"),
    Case("bf16, bf16 gradients", optimizer=PLAIN_BF16_GRADIENTS),
    Case("bf16", optimizer=PLAIN),
    Case("bf16, bf16 gradients, distributed optimizer", optimizer=BF16_GRADIENTS),
    Case("bf16, distributed optimizer"),
    Case("DP 2", dp=2, optimizer=PLAIN),
    Case("DP 2, distributed optimizer", dp=2),
    Case("TP 2, distributed optimizer", tp=2),
    Case("PP 2, tied embeddings", TIED, pp=2),
    Case("8 experts, EP 2", EXPERTS, ep=2, dp=2),
)


@dataclass(frozen=True)
class Result:
    """What a rank holds, beside what is estimated for its stage."""

    name: str
    account: Measured
    stage: StageEstimate

    def pairs(self) -> dict[str, tuple[int, int]]:
        """Return measured and estimated bytes of each use."""
        return {
            "training": (self.account.live_training, self.stage.training.total),
            "inference-only": (self.account.live_inference, self.stage.inference_only.total),
        }


def measure(quick: bool) -> list[Result]:
    cases = CASES[-1:] if quick else CASES
    measured: dict[str, list[Measured]] = {}
    for ranks in {case.world_size for case in cases}:
        measured |= memory_cases.measure([case for case in cases if case.world_size == ranks])
    return [
        Result(
            case.name if len(measured[case.name]) == 1 else f"{case.name}, rank {account.rank}",
            account,
            stages[account.rank if len(stages) > 1 else 0],
        )
        for case in cases
        if (stages := case.estimate().stages)
        for account in measured[case.name]
    ]


def _difference(measured: int, estimated: int) -> float:
    return estimated / measured - 1


def parts(results: Sequence[Result]) -> Parts:
    return {
        "memory": Table(1, [{"set-up": result.name, **compared(result)} for result in results]),
        "parts": Table(1, [{"set-up": result.name, **_by_part(result)} for result in results]),
    }


def compared(result: Result) -> dict[str, str]:
    cells = {}
    for use, (measured, estimated) in result.pairs().items():
        cells[f"{use}: live"] = f"{measured:,}"
        cells[f"{use}: estimated"] = f"{estimated:,}"
        cells[f"{use}: difference"] = f"{_difference(measured, estimated):+.3%}"
    return cells


def _by_part(result: Result) -> dict[str, str]:
    training = result.account.training
    cells = {part.replace("_", " "): f"{getattr(training, part):,}" for part in PARTS}
    pairs = memory_cases.parts_of(training, result.stage.training)
    largest = max(abs(_difference(measured, estimated)) for _, measured, estimated in pairs)
    return {**cells, "largest difference": f"{largest:.3%}"}


def _is_met(results: Sequence[Result]) -> bool:
    return all(abs(_difference(*pair)) <= TOLERANCE for result in results for pair in result.pairs().values())


BENCHMARK = Benchmark(measure, parts, is_met=_is_met)
