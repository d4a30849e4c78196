"""Model chunks, the list that Megatron's ``get_model`` returns, read without importing Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# This module reads attributes only, so mocked chunks work as well as real ones.
Chunk = Any
Model = Sequence[Chunk]

#: Attribute of the config -> method of the chunk that Megatron's training loops install there.
SYNC_FUNCTIONS = {
    "no_sync_func": "no_sync",
    "grad_sync_func": "start_grad_sync",
    "param_sync_func": "start_param_sync",
}


def as_chunks(model: Any) -> Model:
    """Return a list of chunks. One bare chunk becomes a list of one, ``None`` an empty list."""
    if model is None:
        return []
    # A list or a ModuleList; a Sequential is one chunk.
    is_container = isinstance(model, Iterable) and config_of(model) is None
    return list(model) if is_container and not has_base(model, "Sequential") else [model]


def config_of(chunk: Chunk) -> Any:
    """Return the chunk's ``TransformerConfig``; ``None`` if there is none."""
    return attribute_of(chunk, "config")


def attribute_of(chunk: Chunk, name: str, default: Any = None) -> Any:
    """Return an attribute of the chunk that is not ``None``, looked up through any wrappers."""
    while chunk is not None:
        if (value := getattr(chunk, name, None)) is not None:
            return value
        chunk = getattr(chunk, "module", None)
    return default


def unwrap(chunk: Chunk) -> Chunk:
    """Return the model inside Megatron's data-parallel and 16-bit wrappers.

    Wrappers are known by the name of their class, since a model may have a submodule called ``module``.
    """
    while is_data_parallel(chunk) or has_base(chunk, "Float16Module"):
        chunk = chunk.module
    return chunk


def distinct_configs(model: Model, *others: Any) -> list[Any]:
    """Return the configs of the chunks, which may share one, and ``others``, without repetitions."""
    configs = (*map(config_of, model), *others)
    return list({id(config): config for config in configs if config is not None}.values())


def bucket_groups(chunk: Chunk) -> list[Any]:
    """Return the bucket groups of a chunk, those of experts included; for a module that is no DDP none."""
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


def is_data_parallel(chunk: Chunk) -> bool:
    """Return whether the chunk is one of Megatron's data-parallel wrappers, DDP or an FSDP.

    Names of classes decide, since ``FullyShardedDataParallel`` is a function from megatron-core 0.20 on.
    """
    return has_base(chunk, "_BaseDataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def has_base(chunk: Chunk, *names: str) -> bool:
    """Return whether a class of the chunk, or one that it derives from, has one of the names."""
    return any(base.__name__ in names for base in type(chunk).__mro__)


def modules_with_modes(model: Model) -> list[tuple[Any, bool]]:
    """Return every module of the chunks that has a mode, and whether that is train mode.

    This takes a fifth of the time of ``Module.modules()``, which looks for modules that occur twice.
    """
    modules = list(model)
    for module in modules:  # the list grows while it is walked
        if children := getattr(module, "_modules", None):  # most have none, and train() may not wait for them
            modules += children.values()
    return [(module, module.training) for module in modules if hasattr(module, "training")]
