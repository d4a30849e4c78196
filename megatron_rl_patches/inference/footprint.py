"""What training adds to the parameters of a rank, and where.

After megatron-core's ``DistributedDataParallel`` and ``_ParamAndGradBuffer``, ``DistributedOptimizer``,
``Float16OptimizerWithFloat16Params`` and ``HybridDeviceOptimizer``, and TransformerEngine's ``FusedAdam``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ..errors import InvalidInputError
from ._meta_model import Parameter
from .gpt import ParallelSizes

ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_MOMENTS = ("fp32", "bf16", "fp16", "fp8")
#: What Megatron-LM's arguments of the precision-aware optimizer can be.
OPTIMIZER_DTYPES = {
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": _MOMENTS,
    "exp_avg_sq_dtype": _MOMENTS,
}
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FP32 = ITEM_SIZES["fp32"]


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam by the names of Megatron-LM's arguments; dtypes are those of ``OPTIMIZER_DTYPES``.

    Attributes:
        accumulate_allreduce_grads_in_fp32: dtype of the gradient buffers: fp32, or that of the parameters.
            None: as Megatron-LM decides, which for bf16 is fp32 unless ``main_grads_dtype`` says otherwise
            (``--grad-reduce-in-bf16`` is False).
        use_precision_aware_optimizer: moments, main parameters and gradients in the four dtypes below. Needs
            the distributed optimizer, and in reality TransformerEngine.
        store_param_remainders: with bf16 parameters and fp32 main parameters, TransformerEngine 2.1
            keeps only those 16 bits that they do not share.
        optimizer_cpu_offload: a fraction of Adam's state lives, and is updated, in host memory.
    """

    use_distributed_optimizer: bool = False
    accumulate_allreduce_grads_in_fp32: bool | None = None
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    store_param_remainders: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0

    def __post_init__(self) -> None:
        dtypes = {name: getattr(self, name) for name in OPTIMIZER_DTYPES}
        for name, dtype in dtypes.items():
            if dtype not in OPTIMIZER_DTYPES[name]:
                raise InvalidInputError(
                    f"{name} is {dtype!r}; it can be {', '.join(OPTIMIZER_DTYPES[name])}, as in Megatron-LM"
                )
        lower = [name for name, dtype in dtypes.items() if dtype != "fp32"]
        if lower and self.optimizer_cpu_offload:
            raise InvalidInputError(f"{', '.join(lower)}: without effect with optimizer_cpu_offload")
        if self.optimizer_offload_fraction != 1.0 and not self.optimizer_cpu_offload:
            raise InvalidInputError("optimizer_offload_fraction needs optimizer_cpu_offload")
        if not self.use_precision_aware_optimizer:
            if lower:
                raise InvalidInputError(f"{', '.join(lower)}: needs use_precision_aware_optimizer")
        elif not self.use_distributed_optimizer:
            raise InvalidInputError("use_precision_aware_optimizer needs use_distributed_optimizer")
        if self.accumulate_allreduce_grads_in_fp32 and self.main_grads_dtype != "fp32":
            raise InvalidInputError(
                f"accumulate_allreduce_grads_in_fp32 contradicts main_grads_dtype {self.main_grads_dtype!r}"
            )
        if not 0 <= self.optimizer_offload_fraction <= 1:
            raise InvalidInputError(
                f"optimizer_offload_fraction is {self.optimizer_offload_fraction}; it lies between 0 and 1"
            )

    def gradient_dtype(self, dtype: str) -> str:
        """Dtype of the gradient buffers of parameters of some dtype."""
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        if in_fp32 is None:
            in_fp32 = dtype == "bf16" and self.main_grads_dtype == "fp32"
        return "fp32" if in_fp32 else dtype


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, or in host memory for one rank, by what they hold.

    Attributes:
        parameters: with the distributed optimizer, its padding included.
        gradients: the gradient buffers of ``DistributedDataParallel``.
        main_parameters: the copies in higher precision that Adam updates.
        main_gradients: the gradients in fp32 for Adam, where the buffers are not; they come with ``step()``
            and stay until the next ``zero_grad()``, so also while a teacher scores.
        exp_avg: Adam's first moment.
        exp_avg_sq: Adam's second moment.
        teachers: parameters of models that only score.
    """

    parameters: int = 0
    gradients: int = 0
    main_parameters: int = 0
    main_gradients: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    teachers: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __add__(self, other: Memory) -> Memory:
        return Memory(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Footprint:
    """What one rank takes on its device and in host memory."""

    device: Memory = Memory()
    host: Memory = Memory()

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.device + other.device, self.host + other.host)

    def as_dict(self) -> dict[str, dict[str, int]]:
        places = {"device": self.device, "host": self.host}
        return {name: {**asdict(memory), "total": memory.total} for name, memory in places.items()}


def training_footprint(
    chunk: Iterable[Parameter], parallel: ParallelSizes, optimizer: OptimizerSettings
) -> Footprint:
    """One model chunk in DDP with Adam, after its first step."""
    total = Footprint()
    for (dtype, expert), numels in _buffers(chunk).items():
        replicas = parallel.expert_replicas if expert else parallel.replicas
        total += _buffer(numels, dtype, replicas, optimizer)
    return total


def _buffers(chunk: Iterable[Parameter]) -> dict[tuple[str, bool], list[int]]:
    """Sizes of the parameters that share a buffer in DDP, by dtype and whether they are an expert's."""
    buffers: dict[tuple[str, bool], list[int]] = {}
    for numel, dtype, expert in chunk:
        buffers.setdefault((SHORT_NAMES[dtype], expert), []).append(numel)
    return buffers


def _buffer(numels: Sequence[int], dtype: str, replicas: int, optimizer: OptimizerSettings) -> Footprint:
    """Parameters of one dtype and one data-parallel group, with everything that training adds to them."""
    if optimizer.use_distributed_optimizer:
        numel = _padded(numels, replicas)
        shard = numel // replicas
    else:
        numel = shard = sum(numels)
    gradient_dtype = optimizer.gradient_dtype(dtype)
    buffers = Memory(parameters=numel * ITEM_SIZES[dtype], gradients=numel * ITEM_SIZES[gradient_dtype])
    return Footprint(buffers) + _adam(shard, dtype, gradient_dtype, optimizer)


def _padded(numels: Sequence[int], replicas: int) -> int:
    """Length of a ``_ParamAndGradBuffer`` for the distributed optimizer.

    With overlapped gradient reduction a buffer ends a bucket every 40 million parameters or more, which adds
    less than ``lcm(replicas, 128)`` elements each time, and is left out.
    """
    end = 0
    for numel in reversed(numels):
        end = _round_up(end, 64) + numel
    return _round_up(end, math.lcm(replicas, 128))


def _round_up(number: int, divisor: int) -> int:
    return math.ceil(number / divisor) * divisor


def _adam(shard: int, dtype: str, gradient_dtype: str, optimizer: OptimizerSettings) -> Footprint:
    """Main parameters, main gradients and moments of the ``shard`` parameters that this rank updates."""
    if optimizer.use_precision_aware_optimizer and not optimizer.optimizer_cpu_offload:
        return Footprint(_fused_adam(shard, dtype, optimizer))
    fraction = optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 0.0
    on_host = round(shard * fraction)
    on_device = shard - on_host
    # The hybrid optimizer copies to the host what it is given. That are the model's parameters when it is
    # precision-aware, and otherwise the main parameters and gradients, which then stay on the device as well.
    kept = on_device if optimizer.use_precision_aware_optimizer else shard
    device = Memory(
        # fp32 parameters are their own main parameters.
        main_parameters=0 if dtype == "fp32" else kept * _FP32,
        main_gradients=0 if gradient_dtype == "fp32" else kept * _FP32,
        exp_avg=on_device * _FP32,
        exp_avg_sq=on_device * _FP32,
    )
    size = on_host * _FP32
    return Footprint(device, Memory(main_parameters=size, main_gradients=size, exp_avg=size, exp_avg_sq=size))


def _fused_adam(shard: int, dtype: str, optimizer: OptimizerSettings) -> Memory:
    """TransformerEngine's FusedAdam keeps main parameters itself, and reads gradients from the buffer."""
    remainders = (
        optimizer.store_param_remainders and dtype == "bf16" and optimizer.main_params_dtype == "fp32"
    )
    return Memory(
        main_parameters=shard * (2 if remainders else ITEM_SIZES[optimizer.main_params_dtype]),
        exp_avg=shard * ITEM_SIZES[optimizer.exp_avg_dtype],
        exp_avg_sq=shard * ITEM_SIZES[optimizer.exp_avg_sq_dtype],
    )
