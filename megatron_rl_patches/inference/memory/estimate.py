"""How many bytes a Megatron model takes on each rank: training, scoring, and training beside teachers.

Source of what training takes: megatron-core's ``DistributedDataParallel`` and ``_ParamAndGradBuffer``,
``DistributedOptimizer``, ``Float16OptimizerWithFloat16Params`` and ``HybridDeviceOptimizer``, and
TransformerEngine's ``FusedAdam``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...common.chunks import as_chunks
from ...errors import InvalidInputError
from .count import ITEM_SIZES, Parameter, Stage, count_parameters, parameters_of
from .model import GPTDescription as GPTDescription
from .model import ParallelSizes as ParallelSizes

_FP32 = ITEM_SIZES["fp32"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam by the names of Megatron-LM's arguments, with both moments in fp32.

    Attributes:
        use_distributed_optimizer: replicas share the optimizer's state.
        accumulate_allreduce_grads_in_fp32: gradient buffers in fp32, or in the dtype of the parameters
            (``--grad-reduce-in-bf16``). ``None``: fp32 for bf16 parameters, as Megatron-LM decides.
        use_precision_aware_optimizer: TransformerEngine keeps only those 16 bits of the main parameters that
            bf16 parameters lack. Needs the distributed optimizer.
        optimizer_cpu_offload: Adam's state lives, and is updated, in host memory.
    """

    use_distributed_optimizer: bool = False
    accumulate_allreduce_grads_in_fp32: bool | None = None
    use_precision_aware_optimizer: bool = False
    optimizer_cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise InvalidInputError("use_precision_aware_optimizer needs use_distributed_optimizer")

    def gradient_dtype(self, dtype: str) -> str:
        """Return the dtype of the gradient buffers of parameters of some dtype."""
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        return "fp32" if (dtype == "bf16" if in_fp32 is None else in_fp32) else dtype


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, or in host memory for one rank, by what they hold.

    Attributes:
        parameters: the weights and the biases of routers; with the distributed optimizer, its padding too.
        main_parameters: the copies in higher precision that Adam updates.
        main_gradients: copies of the gradients in fp32, if the buffers are not. They exist from ``step()`` to
            the next ``zero_grad()``, so also while a teacher scores.
        teacher_heads: output layers that stay when another teacher takes the model.
    """

    parameters: int = 0
    gradients: int = 0
    main_parameters: int = 0
    main_gradients: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    teachers: int = 0
    teacher_heads: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())

    def __add__(self, other: Memory) -> Memory:
        return Memory(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank on its device and in host memory."""

    device: Memory = Memory()
    host: Memory = Memory()

    def __add__(self, other: RankMemory) -> RankMemory:
        return RankMemory(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class StageEstimate:
    """Memory of one rank of a pipeline stage; ranks of a stage differ by no more than a shard's padding.

    ``with_teachers`` is training beside a pool of ``teachers`` models: the device holds one, host memory all.
    Layers of multi-token prediction are part of ``training`` and of the numbers of parameters, but not of
    ``inference_only`` and of teachers, as :func:`.build_inference_model` builds them.
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
        stages = [asdict(stage) for stage in self.stages]
        for stage in stages:
            for use in ("training", "inference_only", "with_teachers"):
                for memory in stage[use].values():
                    memory["total"] = sum(memory.values())
            stage["with_teachers"]["teachers"] = stage.pop("teachers")
        return {"worst_stage": self.worst.stage, "stages": stages}


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
    nor parallel groups. Activations, communication buffers, fragmentation of the allocator and the CUDA
    context are not counted.

    Args:
        model: a :class:`GPTDescription`; a ``TransformerConfig``, with what it lacks as keywords
            (``vocab_size=...``); or the model chunks of this rank (wrapped or not, on any device). Then their
            own parameters and dtypes count, all as trainable, and make the one stage of the result.
        parallel: sizes of the groups; by default those of the ``TransformerConfig`` without replicas, or one
            rank. Unless these sizes say it, the config says how layers are split among pipeline stages.
        dtype: of the parameters, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        teachers: models of the same shape in the pool.
        teacher_heads: the device also holds all their output layers, as :meth:`.TeacherPool.head` keeps them.

    Raises:
        InvalidInputError: values that do not fit together, or a model that Megatron does not build.
    """
    if teachers < 0:
        raise InvalidInputError(f"teachers is {teachers}; it must be at least 0")
    if dtype not in ITEM_SIZES:
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(ITEM_SIZES)}")
    own_sizes = ParallelSizes.from_config(model)
    parallel = parallel.split_as(own_sizes) if parallel else own_sizes
    optimizer = optimizer or OptimizerSettings()
    stages = []
    for number, chunks in enumerate(_parameters(model, parallel, dtype, description)):
        parameters = [p for chunk in chunks.training for p in chunk if p.trained]
        scoring = [p for chunk in chunks.inference_only for p in chunk]
        weights = sum(p.nbytes for p in scoring)
        heads = teachers * sum(p.nbytes for p in scoring if p.head) if teacher_heads else 0
        on_device = Memory(teachers=weights if teachers else 0, teacher_heads=heads)
        pool = RankMemory(on_device, Memory(teachers=teachers * weights))
        training = sum((_in_training(chunk, parallel, optimizer) for chunk in chunks.training), RankMemory())
        stages.append(
            StageEstimate(
                stage=number,
                dense_parameters=sum(p.numel for p in parameters if not p.expert),
                expert_parameters=sum(p.numel for p in parameters if p.expert),
                teachers=teachers,
                training=training,
                inference_only=RankMemory(Memory(parameters=weights)),
                with_teachers=training + pool,
            )
        )
    return MemoryEstimate(tuple(stages))


def _parameters(
    model: Any, parallel: ParallelSizes, dtype: str, description: Mapping[str, Any]
) -> Sequence[Stage]:
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
    return [Stage(parameters, parameters)]


def _in_training(
    chunk: Sequence[Parameter], parallel: ParallelSizes, optimizer: OptimizerSettings
) -> RankMemory:
    """Return the memory of one model chunk in DDP with Adam, after its first step."""
    # DDP has a buffer for each dtype, and others for experts.
    buffers: dict[tuple[str, bool], list[int]] = {}
    for parameter in chunk:
        if parameter.trained:
            buffers.setdefault((parameter.dtype, parameter.expert), []).append(parameter.numel)
    memory = RankMemory(Memory(parameters=sum(p.nbytes for p in chunk if not p.trained)))
    for (dtype, expert), numels in buffers.items():
        numel = shard = sum(numels)
        if optimizer.use_distributed_optimizer:
            replicas = parallel.expert_replicas if expert else parallel.replicas
            numel = _padded(numels, replicas)
            shard = numel // replicas
        gradients = numel * ITEM_SIZES[optimizer.gradient_dtype(dtype)]
        memory += RankMemory(Memory(parameters=numel * ITEM_SIZES[dtype], gradients=gradients))
        memory += _adam(shard, dtype, optimizer)
    return memory


def _padded(numels: Sequence[int], replicas: int) -> int:
    """Return the length of a ``_ParamAndGradBuffer`` for the distributed optimizer.

    The padding of buckets, a few kilobytes in 40 million parameters, is left out.
    """
    end = 0
    for numel in reversed(numels):
        end += -end % 64 + numel
    return end + -end % math.lcm(replicas, 128)


def _adam(shard: int, dtype: str, optimizer: OptimizerSettings) -> RankMemory:
    """Return main parameters, main gradients and moments of the ``shard`` parameters that a rank updates."""
    precision_aware, offload = optimizer.use_precision_aware_optimizer, optimizer.optimizer_cpu_offload
    size = shard * _FP32
    if precision_aware and not offload:
        # FusedAdam keeps the main parameters itself, and reads gradients from the buffer.
        main_parameters = shard * 2 if dtype == "bf16" else size
        return RankMemory(Memory(main_parameters=main_parameters, exp_avg=size, exp_avg_sq=size))
    # The offloaded optimizer copies its input to host memory: if it is precision-aware, the model's
    # parameters; else main parameters and main gradients, which stay on the device too.
    main = 0 if precision_aware else size
    device = Memory(
        # fp32 parameters are their own main parameters.
        main_parameters=0 if dtype == "fp32" else main,
        main_gradients=0 if optimizer.gradient_dtype(dtype) == "fp32" else main,
        exp_avg=0 if offload else size,
        exp_avg_sq=0 if offload else size,
    )
    host = Memory(main_parameters=size, main_gradients=size, exp_avg=size, exp_avg_sq=size)
    return RankMemory(device, host if offload else Memory())
