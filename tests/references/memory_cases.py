"""Real models in training and in scoring, and what they really hold; beside it what the estimate says.

The benchmark prints these, the tests hold them to one percent.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.parallel_state import get_pipeline_model_parallel_rank
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_rl_patches.inference import build_inference_model
from megatron_rl_patches.inference.memory.estimate import (
    Memory,
    MemoryEstimate,
    OptimizerSettings,
    estimate_memory,
)
from megatron_rl_patches.testing import TinyModel, spawn_ranks
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.references.one_device import gpu_or_cpu

DENSE: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 768,
    "vocab_size": 4000,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "share_embeddings_and_output_weights": False,
}
TIED: Mapping[str, Any] = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 4000}
EXPERTS: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "add_bias_linear": False,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 256,
}
DISTRIBUTED = OptimizerSettings(use_distributed_optimizer=True)
SEQUENCE = tiny_gpt.SEQUENCE
# Fields of a model that are no fields of a TransformerConfig.
_OF_GPT_MODEL = ("vocab_size", "share_embeddings_and_output_weights")


@dataclass(frozen=True)
class Case:
    """A model, its groups and its optimizer, as :func:`estimate_memory` takes them."""

    name: str
    model: Mapping[str, Any] = field(default_factory=lambda: DENSE)
    dtype: str = "bf16"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    optimizer: OptimizerSettings = DISTRIBUTED

    def estimate(self) -> MemoryEstimate:
        sizes = {"tensor": self.tp, "pipeline": self.pp, "expert": self.ep}
        model = {**self.model, **{f"{name}_model_parallel_size": size for name, size in sizes.items()}}
        dp, optimizer = self.dp, self.optimizer
        return estimate_memory(model, data_parallel_size=dp, dtype=self.dtype, optimizer=optimizer)

    @property
    def tiny(self) -> TinyModel:
        """Groups, config and training; the model is another."""
        return TinyModel(
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            bf16=self.dtype == "bf16",
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            use_distributed_optimizer=self.optimizer.use_distributed_optimizer,
            grad_reduce_in_fp32=self.optimizer.gradient_dtype(self.dtype) == "fp32",
            config={name: value for name, value in self.model.items() if name not in _OF_GPT_MODEL},
        )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


class Measured(NamedTuple):
    """One rank's account, in bytes.

    Attributes:
        training: storages that model and optimizer hold after a step, by what they are for.
        from_chunks: what the estimate says of the model chunks of this rank.
        live_training: all tensors that came to life with them, whoever holds them.
        allocated_training: by the CUDA allocator; 0 on the CPU.
    """

    rank: int
    training: Memory
    from_chunks: MemoryEstimate
    live_training: int
    allocated_training: int
    live_inference: int
    allocated_inference: int


def measure(cases: Sequence[Case], env: Mapping[str, str] | None = None) -> dict[str, list[Measured]]:
    """Of each case, by rank. All must have the same number of ranks, which get the variables of ``env``."""
    [ranks] = {case.world_size for case in cases}
    accounts = spawn_ranks(_measure_all, ranks, cases, timeout=60 + 60 * len(cases), env=env)
    return {case.name: [account[case.name] for account in accounts] for case in cases}


def _measure_all(cases: Sequence[Case]) -> dict[str, Measured]:
    with gpu_or_cpu() as device:
        gc.freeze()  # what is imported is no garbage, nor a tensor of a case: each count takes a fraction
        _measure(cases[0], device)  # lasting tensors come with the first model: random streams, masks
        return {case.name: _measure(case, device) for case in cases}


def inference_model(case: Case, device: str) -> list[Any]:
    """Build the model that only scores, after the parallel groups; its parameters are not a number."""
    config = case.tiny.transformer_config()
    return build_inference_model(partial(provide, case), config, dtype=case.dtype, device=device)


def _measure(case: Case, device: str) -> Measured:
    case.tiny.initialize()
    before = _held(device)
    teacher = inference_model(case, device)
    inference = [after - held for after, held in zip(_held(device), before, strict=True)]
    del teacher
    before = _held(device)
    model, optimizer = _train(case, device)
    training = [after - held for after, held in zip(_held(device), before, strict=True)]
    estimate = estimate_memory(model, data_parallel_size=case.dp, optimizer=case.optimizer)
    rank = torch.distributed.get_rank()
    return Measured(rank, _parts(model, optimizer), estimate, *training, *inference)


def _held(device: str) -> tuple[int, int]:
    """Return the bytes that can be reached, and those that the CUDA allocator has given."""
    return reachable_bytes(), torch.cuda.memory_allocated() if device == "cuda" else 0


def provide(
    case: Case, config: TransformerConfig, pre_process: bool, post_process: bool, vp_stage: int | None = None
) -> GPTModel:
    multiple = 128 * case.tp
    options = {"use_transformer_engine": False, "normalization": config.normalization, "vp_stage": vp_stage}
    layers = get_gpt_decoder_block_spec(config, **options)
    return GPTModel(
        config,
        layers,
        vocab_size=-(-case.model["vocab_size"] // multiple) * multiple,
        max_sequence_length=SEQUENCE,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.model.get("share_embeddings_and_output_weights", True),
        vp_stage=vp_stage,
    )


def _train(case: Case, device: str) -> tuple[list[Any], Any]:
    """A policy after its first step, in an ordinary set-up of megatron-core."""
    stage, last, config = get_pipeline_model_parallel_rank(), case.pp - 1, case.tiny.transformer_config()
    chunk = provide(case, config, pre_process=stage == 0, post_process=stage == last).to(device)
    if config.bf16:
        chunk = Float16Module(config, chunk)
    config.finalize_model_grads_func = finalize_model_grads
    model, optimizer = case.tiny.in_training(config, [chunk])
    tiny_gpt.train_step(model, optimizer, [tiny_gpt.SyntheticData()], num_microbatches=1)
    return model, optimizer


def _parts(model: Sequence[Any], optimizer: Any) -> Memory:
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    main_grads = [parameter.main_grad for parameter in parameters]
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    mains = [p for one in inner for group in one.param_groups for p in group["params"]]
    states = [state for one in inner for state in one.state.values()]
    weights, gradients = _storages(parameters), _storages(main_grads)
    return Memory(
        parameters=sum(weights.values()),
        gradients=sum(gradients.values()),
        main_parameters=_besides(weights, mains),
        main_gradients=_besides(gradients, [p.grad for p in mains if p.grad is not None]),
        exp_avg=sum(_storages(state["exp_avg"] for state in states).values()),
        exp_avg_sq=sum(_storages(state["exp_avg_sq"] for state in states).values()),
    )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _besides(known: dict[int, int], tensors: Iterable[torch.Tensor]) -> int:
    return sum(size for address, size in _storages(tensors).items() if address not in known)


def parts_of(measured: Memory, estimated: Memory) -> Iterator[tuple[str, int, int]]:
    """Name, measured and estimated bytes of each part that is there."""
    for part in fields(Memory):
        pair = getattr(measured, part.name), getattr(estimated, part.name)
        if any(pair):
            yield part.name, *pair
