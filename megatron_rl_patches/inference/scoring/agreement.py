"""What each rank checks before it scores, and the ranks that would wait for one that refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state

from ...errors import InvalidInputError
from ...losses.logits.options import VocabParallelOptions, is_integer
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


def check_options(
    forward: Any,
    vocab_size: Any,
    padded_size: int | None,
    output_device: Any,
    temperature: Any,
    allgather_cp: Any,
) -> None:
    """Refuse wrong options of any function of scoring, on all stages, also on those that do not read them."""
    VocabParallelOptions(temperature=temperature)
    if allgather_cp:
        raise InvalidInputError(
            "all-gather context parallelism is not supported here: cut the sequences in zigzag, or pass a "
            "`forward` that returns the logits of whole sequences."
        )
    if forward is not None and not callable(forward):
        raise InvalidInputError(
            f"forward is {forward!r}. Expected: a function of a model chunk and a microbatch."
        )
    if vocab_size is not None and not (
        is_integer(vocab_size) and 0 < vocab_size <= (padded_size or vocab_size)
    ):
        raise InvalidInputError(
            f"vocab_size is {vocab_size!r}. Expected: 1 to {padded_size}, the model's ids."
        )
    try:
        torch.device(output_device)
    except (RuntimeError, TypeError):
        raise InvalidInputError(f"output_device is {output_device!r}. Expected: a device of torch.") from None
