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
_BATCH = 1 << 26

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def differ_from_weights(optimizer: Any) -> bool:
    """Return whether some main parameter, rounded to the type of its weight, is not that weight.

    Only what this rank updates is compared, so there is no collective, and parameters that have not been
    gathered do not matter. Both are read once, and a GPU is waited for once, where the optimizer is on it.
    Left out are weights in fp8 or fp4, main parameters that FusedAdam keeps (precision-aware), and memory
    that has been freed or moved away.
    """
    differences = []
    for batch in _batches(optimizer):
        weights, main_parameters = zip(*batch, strict=True)
        rounded = [torch.empty_like(weight) for weight in weights]
        torch._foreach_copy_(rounded, main_parameters)
        torch._foreach_sub_(rounded, weights)
        torch._foreach_abs_(rounded)
        differences += [largest.float() for largest in torch._foreach_max(rounded)]
    return bool(differences) and bool((torch.stack(differences) > 0).any())  # NaN is no difference


def _batches(optimizer: Any) -> Iterator[list[Pair]]:
    batch, size = list[Pair](), 0
    for weight, main in _pairs(optimizer):
        for pair in zip(torch.split(weight, _BATCH), torch.split(main, _BATCH), strict=True):
            if size + pair[0].numel() > _BATCH:
                yield batch
                batch, size = [], 0
            batch.append(pair)
            size += pair[0].numel()
    if batch:
        yield batch


def _pairs(optimizer: Any) -> Iterator[Pair]:
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
