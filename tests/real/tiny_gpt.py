"""A tiny GPT on real megatron-core, and an ordinary Megatron training loop for it.

:func:`build` gives model chunks in real ``DistributedDataParallel`` with the real distributed optimizer;
:func:`train` has the shape that Megatron-LM's and slime's ``train`` share, upstream assertions included.
Call both on a rank with ``torch.distributed`` initialized: on NCCL and a GPU, or inside ``cpu_backend()``.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_model_config

VOCABULARY, SEQUENCE, BATCH, HIDDEN, LAYERS, HEADS = 32, 16, 2, 32, 4, 4
# Parameters per bucket: small enough for several buckets per chunk.
BUCKET = 16_000


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the parallel groups; what is left of the world is data parallel."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Options:
    """What a framework would have in its ``args``."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True
    bf16: bool = False
    calculate_per_token_loss: bool = False
    tied: bool = False  # input embedding and output layer
    experts: int | None = None
    frozen_head: bool = False
    dropout: float = 0.0
    mtp: bool = False  # a layer that predicts one token more; from megatron-core 0.19 on without labels
    config: dict[str, Any] = field(default_factory=dict)  # further fields of TransformerConfig
    lr: float = 5e-3
    seed: int = 1234

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def overlaps_param_gather(self) -> bool:
        return self.use_distributed_optimizer and self.overlap_param_gather


class GatheredAttention(torch.nn.Module):
    """Causal attention for context parallelism: keys and values are gathered, queries stay where they are.

    Megatron's local core attention refuses context parallelism.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        q_bhsd, k_bhtd, v_bhtd = (
            tensor.permute(1, 2, 0, 3)
            for tensor in (
                query,
                gather_from_sequence_parallel_region(key, group=group),
                gather_from_sequence_parallel_region(value, group=group),
            )
        )
        positions = [_positions(rank, group.size(), k_bhtd.shape[2]) for rank in range(group.size())]
        mask_st = positions[group.rank()][:, None] >= torch.cat(positions)[None, :]
        context = torch.nn.functional.scaled_dot_product_attention(q_bhsd, k_bhtd, v_bhtd, attn_mask=mask_st)
        return context.permute(2, 0, 1, 3).flatten(2)


class SequenceParallelNorm(torch.nn.LayerNorm):
    """Layer norm whose parameters are marked for sequence parallelism; Megatron's torch norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def initialize(sizes: Parallelism, seed: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # which 0.12 forgets to destroy
    parallel_state.initialize_model_parallel(
        sizes.tp,
        sizes.pp,
        sizes.vpp,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build(options: Options) -> tuple[list[DistributedDataParallel], Any]:
    """Initialize Megatron's process groups over the whole world; return model chunks and optimizer."""
    initialize(options.parallelism, options.seed)
    config = _transformer_config(options)
    return in_training(options, config, bare_chunks(options, config))


def in_training(
    options: Options, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> tuple[list[DistributedDataParallel], Any]:
    """Return the chunks in DDP, and their optimizer."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.grad_reduce_in_fp32,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        check_for_nan_in_grad=True,
        bucket_size=BUCKET,
    )
    # As Megatron's get_model does: only the first chunk's communication is worth splitting up.
    model = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in model:
        chunk.broadcast_params()
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        bf16=options.bf16,
        params_dtype=options.dtype,
        use_distributed_optimizer=options.use_distributed_optimizer,
    )
    return model, get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)


def bare_chunks(options: Options, config: TransformerConfig) -> list[Any]:
    """Return what ``get_model(..., wrap_with_ddp=False)`` of every release comes to."""
    sizes, chunks = options.parallelism, []
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    for stage in [None] if sizes.vpp is None else range(sizes.vpp):
        pre_process = pp_rank == 0 and stage in (None, 0)
        post_process = pp_rank == sizes.pp - 1 and stage in (None, (sizes.vpp or 1) - 1)
        chunk = provider(options)(pre_process, post_process, config, stage).cuda()
        if stage is not None:
            chunk.vp_stage = stage
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if options.frozen_head and chunk.post_process:
            chunk.output_layer.requires_grad_(False)
        chunks.append(Float16Module(config, chunk) if options.bf16 else chunk)
    return chunks


def provider(options: Options) -> Callable[..., GPTModel]:
    """Return a model provider, as a user writes it and ``get_model`` calls it."""

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        config: Any = None,
        vp_stage: int | None = None,
        **unused: Any,
    ) -> GPTModel:
        config = config or _transformer_config(options)
        sizes = options.parallelism
        layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
        if sizes.cp > 1:
            layer.submodules.self_attention.submodules.core_attention = GatheredAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        layers = [layer] * (LAYERS // (sizes.pp * (sizes.vpp or 1)))
        optional: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
        if "vp_stage" not in inspect.signature(GPTModel).parameters:
            # Up to 0.12 stages are numbered by a global.
            parallel_state.set_virtual_pipeline_model_parallel_rank(optional.pop("vp_stage", None))
        if config.mtp_num_layers:
            optional["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        return GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=options.tied,
            pre_process=pre_process,
            post_process=post_process,
            **optional,
        )

    return provide


def inference_model(options: Options, device: str | None = None) -> list[Any]:
    """Build the model that only scores, in the groups that there are; weights have to be loaded into it."""
    from megatron_rl_patches.inference import build_inference_model

    return build_inference_model(
        provider(options),
        _transformer_config(options),
        dtype="bf16" if options.bf16 else "fp32",
        device=device,
    )


def trains_mtp_without_labels() -> bool:
    """Return whether this release takes the tokens as labels of multi-token prediction without labels."""
    process = getattr(multi_token_prediction, "process_mtp_loss", None)
    return process is not None and "input_ids" in inspect.signature(process).parameters


def _transformer_config(options: Options) -> TransformerConfig:
    sizes = options.parallelism
    interleaved = sizes.vpp is not None
    fields = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "attention_dropout": options.dropout,
        "hidden_dropout": options.dropout,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "sequence_parallel": sizes.sequence_parallel,
        "bf16": options.bf16,
        "calculate_per_token_loss": options.calculate_per_token_loss,
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        # Gloo matches messages by order: the batched form of the interleaved schedule mixes them up.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "num_moe_experts": options.experts,
        "add_bias_linear": options.experts is None,
        "mtp_num_layers": 1 if options.mtp else None,
    }
    return TransformerConfig(**(fields | options.config))


def _positions(rank: int, size: int, length: int | None = None) -> torch.Tensor:
    """Positions that a context-parallel rank holds: its piece from either end of the sequence."""
    length = length or SEQUENCE
    if size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class SyntheticData:
    """An endless stream of batches for this rank: the next token is a fixed function of the last.

    Sample ``i`` of the stream is the same on any layout, so runs on different layouts see the same data.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._microbatch = 0

    def __iter__(self) -> SyntheticData:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        replicas = parallel_state.get_data_parallel_world_size()
        number = self._microbatch * replicas + parallel_state.get_data_parallel_rank()
        self._microbatch += 1
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        token_b = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        sequence = [token_b]
        for _ in range(SEQUENCE):
            sequence.append((5 * sequence[-1] + 3) % VOCABULARY)
        tokens_bs = torch.stack(sequence, dim=1)
        positions_s = _positions(
            parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        )
        return {
            "tokens": tokens_bs[:, positions_s],
            "labels": tokens_bs[:, positions_s + 1],
            "position_ids": positions_s.expand(BATCH, -1),
        }


def data_iterators(options: Options, seed: int = 0) -> list[SyntheticData]:
    """One iterator per model chunk, all over the same stream."""
    return [SyntheticData(seed) for _ in range(options.parallelism.vpp or 1)]


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's ``forward_step_func``: output of one microbatch and the function for its loss."""
    device = next(model.parameters()).device
    batch = {name: values.to(device) for name, values in next(data_iterator).items()}
    # True is what must not be seen.
    mask_ss = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    output = model(batch["tokens"], batch["position_ids"], mask_ss, labels=batch["labels"])
    return output, partial(_loss)


def _loss(losses_bs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses_bs.float().mean()
    # The schedule multiplies by the context-parallel size, as it expects a share of the sequence's mean.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach()}


def train(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Sequence[Iterator[dict[str, torch.Tensor]]],
    num_microbatches: Sequence[int],
    options: Options,
) -> list[float]:
    """Train one step per entry of ``num_microbatches``; return the loss of each, the same on every rank.

    An ordinary Megatron-core loop: like those of Megatron-LM and slime, it works once per process.
    """
    for chunk in model:
        chunk.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if isinstance(model[0], DistributedDataParallel) and options.overlap_grad_reduce:
        assert config.no_sync_func is None, (
            "When overlap_grad_reduce is True, config.no_sync_func must be None; "
            "a custom no_sync_func is not supported when overlapping grad-reduce"
        )
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    config.finalize_model_grads_func = finalize_model_grads

    pre_hook_enabled = False
    if options.overlaps_param_gather:
        # The first step shows errors of loading or initialization before a gather can spread them.
        disable_forward_pre_hook(model, param_sync=False)

    losses = []
    for step, microbatches in enumerate(num_microbatches):
        losses.append(train_step(model, optimizer, data_iterator, microbatches))
        if step == 0 and options.overlaps_param_gather:
            enable_forward_pre_hook(model)
            pre_hook_enabled = True
    if pre_hook_enabled:
        disable_forward_pre_hook(model)
    return losses


def train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Sequence[Iterator[dict[str, torch.Tensor]]],
    num_microbatches: int,
) -> float:
    """One optimizer step; return the mean loss over microbatches and replicas."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data_iterator),
        model=list(model),
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    succeeded, _, _ = optimizer.step()
    assert succeeded
    # Only the last pipeline stage has a loss.
    total_and_count = torch.tensor(
        [sum(float(report["loss"]) for report in reports), float(len(reports))],
        device=next(model[0].parameters()).device,
    )
    torch.distributed.all_reduce(total_and_count)
    return (total_and_count[0] / total_and_count[1]).item()


def enable_forward_pre_hook(model: Sequence[DistributedDataParallel]) -> None:
    for chunk in model:
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: Sequence[DistributedDataParallel], param_sync: bool = True) -> None:
    for chunk in model:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def checksum(model: Sequence[torch.nn.Module], optimizer: Any) -> str:
    """A hash of every bit of this rank's parameters and of its shard of the optimizer's own copies."""
    digest = hashlib.sha256()
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for tensor in [parameter for chunk in model for parameter in chunk.parameters()] + masters:
        digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Overlap:
    """How many collectives the bucket groups dispatched while computing, by the caller."""

    param_gathers: int = 0  # by forward pre-hooks
    grad_reduces: int = 0  # by backward hooks
    scheduled_grad_reduces: int = 0  # by a pipeline schedule, through ``config.grad_sync_func``


@contextmanager
def counting_overlap() -> Iterator[Overlap]:
    """Count the collectives that overlap with computation.

    A bucket group's ``finish_param_sync`` is called by nothing but the forward pre-hook, its
    ``register_grad_ready`` by nothing but the backward hook (which dispatches in the last microbatch only),
    and the model chunk's ``start_grad_sync`` by nothing but a schedule.
    """
    overlap, group = Overlap(), _ParamAndGradBucketGroup
    callers = {
        group.finish_param_sync.__code__: "param_gathers",
        group.register_grad_ready.__code__: "grad_reduces",
        DistributedDataParallel.start_grad_sync.__code__: "scheduled_grad_reduces",
    }

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind := callers.get(sys._getframe(1).f_code):
                setattr(overlap, kind, getattr(overlap, kind) + 1)
            return method(*args, **kwargs)

        return call

    starts: Any = {name: counted(getattr(group, name)) for name in ("start_param_sync", "start_grad_sync")}
    with mock.patch.multiple(group, **starts):
        yield overlap
