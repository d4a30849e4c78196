"""What each rank checks before it scores, and the ranks that would wait for one that refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state

from ...errors import InvalidInputError
from ...reentry.forward_pre_hooks import why_not_gathered


def groups_that_wait(chunks: Sequence[torch.nn.Module], config: Any) -> list[Any]:
    """Return groups through which every rank that would wait for this one in a collective is reached."""
    groups = [parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()]
    if shares_experts(config):
        groups.append(parallel_state.get_expert_model_parallel_group())
    if any(getattr(chunk, "use_forward_hook", False) for chunk in chunks):  # parameters may be gathered
        groups.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
    return groups


def shares_experts(config: Any) -> bool:
    return bool(getattr(config, "num_moe_experts", None)) and config.expert_model_parallel_size > 1


def check_model(chunks: Sequence[torch.nn.Module], config: Any) -> None:
    """Refuse chunks that are not this rank's part of a model of Megatron's, or that cannot be scored now."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if len(chunks) != virtual:
        raise InvalidInputError(
            f"the model has {len(chunks)} chunks, parallel_state a virtual pipeline size of {virtual}: pass "
            "all chunks of this rank, built for the parallel groups that are initialized."
        )
    if config is None:
        raise InvalidInputError(
            f"the model is a {type(chunks[0]).__name__}. Expected: a model of Megatron's, which has a config."
        )
    if problem := why_not_gathered(chunks):
        raise InvalidInputError(problem)
