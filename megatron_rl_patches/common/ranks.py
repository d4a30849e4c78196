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
