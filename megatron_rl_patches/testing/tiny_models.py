"""Tiny real models of megatron-core, with the process groups, DDP and optimizer that a framework gives them.

They are for tests of training loops: on a CPU inside ``cpu_backend()``, or on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..errors import InvalidInputError

# Fields of TransformerConfig that make a model of a kind.
_MOE: dict[str, Any] = {"num_moe_experts": 4, "add_bias_linear": False}
_MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "add_bias_linear": False,
}
_KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": _MOE,
    "mla": _MLA,
    "mla-moe": {**_MLA, **_MOE},
    "mtp": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1},
}
#: Parameters per bucket: few enough for several buckets per chunk, so that communication overlaps.
BUCKET = 16_000


def tiny_model(kind: str = "dense", **options: Any) -> TinyModel:
    """Describe a tiny real model; its methods build it. Nothing is built yet, and no group is initialized.

    Call the methods where ``torch.distributed`` is initialized, as on the ranks of ``spawn_ranks``.

    Args:
        kind: ``"dense"``, ``"moe"`` (four experts), ``"mla"`` (multi-latent attention), ``"mla-moe"`` (both),
            or ``"mtp"`` (one layer of multi-token prediction).
        options: see the attributes of :class:`TinyModel`.

    Raises:
        InvalidInputError: there is no such kind.
    """
    if kind not in _KINDS:
        raise InvalidInputError(f"kind is {kind!r}; expected one of {', '.join(_KINDS)}")
    return TinyModel(kind=kind, **options)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """What :func:`tiny_model` returns: a description of a model and of how it is trained.

    Attributes:
        kind: see :func:`tiny_model`.
        tp, pp, cp, ep: sizes of the parallel groups. What is left of the world is data parallel.
        expert_tp: size of the tensor parallel groups of experts; ``None`` for that of ``tp``.
        vpp: chunks per pipeline stage; ``None`` without interleaving.
        sequence_parallel: as in ``TransformerConfig``.
        bf16: train in bfloat16 with float32 main parameters; float32 otherwise.
        tied: input embedding and output layer share their weight.
        frozen_head: the output layer is not trained.
        vocab_size, seq_length: of the model, in tokens.
        config: further fields of ``TransformerConfig``, which win over those of the kind.
        lr: learning rate of Adam.
        seed: of the parameters.
        overlap_grad_reduce, overlap_param_gather, use_distributed_optimizer, grad_reduce_in_fp32: as in
            ``DistributedDataParallelConfig``.
    """

    kind: str = "dense"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    bf16: bool = False
    tied: bool = False
    frozen_head: bool = False
    vocab_size: int = 32
    seq_length: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    lr: float = 5e-3
    seed: int = 1234
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return torch.bfloat16 if self.bf16 else torch.float32

    def initialize(self) -> None:
        """Initialize Megatron's process groups over the whole world, and its random number generators."""
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.tp,
            self.pp,
            self.vpp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.expert_tp,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(self.seed)

    def build(self) -> tuple[list[DistributedDataParallel], Any]:
        """Initialize the groups; return model chunks as ``get_model`` does, and their optimizer."""
        self.initialize()
        config = self.transformer_config()
        return self.in_training(config, self.chunks(config))

    def transformer_config(self) -> TransformerConfig:
        """Return a new configuration of the model."""
        interleaved = self.vpp is not None
        fields = {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
            "sequence_parallel": self.sequence_parallel,
            "bf16": self.bf16,
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            # Gloo matches messages by order: the batched form of the interleaved schedule mixes them up.
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
        }
        of_kind = MLATransformerConfig if self._has_mla else TransformerConfig
        return of_kind(**(fields | _KINDS[self.kind] | self.config))

    @property
    def _has_mla(self) -> bool:
        return "multi_latent_attention" in _KINDS[self.kind]

    def chunks(self, config: TransformerConfig | None = None) -> list[Any]:
        """Return this rank's chunks as ``get_model(..., wrap_with_ddp=False)`` does. The groups are there."""
        config = config or self.transformer_config()
        chunks = []
        rank = parallel_state.get_pipeline_model_parallel_rank()
        for stage in [None] if self.vpp is None else range(self.vpp):
            pre_process = rank == 0 and stage in (None, 0)
            post_process = rank == self.pp - 1 and stage in (None, (self.vpp or 1) - 1)
            chunk = self.provider(pre_process, post_process, config, stage).cuda()
            if stage is not None:
                chunk.vp_stage = stage
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            if self.frozen_head and post_process:
                chunk.output_layer.requires_grad_(False)
            chunks.append(Float16Module(config, chunk) if self.bf16 else chunk)
        return chunks

    def provider(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        config: Any = None,
        vp_stage: int | None = None,
        **unused: Any,
    ) -> Any:
        """Build one chunk, as ``get_model`` asks a framework's model provider for it."""
        config = config or self.transformer_config()
        sizes = {
            "vocab_size": self.vocab_size,
            "max_sequence_length": self.seq_length,
            # Megatron stores learned positions once, and a stage with MTP has an embedding of its own.
            "position_embedding_type": "rope" if self.kind == "mtp" or self._has_mla else "learned_absolute",
            "share_embeddings_and_output_weights": self.tied,
        }
        layer = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, multi_latent_attention=self._has_mla
        )
        if self.cp > 1 or self._has_mla:
            layer.submodules.self_attention.submodules.core_attention = GatheredAttention
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
        layers = [layer] * (config.num_layers // (self.pp * (self.vpp or 1)))
        optional: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
        if config.mtp_num_layers:
            optional["mtp_block_spec"] = _mtp_block(config, layer, optional)
        return GPTModel(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=SequenceParallelNorm),
            **sizes,
            pre_process=pre_process,
            post_process=post_process,
            **optional,
        )

    def in_training(
        self, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
    ) -> tuple[list[DistributedDataParallel], Any]:
        """Return the chunks in ``DistributedDataParallel``, and their optimizer."""
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.grad_reduce_in_fp32,
            overlap_grad_reduce=self.overlap_grad_reduce,
            overlap_param_gather=self.overlap_param_gather,
            use_distributed_optimizer=self.use_distributed_optimizer,
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
            lr=self.lr,
            bf16=self.bf16,
            params_dtype=self.dtype,
            use_distributed_optimizer=self.use_distributed_optimizer,
        )
        return model, get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)

    def positions(self) -> torch.Tensor:
        """Return the positions that this context-parallel rank has, ``[seq_length / cp]``, int64.

        Each rank has a piece from either end of the sequence, as Megatron's batches are cut.
        """
        return _positions(parallel_state.get_context_parallel_rank(), self.cp, self.seq_length)


def _mtp_block(config: TransformerConfig, layer: Any, stage: dict[str, Any]) -> Any:
    """Return the spec of the layers of multi-token prediction of a stage; ``None`` where it has none."""
    block = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, **stage)
    for spec in block.layer_specs if block else ():
        norms = ("enorm", "hnorm", "layer_norm")
        vars(spec.submodules).update(dict.fromkeys(norms, SequenceParallelNorm))
    return block


def _positions(rank: int, size: int, length: int) -> torch.Tensor:
    if size == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class GatheredAttention(torch.nn.Module):
    """Causal attention for context parallelism: keys and values are gathered, queries stay where they are.

    Megatron's local core attention refuses context parallelism, and the widths of multi-latent attention.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Return ``[s / cp, b, heads * channels]``; arguments are ``[s / cp, b, heads, channels]``.

        Keys and values may have fewer heads than queries, as with ``num_query_groups``.
        """
        group = parallel_state.get_context_parallel_group()
        q_bhsd, k_bhtd, v_bhtd = (
            tensor.permute(1, 2, 0, 3)
            for tensor in (
                query,
                gather_from_sequence_parallel_region(key, group=group),
                gather_from_sequence_parallel_region(value, group=group),
            )
        )
        length = k_bhtd.shape[2]
        positions = [_positions(rank, group.size(), length) for rank in range(group.size())]
        mask_st = positions[group.rank()][:, None] >= torch.cat(positions)[None, :]
        context = torch.nn.functional.scaled_dot_product_attention(
            q_bhsd, k_bhtd, v_bhtd, attn_mask=mask_st, enable_gqa=q_bhsd.shape[1] != k_bhtd.shape[1]
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class SequenceParallelNorm(torch.nn.LayerNorm):
    """Layer norm whose parameters are marked for sequence parallelism; Megatron's torch norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
