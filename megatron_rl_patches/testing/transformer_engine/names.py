"""The modules of TransformerEngine that Megatron imports, and what the stand-in has of each."""

from __future__ import annotations

from typing import Any

import torch

from . import ops, permutation, refusals, version
from .attention import DotProductAttention
from .base import TransformerEngineBaseModule, add_to_main_grad, get_dummy_wgrad
from .distributed import (
    CudaRNGStatesTracker,
    activation_recompute_forward,
    checkpoint,
    get_all_rng_states,
    is_fp8_activation_recompute_enabled,
)
from .linear import GroupedLinear, LayerNormLinear, Linear
from .norms import LayerNorm, RMSNorm
from .optimizers import FusedAdam
from .rope import apply_rotary_pos_emb


class Float8Tensor(refusals.QuantizedTensor):
    """Tensors in FP8, of which there are none."""


def _named(*values: Any) -> dict[str, Any]:
    return {value.__name__: value for value in values}


def modules() -> dict[str, dict[str, Any]]:
    """Return names and values of each module; parents come before their children."""
    linear = _named(Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm)
    contexts = "fp8_autocast", "fp8_model_init", "autocast", "quantized_model_init"
    fp8 = _named(refusals.FP8GlobalStateManager) | dict.fromkeys(contexts, refusals.fp8_autocast)
    formats_checked = ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")
    fp8 |= {f"check_{name}_support": refusals.is_available for name in formats_checked}
    quantized = _named(refusals.QuantizedTensor)
    formats = _named(refusals.Format, refusals.Recipe) | refusals.RECIPES
    distributed = _named(
        CudaRNGStatesTracker,
        activation_recompute_forward,
        checkpoint,
        get_all_rng_states,
        is_fp8_activation_recompute_enabled,
    )
    router = ("topk_with_score_function", "compute_score_for_moe_aux_loss", "moe_aux_loss")
    root = "transformer_engine"
    return {
        root: {"__version__": version.current()},
        f"{root}.common": {},
        f"{root}.common.recipe": formats,
        f"{root}.pytorch": {
            **linear,
            **fp8,
            **_named(DotProductAttention, CudaRNGStatesTracker, checkpoint),
            **dict.fromkeys(("Fp8Padding", "Fp8Unpadding"), refusals.fp8_autocast),
        },
        f"{root}.pytorch.attention": _named(DotProductAttention, apply_rotary_pos_emb),
        f"{root}.pytorch.attention.rope": _named(apply_rotary_pos_emb),
        f"{root}.pytorch.distributed": distributed,
        f"{root}.pytorch.float8_tensor": _named(Float8Tensor),
        f"{root}.pytorch.fp8": fp8,
        f"{root}.pytorch.quantization": fp8,
        f"{root}.pytorch.module": linear,
        f"{root}.pytorch.module.base": _named(TransformerEngineBaseModule, get_dummy_wgrad),
        f"{root}.pytorch.ops": {
            **_named(ops.FusibleOperation, ops.Sequential, ops.Linear),
            **ops.ACTIVATIONS,
        },
        f"{root}.pytorch.permutation": {
            name: value for name, value in vars(permutation).items() if name.startswith("moe_")
        },
        f"{root}.pytorch.optimizers": _named(FusedAdam) | {"FusedSGD": torch.optim.SGD},
        f"{root}.pytorch.router": {f"fused_{name}": refusals.fused_router for name in router},
        f"{root}.pytorch.tensor": quantized,
        # Of apex: with it, Megatron's own layers add gradients of weights to main_grad, too.
        "fused_weight_gradient_mlp_cuda": dict.fromkeys(
            ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), add_to_main_grad
        ),
    }
