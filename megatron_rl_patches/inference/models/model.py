"""Megatron models that only score: they have no DDP, stay frozen, and refuse to train."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.enums import ModelType
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.transformer.module import Float16Module
from torch.nn import Module

from ...common.chunks import as_chunks
from ...common.scopes import replaced
from ...errors import InferenceOnlyError, InvalidInputError
from ...reentry import router_replay
from ..weights import TURNS_TO_FLOAT32
from . import isolation
from .provider import (
    DTYPES,
    arguments_per_stage,
    call_provider,
    give_own_config,
    inference_copy,
    require_inference_chunk,
    require_new_parameters,
)

_INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
# Attribute of a chunk that only scores: its role, and the setting because of which it is one.
_ROLE = "inference_only_role"
# Methods of a DDP chunk that training loops call.
_TRAINING_METHODS = (
    *("disable_forward_pre_hook", "enable_forward_pre_hook", "finish_grad_sync", "no_sync"),
    *("scale_gradients", "start_grad_sync", "start_param_sync", "zero_grad_buffer"),
)


def build_inference_model(
    model_provider: Callable[..., Module],
    config: Any,
    *,
    dtype: str = "bf16",
    device: torch.device | str | None = None,
    pre_wrap: Callable[[list[Module]], Sequence[Module] | None] | None = None,
    perform_initialization: bool = False,
    with_mtp: bool = False,
) -> list[Module]:
    """Build a model that only scores: a teacher, a reference or a reward model.

    The chunks unwrap by ``.module`` and have the ``state_dict`` and ``sharded_state_dict`` keys of what
    Megatron's ``get_model(..., wrap_with_ddp=False)`` returns; they are in eval mode and frozen, and methods
    that training loops call on a chunk, such as ``no_sync()``, raise ``InferenceOnlyError``. Parameters get
    memory once, in their final dtype. They are **not initialized** but filled with NaN: load a checkpoint.
    Megatron's groups must exist. No collective is started. Random streams and other threads go on as before.

    Args:
        model_provider: called once per virtual pipeline stage, by keyword, with those of ``pre_process``,
            ``post_process``, ``config``, ``pg_collection`` and (with virtual stages) ``vp_stage`` that it
            takes. If it is a method of ``config`` (Megatron-Bridge's), it is called on the copy.
        config: a ``TransformerConfig``. The model gets a copy with ``dtype``, and without the sync functions,
            gradient scale and timers of a policy. Megatron's groups decide on virtual pipeline stages.
        dtype: ``"bf16"``, ``"fp16"`` (both in ``Float16Module``) or ``"fp32"``, whatever ``config`` says.
        device: where parameters and buffers go; by default the current CUDA device. ``"meta"`` leaves the
            parameters without memory. Neither ``"meta"`` nor ``"cpu"`` initializes CUDA: call
            ``torch.cuda.init()`` before, if a mixture of experts moves to a GPU later, as it keeps streams.
        pre_wrap: called with the bare chunks, in memory and in their dtype, before ``Float16Module``: for
            hooks that load Hugging Face weights. Returns the chunks to go on with, or ``None``.
        perform_initialization: initialize the parameters on ``device``, as ``get_model`` does, for a provider
            that needs their values. Collectives of constructors (tied embeddings) run.
        with_mtp: build the layers of multi-token prediction that ``config`` asks for; no score needs them.

    Returns:
        One module per virtual pipeline stage; a list of one without virtual stages.

    Raises:
        InvalidInputError: a dtype or virtual pipeline size that does not fit; no CUDA device; a provider
            that returns no module; or streams that are not seeded where weights are initialized.
        InferenceOnlyError: Megatron's parallel groups do not exist; the provider wraps in DDP, returns
            weights that are not new, builds on a config that may be a policy's, or needs initialization.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise InferenceOnlyError(
            "Megatron's parallel groups do not exist, and the model is built from its rank in them: call "
            "megatron.core.parallel_state.initialize_model_parallel first"
        )
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype is {dtype!r}; it can be {', '.join(map(repr, DTYPES))}")
    target = torch.device("cuda" if device is None else device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError("there is no CUDA device: pass device='cpu' or device='meta'")
    if device is None:
        target = torch.device("cuda", torch.cuda.current_device())
    if perform_initialization:
        if target.type == "meta":
            raise InvalidInputError("perform_initialization=True with device='meta', which has no memory")
        sizes = (config.tensor_model_parallel_size, config.expert_model_parallel_size)
        if max(sizes) > 1 and not config.use_cpu_initialization and not isolation.rng_tracker_is_seeded():
            raise InvalidInputError(
                f"perform_initialization=True with tensor-parallel size {sizes[0]} and expert-parallel size "
                f"{sizes[1]}, but Megatron's random streams are not seeded: all ranks would draw the same "
                "weights: call megatron.core.tensor_parallel.model_parallel_cuda_manual_seed first, or set "
                "use_cpu_initialization in the config"
            )
    own = inference_copy(config, dtype)
    own.virtual_pipeline_model_parallel_size = _virtual_stages(config)
    if not with_mtp:
        own.mtp_num_layers = None
    if inspect.ismethod(model_provider) and model_provider.__self__ is config:
        model_provider = types.MethodType(model_provider.__func__, own)
    with isolation.preserved_rng():
        chunks = _constructed(model_provider, config, own, target, dtype, perform_initialization)
        if pre_wrap is not None:
            chunks = list(pre_wrap(chunks) or chunks)
            for chunk in chunks:
                require_inference_chunk(chunk)
        if target.type != "meta":
            chunks = [chunk.to(target) for chunk in chunks]
        if dtype != "fp32":
            chunks = [_in_float16_module(chunk) for chunk in chunks]
    correct_amax_history_if_needed(chunks)
    freeze(chunks, role="inference-only", setting="build_inference_model")
    return chunks


def _virtual_stages(config: Any) -> int | None:
    """Return the chunks per pipeline rank, ``None`` without interleaving; config and groups must agree."""
    size = config.virtual_pipeline_model_parallel_size
    of_groups = parallel_state.get_virtual_pipeline_model_parallel_world_size()  # which schedules read
    if size is not None and size != (of_groups or 1):
        raise InvalidInputError(
            f"config.virtual_pipeline_model_parallel_size is {size}, that of Megatron's parallel groups "
            f"{of_groups}. One schedule runs all models of a process, so all have as many chunks per rank"
        )
    return None if of_groups == 1 else of_groups


def _constructed(
    provider: Callable[..., Any], config: Any, own: Any, target: torch.device, dtype: str, initializes: bool
) -> list[Module]:
    """Call the provider with ``own``, the copy of the config, for each stage; parameters get memory last."""
    changes: dict[str, Any] = {}
    if not initializes:
        changes = {name: lambda tensor: None for name in _INIT_METHODS if hasattr(own, name)}
    if target.type == "meta":  # with this option, constructors build the weights of all TP ranks
        changes["use_cpu_initialization"] = False
    chunks: list[Module] = []
    try:
        with (
            isolation.construction(on_meta=not initializes, use_cuda=target.type == "cuda") as created,
            # DDP is refused before its constructor fails on meta parameters or allocates gradient buffers.
            isolation.replaced_in_this_thread(_BaseDataParallel, "__init__", _refuse_data_parallel),
            replaced(own, **changes),
        ):
            for arguments in arguments_per_stage(own):
                chunk: Any = call_provider(provider, arguments)
                require_inference_chunk(chunk)
                require_new_parameters(chunk, created, provider)
                give_own_config(chunk, own, config, dtype)
                # What Megatron's get_model does with a chunk:
                chunk.model_type = ModelType.encoder_or_decoder
                if "vp_stage" in arguments:
                    chunk.vp_stage = arguments["vp_stage"]
                for parameter in chunk.parameters():
                    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
                if chunk.config.bf16 or chunk.config.fp16:
                    # On the meta device this costs nothing. The wrapper itself is not needed.
                    _in_float16_module(chunk)
                chunks.append(chunk)
        for chunk in chunks if target.type != "meta" else ():
            isolation.materialize(chunk, target)
    except isolation.NeedsValuesError as error:
        raise InferenceOnlyError(
            f"the model provider {provider!r} {error}, and weights have no memory then: pass "
            "perform_initialization=True, with which parameters are constructed on the device"
        ) from error
    return chunks


def _in_float16_module(chunk: Any) -> Module:
    """Wrap the chunk as Megatron does; what its owner turns back to float32 afterwards keeps its bits."""
    routers = [(m, dict(m._buffers)) for m in chunk.modules() if hasattr(m, TURNS_TO_FLOAT32)]
    names = "_keep_in_float32_parameter_names"  # of Megatron-Bridge
    parameters = [m._parameters[name] for m in chunk.modules() for name in vars(m).get(names, ())]
    values = [parameter.data for parameter in parameters]
    wrapped: Module = Float16Module(chunk.config, chunk)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    for router, before in routers:
        getattr(router, TURNS_TO_FLOAT32)()
        own = router._buffers
        own |= {name: old for name, old in before.items() if old is not None and old.dtype == own[name].dtype}
    return wrapped


def _refuse_data_parallel(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"the model provider wraps the model in {type(self).__name__}, which is for training; one for "
        "inference returns the bare model (of Megatron-Bridge's: provide, not provide_distributed_model)"
    )


def freeze(model: Sequence[Module], role: str, setting: str) -> None:
    """Put the chunks in eval mode, freeze them, and have methods of training raise ``InferenceOnlyError``.

    Errors name the model's ``role``, and the ``setting`` or function because of which it only scores. Its
    routers leave the process's list of routers, which the policy's code reads.
    """
    router_replay.leave_out(model)
    for chunk in model:
        chunk.eval()
        chunk.requires_grad_(False)
        setattr(chunk, _ROLE, (role, setting))
        for name in _TRAINING_METHODS:
            setattr(chunk, name, partial(_refuse, role, setting, name))
        chunk.requires_grad_ = _StayFrozen(role, setting, chunk)  # type: ignore[method-assign, assignment]


def refuse_to_train(model: Any, action: str) -> None:
    """Raise ``InferenceOnlyError`` if a chunk of the model only scores."""
    for chunk in as_chunks(model):
        if (reason := getattr(chunk, _ROLE, None)) is not None:
            _refuse(*reason, action)


def _refuse(role: str, setting: str, action: str, *args: Any, **kwargs: Any) -> None:
    raise InferenceOnlyError(
        f"{action}: the model of role {role!r} only scores. Because of {setting} it was built without DDP, "
        "gradient buffers and optimizer; if it is to train, change that and build it again."
    )


class _StayFrozen:
    """``requires_grad_`` of a chunk, held weakly: in a cycle, a deleted teacher would wait for gc."""

    def __init__(self, role: str, setting: str, chunk: Module) -> None:
        self._role, self._setting, self._chunk = role, setting, weakref.ref(chunk)

    def __call__(self, requires_grad: bool = True) -> Module | None:
        if requires_grad:
            _refuse(self._role, self._setting, "requires_grad_(True)")
        chunk = self._chunk()
        return None if chunk is None else Module.requires_grad_(chunk, False)

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles of the chunk refer to themselves
        return _StayFrozen, (self._role, self._setting, self._chunk())
