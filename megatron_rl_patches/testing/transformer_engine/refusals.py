"""What the stand-in refuses by name, FP8 above all."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from ...errors import MegatronRLPatchesError


def refuse(feature: str) -> NoReturn:
    raise MegatronRLPatchesError(
        f"The stand-in of TransformerEngine has no {feature}. "
        "Switch it off, or run on a GPU with the real one."
    )


def fp8_autocast(enabled: bool = True, **options: Any) -> AbstractContextManager[None]:
    """Refuse FP8 where it is enabled: high precision in its place would let a test of FP8 pass."""
    return refuse("FP8 (fp8_autocast, fp8_model_init)") if enabled else nullcontext()


class Fp8Padding:
    """Refuses to be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse("padding for FP8 (Fp8Padding, Fp8Unpadding)")


def is_available() -> tuple[bool, str]:
    """Answer for every format of low precision."""
    return False, "the stand-in of TransformerEngine has no FP8"


def fused_router(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse the fused kernels of the router."""
    refuse("fused router (moe_router_fusion)")


class FP8GlobalStateManager:
    """Answers that FP8 is off."""

    _no = staticmethod(lambda *args, **kwargs: False)
    _nothing = staticmethod(lambda *args, **kwargs: None)
    is_fp8_enabled = is_fp8_calibration = with_fp8_parameters = is_first_fp8_module = _no
    fp8_graph_capturing = get_fp8_recipe = get_fp8_group = get_skip_fp8_weight_update_tensor = _nothing
    reset = reduce_and_update_fp8_tensors = set_skip_fp8_weight_update_tensor = _nothing
    is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = staticmethod(is_available)


class QuantizedTensor(torch.Tensor):
    """Base of tensors in FP8, of which there are none."""


Format = enum.Enum("Format", ["E4M3", "E5M2", "HYBRID"])


class Recipe:
    """Base of recipes, which carry their options and are refused where one is used."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


_RECIPES = ("Delayed", "Float8Current", "Float8Block", "MXFP8Block", "NVFP4Block")
RECIPES = {f"{name}Scaling": type(f"{name}Scaling", (Recipe,), {}) for name in _RECIPES}
