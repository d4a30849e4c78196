"""What all parts need to know of model chunks, without importing Megatron."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# torch and Megatron objects are duck-typed here, so that mocked chunks work as well as real ones.
Chunk = Any
Model = Sequence[Chunk]


def as_model(model: Any) -> Model:
    """A list of chunks; one bare chunk is a list of one, ``None`` an empty one."""
    if model is None:
        return []
    is_container = isinstance(model, Iterable) and config_of(model) is None  # a list, a ModuleList
    return list(model) if is_container else [model]


def config_of(chunk: Chunk) -> Any:
    """The chunk's ``TransformerConfig``, through any wrappers; ``None`` when there is none."""
    while chunk is not None:
        if (config := getattr(chunk, "config", None)) is not None:
            return config
        chunk = getattr(chunk, "module", None)
    return None


def distinct_configs(model: Model, *others: Any) -> list[Any]:
    """Configs of the chunks, and others, each once: under virtual pipelining chunks may share one (verl)."""
    configs = (*map(config_of, model), *others)
    return list({id(config): config for config in configs if config is not None}.values())


def bucket_groups(chunk: Chunk) -> list[Any]:
    """Bucket groups of a ``DistributedDataParallel`` chunk, experts' included; empty for any other module."""
    return [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]


def is_data_parallel(chunk: Chunk) -> bool:
    """Is it one of Megatron's data-parallel wrappers (DDP or an FSDP)?

    By the name of the base class: from megatron-core 0.20 on ``FullyShardedDataParallel`` is a function,
    and ``isinstance`` with it raises.
    """
    return any(base.__name__ in _WRAPPERS for base in type(chunk).__mro__)


_WRAPPERS = frozenset({"_BaseDataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
