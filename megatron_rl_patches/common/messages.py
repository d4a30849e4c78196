"""Log messages: each says what happened, whether that is harmful, and what to do; and who logs it."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

#: All of them are logged here, so that one line silences or redirects them.
log = logging.getLogger("megatron_rl_patches")
#: Every message of the modules that are imported; docs/messages.md lists them.
messages: list[Message] = []


@dataclass(frozen=True)
class Message:
    """What is logged. The three texts are sentences; values stand in braces, as in ``str.format``."""

    happened: str  # without a period at its end
    harm: str  # whether it is harmful, and to what
    remedy: str  # what to do
    level: int = logging.WARNING

    def __post_init__(self) -> None:
        messages.append(self)

    def text(self, **values: Any) -> str:
        """Return the line that is logged."""
        return f"megatron_rl_patches: {self.happened}. {self.harm} {self.remedy}".format(**values)

    def log(self, **values: Any) -> None:
        log.log(self.level, "%s", self.text(**values))


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
