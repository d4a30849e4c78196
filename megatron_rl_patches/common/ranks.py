"""Which process speaks for a job."""

from __future__ import annotations

import os
import sys


def is_rank_0() -> bool:
    """Return whether this is rank 0; before a process group is initialized, the variable ``RANK`` decides."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    try:
        return int(os.environ.get("RANK", "0")) <= 0
    except ValueError:
        return True


def is_first_of_stage() -> bool:
    """Return whether this is the first rank of its pipeline stage."""
    if is_rank_0():
        return True
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return False
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return not (parallel_state.get_tensor_model_parallel_rank() or replica)
