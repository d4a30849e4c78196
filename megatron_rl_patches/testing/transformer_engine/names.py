"""The modules of TransformerEngine that Megatron imports, and what the stand-in has of each."""

from __future__ import annotations

from typing import Any

import torch

from . import ops, optimizers, permutation, refusals, version
from .attention import DotProductAttention
from .base import TransformerEngineBaseModule, add_to_main_grad, get_dummy_wgrad
from .distributed import CudaRNGStatesTracker, activation_recompute_forward, checkpoint
from .layers import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
from .rope import apply_rotary_pos_emb


def _named(*values: Any) -> dict[str, Any]:
    return {value.__name__: value for value in values}


def _defined_in(module: Any) -> dict[str, Any]:
    return _named(*(x for x in vars(module).values() if getattr(x, "__module__", None) == module.__name__))


def modules() -> dict[str, dict[str, Any]]:
    """Return names and values of each module; parents come before their children."""
    linear = _named(Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm)
    contexts = "fp8_autocast", "fp8_model_init", "autocast", "quantized_model_init"
    fp8 = _named(refusals.FP8GlobalStateManager) | dict.fromkeys(contexts, refusals.fp8_autocast)
    formats_checked = ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")
    fp8 |= {f"check_{name}_support": refusals.is_available for name in formats_checked}
    router = ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")
    padding = ("Fp8Padding", "Fp8Unpadding")
    root = "transformer_engine"
    return {
        root: {"__version__": version.current},
        f"{root}.common": {},
        f"{root}.common.recipe": _named(refusals.Format, refusals.Recipe) | refusals.RECIPES,
        f"{root}.pytorch": {
            **linear,
            **fp8,
            **_named(DotProductAttention, CudaRNGStatesTracker, checkpoint),
            **dict.fromkeys(padding, refusals.refused(f"padding for FP8 ({', '.join(padding)})")),
        },
        f"{root}.pytorch.attention": _named(DotProductAttention, apply_rotary_pos_emb),
        f"{root}.pytorch.attention.rope": _named(apply_rotary_pos_emb),
        f"{root}.pytorch.distributed": _named(CudaRNGStatesTracker, activation_recompute_forward, checkpoint),
        f"{root}.pytorch.float8_tensor": {"Float8Tensor": refusals.QuantizedTensor},
        f"{root}.pytorch.fp8": fp8,
        f"{root}.pytorch.quantization": fp8,
        f"{root}.pytorch.module": linear,
        f"{root}.pytorch.module.base": _named(TransformerEngineBaseModule, get_dummy_wgrad),
        f"{root}.pytorch.ops": _defined_in(ops) | ops.ACTIVATIONS,
        f"{root}.pytorch.permutation": _defined_in(permutation),
        f"{root}.pytorch.optimizers": _defined_in(optimizers) | {"FusedSGD": torch.optim.SGD},
        f"{root}.pytorch.router": dict.fromkeys(router, refusals.refused("fused router (moe_router_fusion)")),
        f"{root}.pytorch.tensor": _named(refusals.QuantizedTensor),
        # Of apex: with it, Megatron's own layers add gradients of weights to main_grad, too.
        "fused_weight_gradient_mlp_cuda": dict.fromkeys(
            ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), add_to_main_grad
        ),
    }
