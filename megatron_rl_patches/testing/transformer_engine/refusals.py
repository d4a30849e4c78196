"""Which release the stand-in stands for, what it does not have, FP8 above all, and what both refuse."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from packaging.version import Version

from ...errors import MegatronRLPatchesError

DEFAULT = "2.9.0"
#: The version that Megatron reads, and on which attributes depend.
current = DEFAULT


def is_at_least(release: str) -> bool:
    """Return whether the version is the release or a later one."""
    return Version(current) >= Version(release)


_LINEAR = "ub_name name | ub_overlap_ag ub_overlap_rs delay_wgrad_compute ub_overlap_rs_dgrad ub_bulk_dgrad "
_LINEAR += "ub_bulk_wgrad parameters_split symmetric_ar_type"
#: Options that signatures here do not name. Those before the bar may have any value: layers follow it, or no
#: result on a CPU depends on it. The others must be off. The release after ``>`` is the first with an option.
_OPTIONS = {
    "Linear": f"rng_tracker_name save_original_input {_LINEAR}",
    "LayerNormLinear": f"{_LINEAR} return_layernorm_output return_layernorm_output_gathered",
    "GroupedLinear": "ub_name name>2.11 rng_tracker_name save_original_input | "
    "ub_overlap_ag ub_overlap_rs delay_wgrad_compute use_grouped_tensor>2.19",  # 2.19 is the main branch
    "Norm": "device dtype sm_margin |",
    "DotProductAttention": "layer_number cp_global_ranks cp_stream name>2.16 | bottom_right_diagonal>2.12 "
    "return_max_logit",
    "DotProductAttention.forward": "max_seqlen_q max_seqlen_kv pad_between_seqs checkpoint_core_attention "
    "fast_zero_fill num_splits>2.10 | fp8_output alibi_slopes inference_params bottom_right_diagonal>2.12",
    "FusedAdam": "| bias_correction set_grad_none exp_avg_dtype exp_avg_sq_dtype master_weight_dtype amsgrad "
    "capturable master_weights use_decoupled_grad store_param_remainders",
    "moe_permute": "max_token_num | map_type",
    "moe_unpermute": "| map_type probs pad_offsets>2.12",
    "apply_rotary_pos_emb": "fused | start_positions",
}
#: What options are if they are off. Others are ``None`` or ``False`` then.
_OFF: dict[str, Any] = {"bias_correction": True, "set_grad_none": None, "bottom_right_diagonal": None}
_OFF |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype"), torch.float32)
_OFF |= {"map_type": "mask"}
#: Which options of Megatron set an option of another name.
_SET_BY = {"return_max_logit": ", which qk_clip and log_max_attention_logit set"}


class RefusedInput(MegatronRLPatchesError, AssertionError, ValueError):
    """Input that the real one refuses, too. The type of its error depends on the release."""


def require(*conditions: tuple[object, str]) -> None:
    """Refuse input unless all conditions hold, each with a message; the real one has the same conditions."""
    for holds, message in conditions:
        if not holds:
            raise RefusedInput(f"{message}. TransformerEngine {current} refuses this, too.")


def check_options(owner: str, options: Mapping[str, Any]) -> None:
    """Refuse options that the owner does not have in this release, or that must be off and are not."""
    of_any_value, others = (
        dict(option.partition(">")[::2] for option in names.split()) for names in _OPTIONS[owner].split("|")
    )
    since = of_any_value | others
    for name, value in options.items():
        if name not in since or not is_at_least(since[name] or "0"):
            raise TypeError(f"{owner} of TransformerEngine {current} has no argument {name!r} here")
        is_off = value is None or (value == _OFF[name] if name in _OFF else value is False)
        if name in others and not is_off:
            refuse(f"{name}={value!r} of {owner}{_SET_BY.get(name, '')}")


def refuse(feature: str) -> NoReturn:
    raise MegatronRLPatchesError(
        f"The stand-in of TransformerEngine has no {feature}. "
        "Switch it off, or run on a GPU with the real one."
    )


def refused(feature: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to be called."""
    return lambda *args, **kwargs: refuse(feature)


def fp8_autocast(enabled: bool = True, **options: Any) -> AbstractContextManager[None]:
    """Refuse FP8 where it is enabled: high precision in its place would let a test of FP8 pass."""
    return refuse("FP8 (fp8_autocast, fp8_model_init)") if enabled else nullcontext()


def is_available() -> tuple[bool, str]:
    """Answer for every format of low precision."""
    return False, "the stand-in of TransformerEngine has no FP8"


class FP8GlobalStateManager:
    """Answers that FP8 is off."""

    is_fp8_enabled = is_fp8_calibration = is_first_fp8_module = staticmethod(lambda: False)
    get_fp8_recipe = get_fp8_group = staticmethod(lambda: None)
    is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = staticmethod(is_available)


class CudaRNGStatesTracker:
    """Base of Megatron's random states for CUDA graphs, which a CPU does not have."""

    __init__ = refused("random states for CUDA graphs (te_rng_tracker)")


class QuantizedTensor(torch.Tensor):
    """Base of tensors in FP8, of which there are none."""


Format = enum.Enum("Format", ["E4M3", "E5M2", "HYBRID"])


class Recipe(SimpleNamespace):
    """Base of recipes, which carry their options and are refused where one is used."""


_RECIPES = ("Delayed", "Float8Current", "Float8Block", "MXFP8Block", "NVFP4Block")
RECIPES = {f"{name}Scaling": type(f"{name}Scaling", (Recipe,), {}) for name in _RECIPES}
