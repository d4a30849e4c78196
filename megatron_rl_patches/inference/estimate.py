"""How many bytes a Megatron model takes on each rank: training, scoring, and training beside teachers.

Counted, not measured. Activations, communication buffers, fragmentation of the allocator and the CUDA context
are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInputError
from ._meta_model import Parameter, count_parameters, parameters_of
from .footprint import ITEM_SIZES, SHORT_NAMES, Footprint, Memory, OptimizerSettings, training_footprint
from .gpt import GPTDescription, ParallelSizes

__all__ = [
    "GPTDescription",
    "MemoryEstimate",
    "OptimizerSettings",
    "ParallelSizes",
    "StageEstimate",
    "estimate_memory",
]


@dataclass(frozen=True)
class StageEstimate:
    """One rank of one pipeline stage; all ranks of a stage take the same, to within a shard's padding.

    Attributes:
        dense_parameters: how many parameters this rank holds that are not an expert's.
        expert_parameters: and how many of experts that are split over the expert-parallel group.
        teachers: models of the same shape in a pool.
        with_teachers: training beside that pool: the device holds one of them, host memory all.
    """

    stage: int
    dense_parameters: int
    expert_parameters: int
    teachers: int
    training: Footprint
    inference_only: Footprint
    with_teachers: Footprint

    @property
    def uses(self) -> Mapping[str, Footprint]:
        """By what people call them."""
        uses = {"training": self.training, "inference-only": self.inference_only}
        if self.teachers:
            uses[f"training + {self.teachers} teacher{'s' * (self.teachers > 1)}"] = self.with_teachers
        return uses


@dataclass(frozen=True)
class MemoryEstimate:
    """Per pipeline stage, in bytes."""

    stages: tuple[StageEstimate, ...]

    @property
    def worst(self) -> StageEstimate:
        """The stage that takes most while training."""
        return max(self.stages, key=lambda stage: stage.training.device.total)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; with the sums."""
        return {
            "worst_stage": self.worst.stage,
            "stages": [
                {
                    "stage": stage.stage,
                    "dense_parameters": stage.dense_parameters,
                    "expert_parameters": stage.expert_parameters,
                    "training": stage.training.as_dict(),
                    "inference_only": stage.inference_only.as_dict(),
                    "with_teachers": {"teachers": stage.teachers, **stage.with_teachers.as_dict()},
                }
                for stage in self.stages
            ],
        }


def estimate_memory(
    model: Any,
    *,
    parallel: ParallelSizes | None = None,
    dtype: str = "bf16",
    optimizer: OptimizerSettings | None = None,
    teachers: int = 0,
    **description: Any,
) -> MemoryEstimate:
    """Say how much memory each rank takes for training, for scoring only, and for training beside teachers.

    The parameters of a described model are those of the real ``GPTModel`` of the installed megatron-core: a
    child process builds it for each pipeline stage on the meta device. That takes seconds, and neither a GPU
    nor parallel groups.

    Args:
        model: a :class:`GPTDescription`; a ``TransformerConfig``, with what it lacks as keywords
            (``vocab_size=...``); or the model chunks of this rank (wrapped or not, on any device), whose own
            parameters and dtypes then count, all taken as trainable, and make the one stage of the result.
        parallel: sizes of the groups; by default those of the ``TransformerConfig`` without replicas, or one
            rank. For model chunks they say how many replicas share the optimizer's state.
        dtype: of the parameters, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        optimizer: Adam's settings; by default neither distributed nor offloaded.
        teachers: models of the same shape in the pool.

    Raises:
        InvalidInputError: values that do not fit together, or a model that Megatron does not build.
    """
    if teachers < 0:
        raise InvalidInputError(f"teachers is {teachers}; it must be at least 0")
    if dtype not in SHORT_NAMES.values():
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(SHORT_NAMES.values())}")
    parallel = parallel or ParallelSizes.from_config(model)
    stages = (
        _stage(number, chunks, parallel, optimizer or OptimizerSettings(), teachers)
        for number, chunks in enumerate(_parameters(model, parallel, dtype, description))
    )
    return MemoryEstimate(tuple(stages))


def _parameters(
    model: Any, parallel: ParallelSizes, dtype: str, description: Mapping[str, Any]
) -> Sequence[Sequence[Sequence[Parameter]]]:
    """Of each chunk of each stage."""
    if isinstance(model, GPTDescription) and not description:
        return count_parameters(model, parallel, dtype)

    from megatron.core.transformer import TransformerConfig
    from torch.nn import Module

    if isinstance(model, TransformerConfig):
        return count_parameters(GPTDescription.from_config(model, **description), parallel, dtype)
    if description:
        raise InvalidInputError(f"{', '.join(description)}: only a TransformerConfig takes these")
    chunks = [model] if isinstance(model, Module) else model
    if not (isinstance(chunks, Sequence) and chunks and all(isinstance(chunk, Module) for chunk in chunks)):
        raise InvalidInputError(
            f"model is a {type(model).__name__}; expected: GPTDescription, TransformerConfig or model chunks"
        )
    parameters = [parameters_of(chunk) for chunk in chunks]
    if strange := {p.dtype for chunk in parameters for p in chunk} - SHORT_NAMES.keys():
        raise InvalidInputError(
            f"parameters of dtype {', '.join(sorted(strange))}: counted are {', '.join(SHORT_NAMES)}"
        )
    return [parameters]


def _stage(
    number: int,
    chunks: Sequence[Sequence[Parameter]],
    parallel: ParallelSizes,
    optimizer: OptimizerSettings,
    teachers: int,
) -> StageEstimate:
    training = sum((training_footprint(chunk, parallel, optimizer) for chunk in chunks), Footprint())
    parameters = [parameter for chunk in chunks for parameter in chunk]
    weights = sum(p.numel * ITEM_SIZES[SHORT_NAMES[p.dtype]] for p in parameters)
    pool = Footprint(Memory(teachers=weights if teachers else 0), Memory(teachers=teachers * weights))
    return StageEstimate(
        stage=number,
        dense_parameters=sum(p.numel for p in parameters if not p.expert),
        expert_parameters=sum(p.numel for p in parameters if p.expert),
        teachers=teachers,
        training=training,
        inference_only=Footprint(Memory(parameters=weights)),
        with_teachers=training + pool,
    )
