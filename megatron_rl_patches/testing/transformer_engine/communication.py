"""Communication of a group's ranks, which is Megatron's. Sequences lie along the first dimension.

Megatron is imported late: it must not be imported before the stand-in is in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def enter(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return all of a sequence, of which each rank has a part or all; gradients are sums over the ranks."""
    from megatron.core.tensor_parallel import mappings as m

    gather, copy = m.gather_from_sequence_parallel_region, m.copy_to_tensor_model_parallel_region
    return (gather if is_split else copy)(x, group=group)


def leave(x: Tensor, group: Any, is_split: bool) -> Tensor:
    """Return the sum over the ranks: a rank's part of the sequence, or all of it."""
    from megatron.core.tensor_parallel import mappings as m

    scatter, reduce = m.reduce_scatter_to_sequence_parallel_region, m.reduce_from_tensor_model_parallel_region
    return (scatter if is_split else reduce)(x, group=group)
