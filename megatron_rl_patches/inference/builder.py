"""Megatron models that only score: no DDP, no gradient buffers, no optimizer.

:func:`build_inference_model` gives what ``megatron.training``'s ``get_model(..., wrap_with_ddp=False)`` would
give, on megatron-core alone, and ready for scoring.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.enums import ModelType
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.transformer.module import Float16Module
from torch.nn import Module

from ..errors import InferenceOnlyError, InvalidInputError
from ._meta_device import materialize, parameters_on_meta, replaced
from ._provider import (
    DTYPES,
    arguments_per_stage,
    call_provider,
    give_own_config,
    inference_copy,
    listed,
    pipeline_rank_and_size,
    require_inference_chunk,
    without_training,
)
from .global_state import preserved_rng
from .untrainable import refuse_training

__all__ = ["build_inference_model", "freeze", "without_training"]

_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")

PreWrap = Callable[[list[Module]], "Sequence[Module] | None"]


def build_inference_model(
    model_provider: Callable[..., Module],
    config: Any,
    *,
    model_type: Any = None,
    dtype: str = "bf16",
    device: torch.device | str | None = None,
    virtual_pipeline_size: int | None = None,
    pg_collection: Any = None,
    pre_wrap: PreWrap | None = None,
) -> list[Module]:
    """Build a teacher, a reference or a reward model that is only ever asked to score.

    The chunks unwrap by ``.module`` and have the ``state_dict`` and ``sharded_state_dict`` keys of what
    Megatron's ``get_model(..., wrap_with_ddp=False)`` returns; they are in eval mode and frozen. Parameters
    are constructed on the meta device and get memory once, in their final dtype, so the peak is the
    parameters alone. They are **not initialised** but filled with NaN: load a checkpoint before use. What
    loops call on a chunk in order to train it, such as ``zero_grad_buffer()`` and ``no_sync()``, raises
    ``InferenceOnlyError``.

    Needs Megatron's parallel groups. Starts no collective, so errors cannot leave other ranks hanging. Random
    streams are as before.

    Args:
        model_provider: called once per virtual pipeline stage, by keyword, with those of ``pre_process``,
            ``post_process``, ``config``, ``pg_collection`` and (with virtual stages) ``vp_stage`` that it
            takes, as Megatron's ``get_model`` of the installed release would. It should take ``config``. A
            method of ``config`` itself (Megatron-Bridge's ``provider.provide``) is called on the copy.
        config: a ``TransformerConfig``. The model gets a copy with ``dtype`` and without sync functions,
            gradient scale and timers: one that is shared with a policy would run the policy's ``no_sync``
            around the teacher's forward passes. The original is not touched.
        model_type: a ``megatron.core.enums.ModelType``; by default ``encoder_or_decoder``.
        dtype: ``"bf16"``, ``"fp16"`` (both in ``Float16Module``) or ``"fp32"``, whatever ``config`` says.
        device: where parameters and buffers go; by default the current CUDA device. ``"meta"`` leaves the
            parameters without memory, for counting them; this works without CUDA.
        virtual_pipeline_size: chunks per pipeline rank; by default what ``config`` or Megatron's groups say.
        pg_collection: a ``ProcessGroupCollection`` to use in place of Megatron's global groups.
        pre_wrap: called with the bare chunks, in memory and in their dtype, before ``Float16Module``: for
            hooks that load Hugging Face weights. Returns the chunks to go on with, or ``None``.

    Returns:
        One module per virtual pipeline stage; a list of one without.

    Raises:
        InvalidInputError: a dtype, device or virtual pipeline size that does not fit, or a provider that
            returns no module.
        InferenceOnlyError: Megatron's parallel groups do not exist; the provider wraps in DDP, or builds on a
            config that is, or may become, a policy's.
    """
    _require_parallel_groups(pg_collection)
    target = _target_device(device)
    _require_dtype(dtype, target)
    stages = _virtual_stages(virtual_pipeline_size, config, pg_collection)
    own = inference_copy(config, dtype)
    own.virtual_pipeline_model_parallel_size = stages
    if inspect.ismethod(model_provider) and model_provider.__self__ is config:
        model_provider = types.MethodType(model_provider.__func__, own)

    with preserved_rng():
        with _constructing(own, target):
            chunks = []
            for arguments in arguments_per_stage(own, stages, pg_collection):
                chunk = call_provider(model_provider, arguments)
                require_inference_chunk(chunk)
                give_own_config(chunk, own, config, dtype)
                _finish_as_get_model_does(chunk, model_type, arguments.get("vp_stage"))
                chunks.append(chunk)
        if target.type != "meta":
            for chunk in chunks:
                materialize(chunk, target)
        if pre_wrap is not None:
            chunks = list(pre_wrap(chunks) or chunks)
            for chunk in chunks:
                require_inference_chunk(chunk)
        if target.type != "meta":
            chunks = [chunk.to(target) for chunk in chunks]
        if dtype != "fp32":
            chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
        correct_amax_history_if_needed(chunks)
    freeze(chunks)
    refuse_training(chunks, role="inference-only", setting="build_inference_model")
    return chunks


def freeze(model: Sequence[Module]) -> None:
    """Eval mode, and no parameter requires a gradient.

    Say it again before scoring when somebody may have called ``train()``: the ``forward_only`` of slime and
    miles ends with it.
    """
    for chunk in model:
        chunk.eval()
        chunk.requires_grad_(False)


def _require_parallel_groups(pg_collection: Any) -> None:
    if pg_collection is None and not parallel_state.model_parallel_is_initialized():
        raise InferenceOnlyError(
            "Megatron's parallel groups do not exist, and the model is built from its rank in them: call "
            "megatron.core.parallel_state.initialize_model_parallel first, or pass pg_collection"
        )


def _target_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        raise InvalidInputError("no device given and no CUDA device here: pass device='cpu' or device='meta'")
    return torch.device("cuda", torch.cuda.current_device())


def _require_dtype(dtype: str, target: torch.device) -> None:
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(map(repr, DTYPES))}")
    has_no_bf16 = (
        target.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(target) < (8, 0)
    )
    if dtype == "bf16" and has_no_bf16:
        raise InvalidInputError(
            f"dtype is 'bf16', which {torch.cuda.get_device_name(target)} does not compute with: "
            "use 'fp16' or 'fp32'"
        )


def _virtual_stages(asked: int | None, config: Any, pg_collection: Any) -> int | None:
    """Chunks per pipeline rank, ``None`` without interleaving; all who say a number must say the same."""
    groups = "Megatron's parallel groups"
    said = {
        "virtual_pipeline_size": asked,
        "config.virtual_pipeline_model_parallel_size": config.virtual_pipeline_model_parallel_size,
    }
    if pg_collection is None:
        # The schedules go by it, and releases without vp_stage build by it.
        said[groups] = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    sizes = {size for size in said.values() if size is not None}
    if not sizes or sizes == {1}:
        return None
    if pipeline_rank_and_size(pg_collection)[1] == 1:
        raise InvalidInputError(f"{listed(said)}; but virtual stages need more than one pipeline rank")
    if len(sizes) > 1 or min(sizes) < 1 or said.get(groups, 0) is None:
        raise InvalidInputError(
            f"{listed(said)}; these do not fit together. One pipeline schedule runs all models of a process, "
            "so they have equally many chunks per rank"
        )
    return sizes.pop()


@contextmanager
def _constructing(own: Any, target: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(parameters_on_meta(use_cuda=target.type == "cuda"))
        # Its buffers would not stand meta parameters; and there is no need to wait for them to be allocated.
        stack.enter_context(replaced(_BaseDataParallel, "__init__", _refuse_data_parallel))
        for name in _INIT_METHODS:
            if hasattr(own, name):  # what they would fill for real is thrown away
                stack.enter_context(replaced(own, name, lambda tensor: None))
        if target.type == "meta":  # or else whole weights, of all tensor-parallel ranks, are put together
            stack.enter_context(replaced(own, "use_cpu_initialization", False))
        yield


def _refuse_data_parallel(self: Any, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"the model provider wraps the model in {type(self).__name__}, which is for training; one for "
        "inference returns the bare model (of Megatron-Bridge's: provide, not provide_distributed_model)"
    )


def _finish_as_get_model_does(chunk: Any, model_type: Any, stage: int | None) -> None:
    chunk.model_type = ModelType.encoder_or_decoder if model_type is None else model_type
    if stage is not None:
        chunk.vp_stage = stage
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if chunk.config.bf16 or chunk.config.fp16:
        # For its effect on dtypes: free on the meta device, and what Megatron leaves in float32 stays so.
        Float16Module(chunk.config, chunk)
