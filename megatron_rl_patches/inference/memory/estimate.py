"""How many bytes a Megatron model takes on each rank: training, scoring, and training next to teachers.

Sources: megatron-core's ``DistributedDataParallel``, ``_ParamAndGradBuffer``, ``DistributedOptimizer`` and
optimizers for 16 bits and host memory; TransformerEngine's ``FusedAdam``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...common.chunks import as_chunks, config_of
from ...errors import InvalidInputError
from .parameters import ITEM_SIZES, GPTArguments, Parameter, Stage, count_parameters, parameters_of

_Fields = Mapping[str, Any]
_SIZES = [f"{name}_parallel_size" for name in ("tensor_model", "context", "expert_model", "expert_tensor")]


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
        for name, value in vars(self).items():
            if type(value) is not bool and (name, value) != ("accumulate_allreduce_grads_in_fp32", None):
                raise InvalidInputError(f"{name} is {value!r}; expected true or false")
        if self.use_precision_aware_optimizer and not self.use_distributed_optimizer:
            raise InvalidInputError("use_precision_aware_optimizer needs use_distributed_optimizer")

    def gradient_dtype(self, dtype: str) -> str:
        """Return the dtype of the gradient buffers of parameters of some dtype."""
        in_fp32 = self.accumulate_allreduce_grads_in_fp32
        return "fp32" if in_fp32 or (in_fp32 is None and dtype == "bf16") else dtype


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, by what they hold: all on its device but ``host``.

    Attributes:
        parameters: the weights and the biases of routers; with the distributed optimizer, its padding too.
        main_parameters: the copies in higher precision that Adam updates.
        main_gradients: copies of the gradients in fp32, if the buffers are not. They exist from ``step()`` to
            the next ``zero_grad()``, so also while a teacher scores.
        teacher_heads: output layers that stay when another teacher takes the model.
        host: an offloaded optimizer, and the teachers.
    """

    parameters: int = 0
    gradients: int = 0
    main_parameters: int = 0
    main_gradients: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    teachers: int = 0
    teacher_heads: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts on the device."""
        return sum(asdict(self).values()) - self.host

    def __add__(self, other: Memory) -> Memory:
        return Memory(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class StageEstimate:
    """Memory of one rank of a pipeline stage; ranks of a stage differ by no more than a shard's padding.

    ``with_teachers`` is training next to a pool of models: the device holds one, host memory all. Layers of
    multi-token prediction count in training and as parameters, but not in ``inference_only`` and teachers.
    """

    dense_parameters: int
    expert_parameters: int
    training: Memory
    inference_only: Memory
    with_teachers: Memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimates of all stages, in bytes, with a pool of ``teachers`` models; ``loss`` is of a microbatch."""

    stages: tuple[StageEstimate, ...]
    teachers: int = 0
    loss: dict[str, int] | None = None

    @property
    def worst(self) -> StageEstimate:
        """The stage that takes most device memory while training."""
        return max(self.stages, key=lambda stage: stage.training.total)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate and its sums, for JSON."""
        stages = [asdict(stage) for stage in self.stages]
        for answer, stage in zip(stages, self.stages, strict=True):
            for use in ("training", "inference_only", "with_teachers"):
                answer[use]["total"] = getattr(stage, use).total
        return {"worst_stage": self.stages.index(self.worst), **vars(self), "stages": stages}


def estimate_memory(
    model: Any,
    *,
    data_parallel_size: int | None = None,
    dtype: str = "bf16",
    optimizer: OptimizerSettings | None = None,
    teachers: int = 0,
    teacher_heads: bool = False,
    tokens: int | None = None,
    response_share: float = 1.0,
    **described: Any,
) -> MemoryEstimate:
    """Estimate the memory of each rank for training, for scoring only, and for training next to teachers.

    A child process builds each pipeline stage of a described model on the meta device: the real ``GPTModel``
    of the installed megatron-core, with local layers, which have the parameters of TransformerEngine's. That
    takes seconds, and neither a GPU nor parallel groups. Activations, communication buffers, fragmentation of
    the allocator and the CUDA context are not counted, logits and loss only with ``tokens``.

    Args:
        model: fields of a ``TransformerConfig`` by name, sizes of parallel groups among them; or a
            ``TransformerConfig``; or the model chunks of this rank, wrapped or not, on any device. Of chunks
            their own parameters and dtypes count, all as trainable; they make the one stage of the result.
        data_parallel_size: replicas, without context parallelism; by default as few as the experts need.
        dtype: of the parameters, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        teachers: models of the same shape in the pool.
        teacher_heads: the device also holds all their output layers, as :meth:`.TeacherPool.head` keeps them.
        tokens: of a microbatch, on all context-parallel ranks. ``loss`` is then the peak of its logits and
            loss in training on a GPU at temperature 1, with the output layer's gradients: of ``"stock"`` code
            (Megatron's, and slime's policy loss of August 2026 with an entropy bonus), and with two patches.
        response_share: of these tokens, above 0 and at most 1. It matters to ``lean-head`` alone.
        described: fields that come before those of the model, and what it lacks of :class:`.GPTArguments`.

    Raises:
        InvalidInputError: values that do not fit together, or a model that Megatron does not build.
    """
    if not (tokens is None or (isinstance(tokens, int) and tokens > 0)) or not 0 < response_share <= 1:
        values = f"tokens is {tokens!r} and response_share {response_share!r}"
        raise InvalidInputError(f"{values}; expected an integer above 0, and a share above 0 up to 1")
    if teachers < 0:
        raise InvalidInputError(f"teachers is {teachers}; it must be at least 0")
    if dtype not in ITEM_SIZES:
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(ITEM_SIZES)}")
    sizes, counted = _parameters(model, described, dtype)
    replicas = _replicas(sizes, data_parallel_size)
    optimizer = optimizer or OptimizerSettings()
    stages = []
    for chunks in counted:
        parameters = [p for chunk in chunks.training for p in chunk if p.trained]
        scoring = [p for chunk in chunks.inference_only for p in chunk]
        weights = sum(p.nbytes for p in scoring)
        heads = teachers * sum(p.nbytes for p in scoring if p.head) if teacher_heads else 0
        pool = Memory(teachers=weights if teachers else 0, teacher_heads=heads, host=teachers * weights)
        training = sum((_in_training(chunk, replicas, optimizer) for chunk in chunks.training), Memory())
        dense, expert = (sum(p.numel for p in parameters if p.expert is kind) for kind in (False, True))
        stages.append(StageEstimate(dense, expert, training, Memory(parameters=weights), training + pool))
    loss = None if tokens is None else loss_memory(tokens, response_share, sizes, dtype)
    return MemoryEstimate(tuple(stages), teachers, loss)


def loss_memory(tokens: int, share: float, fields: _Fields, dtype: str) -> dict[str, int]:
    from ...losses.vocab.output_layer import bytes_of_tile

    if "hidden_size" not in fields:
        raise InvalidInputError("tokens need a model that is described, not chunks: pass its config")
    own = GPTArguments(**{name: fields[name] for name in GPTArguments.__annotations__ if name in fields})
    tensor, context = (fields.get(name) or 1 for name in _SIZES[:2])
    rows, columns, item = -(-tokens // context), own.padded_vocab_size(tensor) // tensor, ITEM_SIZES[dtype]
    selected, of_row = math.ceil(rows * share), fields["hidden_size"] * item
    selected_logits, in_fp32 = selected * columns * item, rows * columns * 4
    # Stock code multiplies the gradient of all logits twice, in the dtype of the parameters.
    layer = rows * columns * item + (rows + columns) * of_row
    # lean-head sums the gradient of hidden states in fp32, converts it, and spreads it over all rows.
    head = min(bytes_of_tile(selected_logits, "cuda"), selected_logits) + columns * of_row
    head += selected * (fields["hidden_size"] * 4 + (of_row if item < 4 else 0))
    head += (selected + rows) * of_row if selected < rows else 0
    head += rows * of_row if fields.get("sequence_parallel") and tensor > 1 else 0  # all hidden states
    # Beside the logits, slime keeps a softmax, and makes a gradient of the entropy; lean-loss a gradient.
    return {"stock": max(layer, 3 * in_fp32), "lean-loss": max(layer, 2 * in_fp32), "lean-head": head}


def _parameters(model: Any, described: _Fields, dtype: str) -> tuple[_Fields, Sequence[Stage]]:
    """Return the sizes of the parallel groups, among other fields, and the parameters of the stages."""
    if not isinstance(model, Mapping):
        from megatron.core.transformer import TransformerConfig

        model = fields_of(model) if isinstance(model, TransformerConfig) else model
    if isinstance(model, Mapping):
        described = {**model, **described}
        return described, count_parameters(described, dtype)

    from torch.nn import Module

    chunks = as_chunks(model)
    if not (chunks and all(isinstance(chunk, Module) for chunk in chunks)):
        raise InvalidInputError(
            f"model is a {type(model).__name__}; expected: a TransformerConfig, its fields, or model chunks"
        )
    if others := described.keys() - set(_SIZES):
        raise InvalidInputError(f"{', '.join(others)}: model chunks take only the sizes {', '.join(_SIZES)}")
    sizes = {name: getattr(config_of(chunks[0]), name, None) for name in _SIZES}
    parameters = [parameters_of(chunk) for chunk in chunks]
    return {**sizes, **described}, [Stage(parameters, parameters)]


def fields_of(config: Any) -> dict[str, Any]:
    """Return the fields of a ``TransformerConfig``, or of Megatron-Bridge's subclass, that JSON can hold."""
    from megatron.core.transformer import MLATransformerConfig

    names = [field.name for field in (*fields(MLATransformerConfig), *fields(GPTArguments))]
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    values = {name: getattr(value, "input_data", value) for name, value in values.items()}  # of a layout
    plain = (bool, int, float, str, list, tuple, type(None))
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def _replicas(sizes: Mapping[str, Any], data_parallel_size: int | None) -> tuple[int, int]:
    """Return how many ranks share the gradients of a dense parameter, and of an expert's."""
    tensor, context, experts = (sizes.get(name) or 1 for name in _SIZES[:3])
    experts *= sizes.get(_SIZES[3]) or tensor  # ranks that hold one copy of all experts
    fewest = experts // math.gcd(experts, tensor * context)
    replicas = fewest if data_parallel_size is None else data_parallel_size
    if replicas < 1 or replicas % fewest:
        raise InvalidInputError(
            f"data_parallel_size is {replicas}; it must be a multiple of {fewest}: the ranks of a stage "
            f"(tensor × context × data parallel) hold whole copies of all experts, on {experts} ranks each"
        )
    return replicas * context, replicas * context * tensor // experts


def _in_training(
    chunk: Sequence[Parameter], replicas: tuple[int, int], optimizer: OptimizerSettings
) -> Memory:
    """Return the memory of one model chunk in DDP with Adam, after its first step."""
    # DDP has a buffer for each dtype, and others for experts.
    buffers: dict[tuple[str, bool], list[int]] = {}
    for parameter in chunk:
        if parameter.trained:
            buffers.setdefault((parameter.dtype, parameter.expert), []).append(parameter.numel)
    memory = Memory(parameters=sum(p.nbytes for p in chunk if not p.trained))
    for (dtype, expert), numels in buffers.items():
        numel = shard = sum(numels)
        if optimizer.use_distributed_optimizer:
            numel = _padded(numels, replicas[expert])
            shard = numel // replicas[expert]
        gradients = numel * ITEM_SIZES[optimizer.gradient_dtype(dtype)]
        memory += Memory(parameters=numel * ITEM_SIZES[dtype], gradients=gradients)
        memory += _adam(shard, dtype, optimizer)
    return memory


def _padded(numels: Sequence[int], replicas: int) -> int:
    """Return the length of a distributed optimizer's buffer, without the little padding of its buckets."""
    end = 0
    for numel in reversed(numels):
        end += -end % 64 + numel
    return end + -end % math.lcm(replicas, 128)


def _adam(shard: int, dtype: str, optimizer: OptimizerSettings) -> Memory:
    """Return main parameters, main gradients and moments of the ``shard`` parameters that a rank updates."""
    precision_aware, offload = optimizer.use_precision_aware_optimizer, optimizer.optimizer_cpu_offload
    size = shard * ITEM_SIZES["fp32"]
    # An offloaded optimizer has main parameters, main gradients and both moments in host memory.
    memory = Memory(host=4 * size) if offload else Memory(exp_avg=size, exp_avg_sq=size)
    if not precision_aware:  # these stay on the device, also if the offloaded optimizer copies them
        main_parameters = 0 if dtype == "fp32" else size  # fp32 parameters are their own
        main_gradients = 0 if optimizer.gradient_dtype(dtype) == "fp32" else size
        return memory + Memory(main_parameters=main_parameters, main_gradients=main_gradients)
    if offload:  # it copies the model's parameters
        return memory
    # FusedAdam keeps the main parameters itself, and reads gradients from the buffer.
    return memory + Memory(main_parameters=shard * 2 if dtype == "bf16" else size)
