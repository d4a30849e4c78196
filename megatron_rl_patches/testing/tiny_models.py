"""Tiny real models of megatron-core, with the process groups, DDP and optimizer that a framework gives them.

They are for tests of training loops: on a CPU inside ``cpu_backend()``, or on a GPU. Megatron is imported
when they are used, since the stand-in of TransformerEngine has to be in place before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInputError

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer import TransformerConfig

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
LAYERS = ("local", "transformer_engine")
#: Parameters per bucket: few enough for several buckets per chunk, so that communication overlaps.
BUCKET = 16_000
#: The layout that this process has initialized last, and one of its groups.
_initialized: list[Any] = []


def tiny_model(kind: str = "dense", **options: Any) -> TinyModel:
    """Return ``TinyModel(kind=kind, **options)``: a tiny real model, which its methods build."""
    return TinyModel(kind=kind, **options)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Description of a tiny real model and of how it is trained; its methods build it.

    Call them where ``torch.distributed`` is initialized, as on the ranks of ``spawn_ranks``.

    Attributes:
        kind: ``"dense"``, ``"moe"`` (four experts), ``"mla"`` (multi-latent attention), ``"mla-moe"`` (both),
            or ``"mtp"`` (one layer of multi-token prediction).
        layers: ``"local"``, or ``"transformer_engine"`` for those that people train with: experts are grouped
            then. On a CPU they need ``cpu_backend(transformer_engine=True)``.
        tp, pp, cp, ep: sizes of the parallel groups. What is left of the world is data parallel.
        expert_tp: size of the tensor parallel groups of experts; ``None`` for that of ``tp``.
        vpp: chunks per pipeline stage; ``None`` without interleaving.
        sequence_parallel: as in ``TransformerConfig``.
        bf16: train in bfloat16 with float32 main parameters; float32 otherwise.
        tied: input embedding and output layer share their weight.
        vocab_size, seq_length: of the model, in tokens.
        config: further fields of ``TransformerConfig``, which win over those of the kind.
        lr, seed: the learning rate of Adam, and the seed of the parameters.
        overlap_grad_reduce, overlap_param_gather, use_distributed_optimizer, grad_reduce_in_fp32: as in
            ``DistributedDataParallelConfig``.

    Raises:
        InvalidInputError: there is no such kind or there are no such layers.
    """

    kind: str = "dense"
    layers: str = "local"
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    bf16: bool = False
    tied: bool = False
    vocab_size: int = 32
    seq_length: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    lr: float = 5e-3
    seed: int = 1234
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, _KINDS), ("layers", self.layers, LAYERS)):
            if value not in known:
                raise InvalidInputError(f"{name} is {value!r}; expected one of {', '.join(known)}")

    @property
    def _sizes(self) -> dict[str, Any]:
        """Sizes by the names that both Megatron's groups and its configuration have for them."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tp,
        }

    def initialize(self) -> None:
        """Seed Megatron's generators; initialize its process groups unless the last call made the same."""
        from megatron.core import parallel_state, tensor_parallel

        layout = self._sizes, torch.distributed.group.WORLD
        if _initialized != [layout, parallel_state.get_model_parallel_group(check_initialized=False)]:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**self._sizes, create_gloo_process_groups=False)
            _initialized[:] = layout, parallel_state.get_model_parallel_group()
        elif self.vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)
        tensor_parallel.model_parallel_cuda_manual_seed(self.seed)

    def build(self) -> tuple[list[DistributedDataParallel], Any]:
        """Initialize the groups; return model chunks as ``get_model`` does, and their optimizer."""
        self.initialize()
        config = self.transformer_config()
        return self.in_training(config, self.chunks(config))

    def transformer_config(self) -> TransformerConfig:
        """Return a new configuration of the model."""
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        dtype = torch.bfloat16 if self.bf16 else torch.float32
        fields = {
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **self._sizes,
            "moe_grouped_gemm": self.layers == "transformer_engine",
            "qk_layernorm": "mla" in self.kind,
            "sequence_parallel": self.sequence_parallel,
            "bf16": self.bf16,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            # Gloo matches messages by order: the batched form of the interleaved schedule mixes them up.
            "overlap_p2p_comm": bool(self.vpp),
            "batch_p2p_comm": not self.vpp,
        }
        of_kind = MLATransformerConfig if "mla" in self.kind else TransformerConfig
        return of_kind(**(fields | _KINDS[self.kind] | self.config))

    def chunks(self, config: TransformerConfig | None = None) -> list[Any]:
        """Return this rank's chunks as ``get_model(..., wrap_with_ddp=False)`` does. The groups are there."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.module import Float16Module

        config = config or self.transformer_config()
        chunks = []
        stage, count = parallel_state.get_pipeline_model_parallel_rank(), self.vpp or 1
        for index in range(count):
            is_first, is_last = stage + index == 0, (stage, index) == (self.pp - 1, count - 1)
            chunk = self.provider(is_first, is_last, config, index if self.vpp else None).cuda()
            for parameter in chunk.parameters():
                tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
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
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        from . import tiny_layers

        config = config or self.transformer_config()
        has_te = self.layers == "transformer_engine"
        layer, norm = tiny_layers.layer_of(config, has_te)
        layers = [layer] * (config.num_layers // (self.pp * (self.vpp or 1)))
        # Megatron stores learned positions once, and a stage with MTP has an embedding of its own.
        options = {
            "vocab_size": self.vocab_size,
            "max_sequence_length": self.seq_length,
            "position_embedding_type": "learned_absolute" if self.kind in ("dense", "moe") else "rope",
            "share_embeddings_and_output_weights": self.tied,
            "pre_process": pre_process,
            "post_process": post_process,
            "vp_stage": vp_stage,
        }
        if config.mtp_num_layers:
            options["mtp_block_spec"] = tiny_layers.mtp_block(config, layer, has_te, vp_stage)
        return GPTModel(config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm), **options)

    def in_training(
        self, config: TransformerConfig, chunks: Sequence[torch.nn.Module]
    ) -> tuple[list[DistributedDataParallel], Any]:
        """Return the chunks in ``DistributedDataParallel``, and their optimizer."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

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
            lr=self.lr,
            bf16=self.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=self.use_distributed_optimizer,
        )
        return model, get_megatron_optimizer(optimizer_config, model, use_gloo_process_groups=False)
