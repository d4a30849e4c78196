"""Specs of the layers of tiny models: Megatron's local ones, or those of TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig, utils
from megatron.core.transformer.spec_utils import ModuleSpec

from ..errors import InvalidInputError
from .transformer_engine.attention import DotProductAttention
from .transformer_engine.layers import normalized


def layer_of(config: TransformerConfig, transformer_engine: bool) -> tuple[ModuleSpec, Any]:
    """Return the spec of a layer of a ``GPTModel``, and the class of norms.

    Raises:
        InvalidInputError: Megatron was imported without TransformerEngine.
    """
    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": transformer_engine,
        "multi_latent_attention": config.multi_latent_attention,
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": getattr(config, "qk_l2_norm", False),
    }
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm

        if not HAVE_TE:
            raise InvalidInputError(
                "layers is 'transformer_engine', and Megatron was imported without TransformerEngine. "
                "Install it, or import Megatron inside cpu_backend(transformer_engine=True)."
            )
        return get_gpt_layer_with_transformer_engine_spec(**options), TENorm
    layer = get_gpt_layer_local_spec(**options)
    attention = layer.submodules.self_attention.submodules
    if config.context_parallel_size > 1 or config.multi_latent_attention:
        attention.core_attention = GatheredAttention
    if config.qk_layernorm and not options["qk_l2_norm"]:
        of_keys = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        vars(attention).update(dict.fromkeys(("q_layernorm", of_keys), SequenceParallelNorm))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    return layer, SequenceParallelNorm


def mtp_block(
    config: TransformerConfig, layer: ModuleSpec, transformer_engine: bool, vp_stage: int | None
) -> Any:
    """Return the spec of the layers of multi-token prediction of a stage; ``None`` where it has none."""
    block = get_gpt_mtp_block_spec(config, layer, transformer_engine, vp_stage)
    for spec in block.layer_specs if block and not transformer_engine else ():
        vars(spec.submodules).update(dict.fromkeys(("enorm", "hnorm", "layer_norm"), SequenceParallelNorm))
    return block


class GatheredAttention(DotProductAttention):
    """Attention of the stand-in of TransformerEngine, for context parallelism and wide values.

    Megatron's local core attention refuses context parallelism, and the widths of multi-latent attention.
    """

    # Checkpoints of local layers have no extra state.
    get_extra_state, set_extra_state = torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, *args: Any, **options: Any
    ) -> None:
        width, skipped = config.kv_channels, getattr(config, "window_attn_skip_freq", None)
        has_window = getattr(utils, "is_layer_window_attention", lambda size, *of_layer: size is not None)
        super().__init__(
            config.num_attention_heads,
            (options.get("k_channels") or width, options.get("v_channels") or width),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=config.attention_dropout,
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size if has_window(config.window_size, skipped, layer_number) else None,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=config.sequence_parallel,
            get_rng_state_tracker=tensor_parallel.get_cuda_rng_tracker,
            cp_group=parallel_state.get_context_parallel_group(),
            softmax_scale=options.get("softmax_scale"),
            softmax_type=getattr(config, "softmax_type", "vanilla"),
        )

    def forward(self, *qkv: torch.Tensor, packed_seq_params: Any = None, **options: Any) -> Any:
        """Return ``[s / cp, b, heads * channels]``; arguments are ``[s / cp, b, heads, channels]``."""
        if packed_seq_params is not None or options.get("attention_bias") is not None:
            raise InvalidInputError("packed samples and attention_bias need layers='transformer_engine'")
        return super().forward(*qkv[:3])


class SequenceParallelNorm(torch.nn.Module):
    """Norm of the kind that the configuration names, marked for sequence parallelism as Megatron's is not."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), float(not self.is_zero_centered)))
        has_bias = config.normalization == "LayerNorm"
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size)) if has_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(x, self.weight, self.bias, self.eps, self.is_zero_centered)
