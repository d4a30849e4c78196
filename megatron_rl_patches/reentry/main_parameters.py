"""Main parameters: float32 copies of weights, which an optimizer updates and then writes over the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Attributes of Megatron's optimizers: lists of weights, of main parameters, and of what the optimizer gets
#: where there is no main parameter. The last two have this rank's shard, with the distributed optimizer.
_GROUPS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups", "float16_groups"),
)
#: So many elements are compared at once, in a copy of the type of the weights.
_AT_ONCE = 1 << 26


@torch.no_grad()
def differ_from_weights(optimizer: Any) -> bool:
    """Return whether some main parameter, rounded to the type of its weight, differs from that weight.

    Only what this rank updates is compared, so there is no collective, and parameters that have not been
    gathered do not matter. Both are read once, and a GPU is waited for once, where the optimizer is on it.
    Left out are weights in fp8 or fp4, main parameters that FusedAdam keeps (precision-aware), and memory
    that has been freed or moved away.
    """
    differences = []
    for pair in _pairs(optimizer):
        for weight, main in zip(*(torch.split(each, _AT_ONCE) for each in pair), strict=True):
            rounded = torch.empty_like(weight).copy_(main)
            differences.append(rounded.sub_(weight).abs_().max().float())
    return bool(differences) and bool((torch.stack(differences) > 0).any())  # NaN is no difference


def _pairs(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight, or this rank's part of it, and what the optimizer updates in its place."""
    if (parts := getattr(optimizer, "chained_optimizers", None)) is not None:
        for part in parts:
            yield from _pairs(part)
        return
    # With this option weights are written in the next forward pass.
    if getattr(getattr(optimizer, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False):
        return
    # With optimizer_cpu_offload, the optimizer inside updates copies of its own.
    copies = getattr(getattr(optimizer, "optimizer", None), "param_to_inner_param", {})
    for names in _GROUPS:
        for group in zip(*(getattr(optimizer, name, ()) for name in names), strict=True):
            for weight, main, shard in zip(*group, strict=True):
                main = copies.get(shard if main is None else main, main)
                if main is None or type(weight.data) is not torch.Tensor:
                    continue
                if not all(each.untyped_storage().size() for each in (weight, main)):
                    continue
                flat = weight.detach().reshape(-1)
                if names[0].startswith("model_"):
                    places = optimizer._get_model_param_range_map(weight)["param"]
                    flat = flat[places.start : places.end]
                is_moved = flat.device != main.device and not copies
                if not is_moved and flat.data_ptr() != main.data_ptr():
                    yield flat, main.detach().reshape(-1)
