"""A tiny hybrid model: megatron-core's model of state-space, attention and MLP layers, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_rl_patches.testing import TinyModel
from megatron_rl_patches.testing.tiny_models import SequenceParallelNorm

_PATTERN = "M*M-"  # state space, attention, state space, MLP


class StateSpace(torch.nn.Module):
    """A mixer of a state-space layer in plain torch: each channel is a decaying sum of what came before.

    It stands for ``MambaMixer``, whose kernels need a GPU.
    """

    def __init__(self, config: TransformerConfig, d_model: int, **unused: Any) -> None:
        super().__init__()
        options = {"dtype": config.params_dtype}
        self.decay = torch.nn.Parameter(torch.linspace(-2.0, 2.0, d_model, **options))
        self.in_proj = torch.nn.Linear(d_model, d_model, bias=False, **options)
        self.out_proj = torch.nn.Linear(d_model, d_model, bias=False, **options)

    def forward(self, hidden_sbh: torch.Tensor, *unused: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """Return ``[s, b, h]``, and no bias."""
        length = hidden_sbh.shape[0]
        steps = torch.arange(length, device=hidden_sbh.device)
        distance_st = (steps[:, None] - steps[None, :]).clamp(min=0)
        weights_sth = (self.decay.sigmoid() ** distance_st[:, :, None]).masked_fill(
            steps[:, None, None] < steps[None, :, None], 0
        )
        states = torch.einsum("sth,tbh->sbh", weights_sth, self.in_proj(hidden_sbh))
        return self.out_proj(states), None


@dataclass(frozen=True, kw_only=True)
class TinyHybrid(TinyModel):
    """A ``HybridModel``, or ``MambaModel`` as it is called up to megatron-core 0.17.

    Its state space is not divided over ranks, and its pipeline has one chunk per stage.
    """

    def provider(
        self, pre_process: bool = True, post_process: bool = True, config: Any = None, *_: Any, **unused: Any
    ) -> Any:
        from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules

        config, norm = config or self.transformer_config(), SequenceParallelNorm
        model_class, block = _hybrid_classes()
        stack = block.HybridStack if hasattr(block, "HybridStack") else block.MambaStack
        whole = get_gpt_layer_local_spec(num_experts=None).submodules
        attention = TransformerLayerSubmodules(
            input_layernorm=norm, self_attention=whole.self_attention, self_attn_bda=whole.self_attn_bda
        )
        mlp = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=whole.mlp, mlp_bda=whole.mlp_bda)
        state_space = MambaLayerSubmodules(norm=norm, mixer=StateSpace, mamba_bda=get_bias_dropout_add)
        layers = getattr(block, f"{stack.__name__}Submodules")(
            mamba_layer=ModuleSpec(MambaLayer, submodules=state_space),
            attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(TransformerLayer, submodules=mlp),
        )
        with mock.patch.object(block, "TENorm", norm):
            return model_class(
                config,
                ModuleSpec(stack, submodules=layers),
                vocab_size=self.vocab_size,
                max_sequence_length=self.seq_length,
                position_embedding_type="learned_absolute",
                share_embeddings_and_output_weights=self.tied,
                pre_process=pre_process,
                post_process=post_process,
                hybrid_override_pattern=(_PATTERN * config.num_layers)[: config.num_layers],
            )


def _hybrid_classes() -> tuple[Any, Any]:
    """Return the class of the model, and the module of its stack of layers."""
    try:
        model = import_module("megatron.core.models.hybrid.hybrid_model")
    except ModuleNotFoundError:
        model = import_module("megatron.core.models.mamba.mamba_model")
        return model.MambaModel, import_module("megatron.core.ssm.mamba_block")
    return model.HybridModel, import_module("megatron.core.models.hybrid.hybrid_block")
