"""How many bytes training adds to the parameters of a rank, on the device and in host memory.

Source: megatron-core's ``DistributedDataParallel`` and ``_ParamAndGradBuffer``, ``DistributedOptimizer``,
``Float16OptimizerWithFloat16Params`` and ``HybridDeviceOptimizer``, and TransformerEngine's ``FusedAdam``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import InvalidInputError
from .count import Parameter
from .model import ParallelSizes

ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
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
        parameters: the weights; with the distributed optimizer, its padding included.
        main_parameters: the copies in higher precision that Adam updates.
        main_gradients: copies of the gradients in fp32 for Adam, if the buffers are not in fp32. They exist
            from ``step()`` to the next ``zero_grad()``, so also while a teacher scores.
        teachers: parameters of models that only score.
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

    def as_dict(self) -> dict[str, Any]:
        """Return the parts and their sum of each place, for JSON."""
        places = {"device": self.device, "host": self.host}
        return {name: {**asdict(memory), "total": memory.total} for name, memory in places.items()}


def training_memory(
    chunk: Iterable[Parameter], parallel: ParallelSizes, optimizer: OptimizerSettings
) -> RankMemory:
    """Return the memory of one model chunk in DDP with Adam, after its first step."""
    # DDP has a buffer for each dtype, and others for experts.
    buffers: dict[tuple[str, bool], list[int]] = {}
    for parameter in chunk:
        key = SHORT_NAMES[parameter.dtype], parameter.expert
        buffers.setdefault(key, []).append(parameter.numel)
    total = RankMemory()
    for (dtype, expert), numels in buffers.items():
        replicas = parallel.expert_replicas if expert else parallel.replicas
        total += _buffer(numels, dtype, replicas, optimizer)
    return total


def _buffer(numels: Sequence[int], dtype: str, replicas: int, optimizer: OptimizerSettings) -> RankMemory:
    """Return the memory that parameters of one dtype and one data-parallel group take in training."""
    if optimizer.use_distributed_optimizer:
        numel = _padded(numels, replicas)
        shard = numel // replicas
    else:
        numel = shard = sum(numels)
    gradient_dtype = optimizer.gradient_dtype(dtype)
    buffers = Memory(parameters=numel * ITEM_SIZES[dtype], gradients=numel * ITEM_SIZES[gradient_dtype])
    return RankMemory(buffers) + _adam(shard, dtype, gradient_dtype, optimizer)


def _padded(numels: Sequence[int], replicas: int) -> int:
    """Return the length of a ``_ParamAndGradBuffer`` for the distributed optimizer.

    With overlapped gradient reduction a buffer ends a bucket every 40 million parameters or more, which adds
    less than ``lcm(replicas, 128)`` elements each time, and is left out.
    """
    end = 0
    for numel in reversed(numels):
        end += -end % 64 + numel
    return end + -end % math.lcm(replicas, 128)


def _adam(shard: int, dtype: str, gradient_dtype: str, optimizer: OptimizerSettings) -> RankMemory:
    """Return main parameters, main gradients and moments of the ``shard`` parameters that a rank updates."""
    precision_aware, offload = optimizer.use_precision_aware_optimizer, optimizer.optimizer_cpu_offload
    size = shard * _FP32
    if precision_aware and not offload:
        # FusedAdam keeps the main parameters itself, and reads gradients from the buffer.
        main_parameters = shard * 2 if dtype == "bf16" else size
        return RankMemory(Memory(main_parameters=main_parameters, exp_avg=size, exp_avg_sq=size))
    # What is offloaded is a copy: of the model's parameters if the optimizer is precision-aware, else of main
    # parameters and gradients, which then stay on the device as well.
    copied = 0 if precision_aware else size
    device = Memory(
        # fp32 parameters are their own main parameters.
        main_parameters=0 if dtype == "fp32" else copied,
        main_gradients=0 if gradient_dtype == "fp32" else copied,
        exp_avg=0 if offload else size,
        exp_avg_sq=0 if offload else size,
    )
    host = Memory(main_parameters=size, main_gradients=size, exp_avg=size, exp_avg_sq=size)
    return RankMemory(device, host if offload else Memory())
