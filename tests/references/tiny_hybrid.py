"""Tiny hybrid models: ``HybridModel``, which is ``MambaModel`` up to megatron-core 0.17."""

import inspect
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_rl_patches.testing import TinyModel, tiny_layers

try:
    block = import_module("megatron.core.models.hybrid.hybrid_block")
    model_class = import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
    stack, submodules = block.HybridStack, block.HybridStackSubmodules
except ModuleNotFoundError:
    block = import_module("megatron.core.ssm.mamba_block")
    model_class = import_module("megatron.core.models.mamba.mamba_model").MambaModel
    stack, submodules = block.MambaStack, block.MambaStackSubmodules

#: Whether hybrid models of this release have multi-token prediction.
HAS_MTP = "mtp_layer_pattern" in inspect.signature(MultiTokenPredictionBlock).parameters
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


@dataclass(frozen=True, kw_only=True)
class TinyHybrid(TinyModel):
    """A model of attention, experts, attention and MLP: Megatron's ``hybrid_stack_spec``, or local layers."""

    kind: str = "moe"

    def provider(
        self, pre_process: bool = True, post_process: bool = True, config: Any = None, *_: Any, **unused: Any
    ) -> Any:
        config = config or self.transformer_config()
        has_te, has_experts = self.layers == "transformer_engine", hasattr(submodules, "moe_layer")
        without_experts = copy(config)
        without_experts.num_moe_experts = None
        dense, norm = tiny_layers.layer_of(without_experts, has_te)
        attention = "input_layernorm", "self_attention", "self_attn_bda"
        specs = {
            "attention_layer": _part_of(dense, TransformerLayer, attention),
            "mlp_layer": _part_of(dense, MLPLayer, _MLP),
        }
        if has_experts:  # from megatron-core 0.16 on
            moe_class = getattr(transformer_layer, "MoETransformerLayer", TransformerLayer)
            specs["moe_layer"] = _part_of(tiny_layers.layer_of(config, has_te)[0], moe_class, _MLP)
        pattern = (("*E*-" if has_experts else "*-*-") * config.num_layers)[: config.num_layers]
        if config.mtp_num_layers:
            specs["mtp_block_spec"] = tiny_layers.mtp_block(config, dense, has_te, None)
            pattern += "/*E" * config.mtp_num_layers
        is_new = "hybrid_layer_pattern" in inspect.signature(model_class).parameters
        # The norm after the last layer is TransformerEngine's, whatever the layers are.
        with mock.patch.object(block, "TENorm", norm):
            return model_class(
                config,
                ModuleSpec(stack, submodules=submodules(**specs)),
                vocab_size=self.vocab_size,
                max_sequence_length=self.seq_length,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=self.tied,
                pre_process=pre_process,
                post_process=post_process,
                **{"hybrid_layer_pattern" if is_new else "hybrid_override_pattern": pattern},
            )


def _part_of(layer: ModuleSpec, module: Any, names: tuple[str, ...]) -> ModuleSpec:
    parts = {name: getattr(layer.submodules, name) for name in names}
    return ModuleSpec(module, submodules=TransformerLayerSubmodules(**parts))
