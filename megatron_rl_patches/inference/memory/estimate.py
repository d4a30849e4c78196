"""How many bytes a Megatron model takes on each rank: training, scoring, and training beside teachers.

The bytes are counted, not measured, and leave out activations, communication buffers, fragmentation of the
allocator and the CUDA context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.chunks import as_chunks
from ...errors import InvalidInputError
from .count import Parameter, count_parameters, parameters_of
from .model import GPTDescription as GPTDescription
from .model import ParallelSizes as ParallelSizes
from .training import ITEM_SIZES, SHORT_NAMES, Memory, RankMemory, training_memory
from .training import OptimizerSettings as OptimizerSettings


@dataclass(frozen=True)
class StageEstimate:
    """Memory of one rank of a pipeline stage; ranks of a stage differ by no more than a shard's padding.

    Attributes:
        teachers: number of models of the same shape in a pool.
        with_teachers: training beside that pool: the device holds one of them, host memory all.
    """

    stage: int
    dense_parameters: int
    expert_parameters: int
    teachers: int
    training: RankMemory
    inference_only: RankMemory
    with_teachers: RankMemory

    @property
    def scenarios(self) -> Mapping[str, RankMemory]:
        """Memory by the name of what the rank does."""
        scenarios = {"training": self.training, "inference-only": self.inference_only}
        if self.teachers:
            scenarios[f"training + {self.teachers} teacher{'s' * (self.teachers > 1)}"] = self.with_teachers
        return scenarios

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate and its sums, for JSON."""
        memory = {
            name: value.as_dict() for name, value in vars(self).items() if isinstance(value, RankMemory)
        }
        memory["with_teachers"]["teachers"] = self.teachers
        return {name: memory.get(name, value) for name, value in vars(self).items() if name != "teachers"}


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimates of all pipeline stages, in bytes."""

    stages: tuple[StageEstimate, ...]

    @property
    def worst(self) -> StageEstimate:
        """The stage that takes most device memory while training."""
        return max(self.stages, key=lambda stage: stage.training.device.total)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate and its sums, for JSON."""
        return {"worst_stage": self.worst.stage, "stages": [stage.as_dict() for stage in self.stages]}


def estimate_memory(
    model: Any,
    *,
    parallel: ParallelSizes | None = None,
    dtype: str = "bf16",
    optimizer: OptimizerSettings | None = None,
    teachers: int = 0,
    teacher_heads: bool = False,
    **description: Any,
) -> MemoryEstimate:
    """Estimate the memory of each rank for training, for scoring only, and for training beside teachers.

    The parameters of a described model are those of the real ``GPTModel`` of the installed megatron-core: a
    child process builds it for each pipeline stage on the meta device. That takes seconds, and neither a GPU
    nor parallel groups.

    Args:
        model: a :class:`GPTDescription`; a ``TransformerConfig``, with what it lacks as keywords
            (``vocab_size=...``); or the model chunks of this rank (wrapped or not, on any device). Then their
            own parameters and dtypes count, all as trainable, and make the one stage of the result.
        parallel: sizes of the groups; by default those of the ``TransformerConfig`` without replicas, or one
            rank. How the config splits its layers among pipeline stages counts in either case, unless these
            sizes say it. For model chunks they say how many replicas share the optimizer's state.
        dtype: of the parameters, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        optimizer: Adam's settings; by default neither distributed nor offloaded.
        teachers: models of the same shape in the pool.
        teacher_heads: the output layers of all of them are on the device as well, as
            :meth:`.TeacherPool.head` keeps them.

    Raises:
        InvalidInputError: values that do not fit together, or a model that Megatron does not build.
    """
    if teachers < 0:
        raise InvalidInputError(f"teachers is {teachers}; it must be at least 0")
    if dtype not in SHORT_NAMES.values():
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(SHORT_NAMES.values())}")
    own_sizes = ParallelSizes.from_config(model)
    parallel = parallel.split_as(own_sizes) if parallel else own_sizes
    optimizer = optimizer or OptimizerSettings()
    stages = enumerate(_parameters(model, parallel, dtype, description))
    heads = teachers if teacher_heads else 0
    return MemoryEstimate(tuple(_stage(*stage, parallel, optimizer, teachers, heads) for stage in stages))


def _parameters(
    model: Any, parallel: ParallelSizes, dtype: str, description: Mapping[str, Any]
) -> Sequence[Sequence[Sequence[Parameter]]]:
    """Return the parameters of each chunk of each stage."""
    if isinstance(model, GPTDescription) and not description:
        return count_parameters(model, parallel, dtype)

    from megatron.core.transformer import TransformerConfig
    from torch.nn import Module

    if isinstance(model, TransformerConfig):
        return count_parameters(GPTDescription.from_config(model, **description), parallel, dtype)
    if description:
        raise InvalidInputError(f"{', '.join(description)}: only a TransformerConfig takes these")
    chunks = as_chunks(model)
    if not (chunks and all(isinstance(chunk, Module) for chunk in chunks)):
        raise InvalidInputError(
            f"model is a {type(model).__name__}; expected: GPTDescription, TransformerConfig or model chunks"
        )
    parameters = [parameters_of(chunk) for chunk in chunks]
    if unknown := {p.dtype for chunk in parameters for p in chunk} - SHORT_NAMES.keys():
        raise InvalidInputError(
            f"parameters of dtype {', '.join(sorted(unknown))}: counted are {', '.join(SHORT_NAMES)}"
        )
    return [parameters]


def _stage(
    number: int,
    chunks: Sequence[Sequence[Parameter]],
    parallel: ParallelSizes,
    optimizer: OptimizerSettings,
    teachers: int,
    heads: int,
) -> StageEstimate:
    training = sum((training_memory(chunk, parallel, optimizer) for chunk in chunks), RankMemory())
    parameters = [parameter for chunk in chunks for parameter in chunk]
    sizes = [(p.numel * ITEM_SIZES[SHORT_NAMES[p.dtype]], p.head) for p in parameters]
    weights, head = sum(size for size, _ in sizes), sum(size for size, is_head in sizes if is_head)
    on_device = Memory(teachers=weights if teachers else 0, teacher_heads=heads * head)
    pool = RankMemory(on_device, Memory(teachers=teachers * weights))
    return StageEstimate(
        stage=number,
        dense_parameters=sum(p.numel for p in parameters if not p.expert),
        expert_parameters=sum(p.numel for p in parameters if p.expert),
        teachers=teachers,
        training=training,
        inference_only=RankMemory(Memory(parameters=weights)),
        with_teachers=training + pool,
    )
