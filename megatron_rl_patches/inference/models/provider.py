"""Calls of a model provider, and checks of what it returns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, process_groups_config
from torch.nn import Module, Parameter

from ...common.chunks import SYNC_FUNCTIONS, is_data_parallel
from ...errors import InferenceOnlyError, InvalidInputError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Fields of a config that training loops set, and that schedules act upon.
_TRAINING_ONLY = [*SYNC_FUNCTIONS, "finalize_model_grads_func", "timers"]
_TRAINING_ONLY += ["grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func"]


def without_training(config: Any) -> Any:
    """Return a copy of a ``TransformerConfig`` without the functions and timers of training loops."""
    # Shallow: members such as process groups cannot be copied, and a dataclass checks itself only when made.
    own = copy.copy(config)
    for name in _TRAINING_ONLY:
        if hasattr(own, name):
            setattr(own, name, None)
    return own


def inference_copy(config: Any, dtype: str) -> Any:
    """Return a copy for scoring, with another dtype of parameters and of what pipeline stages send."""
    own = without_training(config)
    own.bf16, own.fp16 = dtype == "bf16", dtype == "fp16"
    if own.autocast_dtype == own.params_dtype:
        own.autocast_dtype = DTYPES[dtype]
    own.params_dtype = own.pipeline_dtype = DTYPES[dtype]
    return own


def arguments_per_stage(own: Any) -> Iterator[dict[str, Any]]:
    """Yield what Megatron's ``get_model`` passes to a provider, for each virtual stage of the config."""
    stages, groups = own.virtual_pipeline_model_parallel_size, None
    # Not as the groups say: tools that convert models pretend to be on another rank.
    rank = parallel_state.get_pipeline_model_parallel_rank()
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if hasattr(process_groups_config, "ProcessGroupCollection"):
        groups = process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    for stage in range(stages or 1):
        is_last = rank == size - 1 and stage == (stages or 1) - 1
        ends = {"pre_process": rank == stage == 0, "post_process": is_last}
        others = {"config": own, "pg_collection": groups, "vp_stage": None if stages is None else stage}
        yield ends | {name: value for name, value in others.items() if value is not None}


def call_provider(provider: Callable[..., Module], arguments: Mapping[str, Any]) -> Module:
    """Call the provider with those of the arguments that it takes."""
    parameters = inspect.signature(provider).parameters.values()
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes |= arguments.keys()
    if "vp_stage" in arguments and "vp_stage" not in takes:
        raise InvalidInputError(
            f"the model provider {provider!r} takes no vp_stage, so it cannot tell virtual pipeline stages "
            "apart: give it that parameter, and pass it on to the model"
        )
    return provider(**{name: value for name, value in arguments.items() if name in takes})


def require_inference_chunk(chunk: Any) -> None:
    """Refuse what is no module, and a model that trains, since it would be frozen."""
    if not isinstance(chunk, Module):
        raise InvalidInputError(f"the model provider returned {chunk!r}, not one torch.nn.Module per call")
    for module in chunk.modules():
        if is_data_parallel(module) or type(module).__name__ == "FSDPModule":
            raise InferenceOnlyError(
                f"the model provider returned a model in {type(module).__name__}, which trains; "
                "it must build and return a bare model of its own"
            )
    for name, parameter in chunk.named_parameters():
        if hasattr(parameter, "main_grad"):
            raise InferenceOnlyError(
                f"the model provider returned a model whose parameter {name} has a gradient buffer, so it "
                "belongs to a model that trains; build a new model"
            )


def require_new_parameters(chunk: Module, created: Sequence[Parameter], provider: Any) -> None:
    """Refuse a weight that is not among those ``created`` in this build: it may be a policy's, and be frozen.

    Parameters of tensor subclasses are created in ways of their own, and are not checked.
    """
    new = set(map(id, created))
    for name, parameter in chunk.named_parameters():
        if type(parameter) is Parameter and id(parameter) not in new:
            raise InferenceOnlyError(
                f"the model provider {provider!r} returned a model with {name}, which it has not just "
                "created: build and return a new model"
            )


def give_own_config(chunk: Module, own: Any, original: Any, dtype: str) -> None:
    """Give the chunk a config that it shares with no policy.

    A provider may ignore ``own``, the copy of the ``original`` config, and make another one. Another model
    may hold that one, too, so the chunk gets a copy of it.
    """
    used = getattr(chunk, "config", None)
    if used is own:
        return
    if used is None:
        raise InvalidInputError(
            f"the model provider returned a {type(chunk).__name__} without a config, by which Megatron's "
            "schedules run a model: return a MegatronModule"
        )
    advice = "give the provider a parameter `config`, and build the model with it"
    installed = [name for name in SYNC_FUNCTIONS if getattr(used, name, None) is not None]
    if used is original or installed:
        why = f"has {', '.join(installed)} of a model that trains" if installed else "is the one passed in"
        raise InferenceOnlyError(
            f"the model provider does not build on the config that it is called with, but on one that {why}: "
            f"with a shared config the teacher would run inside the policy's sync functions; {advice}"
        )
    values = {name: getattr(used, name) for name in ("bf16", "fp16", "params_dtype")}
    if differing := [f"{name}: {x}" for name, x in values.items() if x != getattr(own, name)]:
        raise InferenceOnlyError(
            f"dtype is {dtype!r}, but the model provider builds on a config of its own, with "
            f"{', '.join(differing)}; {advice}"
        )
    copied = inference_copy(used, dtype)
    for module in chunk.modules():
        if getattr(module, "config", None) is used:
            module.config = copied
