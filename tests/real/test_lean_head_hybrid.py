"""``lean-head`` on a real hybrid model: the model of Mamba layers, here of attention and MLP layers alone.

Mamba layers need a CUDA kernel. The model around them, which has the output layer, does not.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.losses import DeferredLogits, vocab_parallel_log_probs
from megatron_rl_patches.testing import TinyModel
from megatron_rl_patches.testing.tiny_models import SequenceParallelNorm
from tests.ranks import on_ranks
from tests.real import tiny_gpt
from tests.real.test_loss_func import causal_mask

pytestmark = [pytest.mark.runs("lean-head", ranks=1), pytest.mark.slow]


def _hybrid_model() -> Any:
    """Build it as it is called in this release: ``MambaModel`` up to 0.17, then ``HybridModel``."""
    try:
        block, model = (
            import_module(f"megatron.core.models.hybrid.hybrid_{name}") for name in ("block", "model")
        )
        kind, stack, submodules = model.HybridModel, block.HybridStack, block.HybridStackSubmodules
    except ImportError:
        block = import_module("megatron.core.ssm.mamba_block")
        kind = import_module("megatron.core.models.mamba.mamba_model").MambaModel
        stack, submodules = block.MambaStack, block.MambaStackSubmodules
    TinyModel(seed=0).initialize()
    whole, norm = get_gpt_layer_local_spec(num_experts=None).submodules, SequenceParallelNorm
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=whole.self_attention, self_attn_bda=whole.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=whole.mlp, mlp_bda=whole.mlp_bda)
    layers = submodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(TransformerLayer, submodules=mlp),
    )
    with mock.patch.object(block, "TENorm", norm):
        return kind(
            TinyModel().transformer_config(),
            ModuleSpec(stack, submodules=layers),
            vocab_size=tiny_gpt.VOCABULARY,
            max_sequence_length=tiny_gpt.SEQUENCE,
            hybrid_override_pattern="*-*-",
        )


@on_ranks(1)
def test_a_hybrid_model() -> None:
    try:
        import_module("megatron.core.ssm.mamba_block")
    except ModuleNotFoundError as error:  # in 0.12
        if error.name is None or not error.name.startswith("transformer_engine"):
            raise
        pytest.skip("this release's model of Mamba layers needs TransformerEngine")
    runs = []
    for lean in (False, True):
        settings = Settings(lean_head_tile_bytes=256)
        with applied("lean-head", settings=settings) if lean else nullcontext():
            model = _hybrid_model()
            tokens_bs = torch.arange(32).view(2, 16)
            logits = model(tokens_bs, torch.arange(16).expand(2, 16), causal_mask())
            log_probs = vocab_parallel_log_probs(logits.flatten(0, 1), tokens_bs.flatten())
            log_probs.sum().backward()
        assert (isinstance(logits, DeferredLogits) and logits.is_deferred) == lean
        runs.append((log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (values, gradients), (lean_values, lean_gradients) = runs
    torch.testing.assert_close(lean_values, values, rtol=1e-5, atol=1e-6)
    assert len(gradients) > 10
    for name, gradient in gradients.items():
        torch.testing.assert_close(lean_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
