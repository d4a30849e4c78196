"""Communication of tensor parallel layers, which is Megatron's. Sequences lie along the first dimension.

Megatron is imported late: it must not be imported before the stand-in is in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def enter_column(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Return the input of a column parallel product from a rank's part of the sequence, or from all of it."""
    from megatron.core.tensor_parallel import mappings as m

    gather, copy = m.gather_from_sequence_parallel_region, m.copy_to_tensor_model_parallel_region
    return (gather if sequence_parallel else copy)(x, group=group)


def leave_row(x: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """Sum the row parallel products of all ranks; return a rank's part of the sequence, or all of it."""
    from megatron.core.tensor_parallel import mappings as m

    scatter, reduce = m.reduce_scatter_to_sequence_parallel_region, m.reduce_from_tensor_model_parallel_region
    return (scatter if sequence_parallel else reduce)(x, group=group)
