"""Puts the stand-in for ``transformer_engine`` into ``sys.modules`` and removes it; lists its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from ...errors import MegatronRLPatchesError
from . import functions, refusals
from .attention import DotProductAttention
from .base import TransformerEngineBaseModule, add_to_main_grad, get_dummy_wgrad
from .layers import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

_NAME = "transformer_engine"
_in_place: dict[str, ModuleType] = {}
_blocks = 0  # number of ``with stand_in()`` blocks that are open


@contextmanager
def stand_in(requested: str | None = None) -> Iterator[None]:
    """Install the stand-in until the last open block ends. It stays for good if Megatron was imported.

    Raises:
        MegatronRLPatchesError: TransformerEngine is installed, Megatron was imported without it,
            ``requested`` is no version, or the stand-in is installed with another version already.
    """
    global _in_place, _blocks
    try:
        release = Version(requested or refusals.current)
    except InvalidVersion as error:
        raise MegatronRLPatchesError(f'{error}; expected a version, such as "{refusals.DEFAULT}"') from None
    if not _in_place:
        _check_absence()
        refusals.current = requested or refusals.DEFAULT
        _in_place = _new_modules()
        sys.modules.update(_in_place)
    elif release != Version(refusals.current):
        raise MegatronRLPatchesError(
            f"The stand-in of TransformerEngine stands for {refusals.current} in this process, not for "
            f"{requested}. Use one version in a process."
        )
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        # Functions of Megatron import from TransformerEngine when they are called.
        if _blocks == 0 and "megatron.core" not in sys.modules:
            for name, module in _in_place.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
            _in_place, refusals.current = {}, refusals.DEFAULT


def _check_absence() -> None:
    if _NAME in sys.modules or find_spec(_NAME) is not None:
        raise MegatronRLPatchesError(
            "TransformerEngine is installed, and the stand-in never takes the place of a real one. Leave out "
            "transformer_engine=True, or use an environment without TransformerEngine."
        )
    if "megatron.core" in sys.modules:
        raise MegatronRLPatchesError(
            "megatron.core was imported before the stand-in of TransformerEngine was in place, and decided "
            "then that there is none. Import megatron inside cpu_backend(transformer_engine=True) first. "
            "Tests with @pytest.mark.ranks(..., transformer_engine=True) may import it before."
        )


def _new_modules() -> dict[str, ModuleType]:
    modules: dict[str, ModuleType] = {}
    for name, values in _contents().items():
        parent, _, child = name.rpartition(".")
        if not parent and name != _NAME and find_spec(name) is not None:
            continue
        modules[name] = module = ModuleType(name, "Of the stand-in of TransformerEngine.")
        module.__spec__ = ModuleSpec(name, loader=None, origin="stand-in", is_package=True)
        module.__path__ = []
        vars(module).update(values)
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _named(*values: Any) -> dict[str, Any]:
    return {value.__name__: value for value in values}


def _refused(feature: str, names: str) -> dict[str, Any]:
    # Classes, since Megatron has subclasses of some.
    return {name: type(name, (), {"__init__": refusals.refused(feature)}) for name in names.split()}


def _contents() -> dict[str, dict[str, Any]]:
    """Return names and values of each module; parents come before their children."""
    rope, distributed = _named(functions.apply_rotary_pos_emb), _named(refusals.CudaRNGStatesTracker)
    distributed |= _refused("checkpoint(), which Megatron calls for FP8 and FP4 alone", "checkpoint")
    linear = _named(Linear, LayerNormLinear, GroupedLinear, LayerNorm, RMSNorm)
    contexts = ("fp8_autocast", "fp8_model_init", "autocast", "quantized_model_init")
    formats = ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")
    router = "fused_topk_with_score_function fused_compute_score_for_moe_aux_loss fused_moe_aux_loss"
    fp8 = {
        **_named(refusals.FP8GlobalStateManager),
        **dict.fromkeys(contexts, refusals.fp8_autocast),
        **{f"check_{name}_support": refusals.is_available for name in formats},
    }
    pytorch = {
        "attention": _named(DotProductAttention) | rope,
        "attention.rope": rope,
        # FP8 alone has something to do in recomputations.
        "distributed": distributed | {"activation_recompute_forward": lambda *args, **kwargs: nullcontext()},
        "float8_tensor": {"Float8Tensor": refusals.QuantizedTensor},
        "fp8": fp8,
        "quantization": fp8,
        "module": linear,
        "module.base": _named(TransformerEngineBaseModule, get_dummy_wgrad),
        "ops": {
            **_refused("fused operations (use_transformer_engine_op_fuser)", "FusibleOperation Sequential"),
            **_refused("activations (use_te_activation_func)", "ReLU GELU SiLU ReGLU GEGLU SwiGLU"),
        },
        "permutation": {name: value for name, value in vars(functions).items() if name.startswith("moe_")},
        "optimizers": _named(functions.FusedAdam) | {"FusedSGD": torch.optim.SGD},
        "router": _refused("fused router (moe_router_fusion)", router),
        "tensor": _named(refusals.QuantizedTensor),
    }
    return {
        _NAME: {"__version__": refusals.current},
        f"{_NAME}.common": {},
        f"{_NAME}.common.recipe": _named(refusals.Format, refusals.Recipe) | refusals.RECIPES,
        f"{_NAME}.pytorch": {
            **linear,
            **fp8,
            **distributed,
            **_named(DotProductAttention),
            **_refused("padding for FP8 (Fp8Padding, Fp8Unpadding)", "Fp8Padding Fp8Unpadding"),
        },
        **{f"{_NAME}.pytorch.{name}": values for name, values in pytorch.items()},
        # Of apex: with it, Megatron's own layers add gradients of weights to main_grad, too.
        "fused_weight_gradient_mlp_cuda": dict.fromkeys(
            ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), add_to_main_grad
        ),
    }
