"""``no_sync_func``, ``grad_sync_func`` and ``param_sync_func`` of the config, and whose functions they are.

Megatron's training loops assert ``config.no_sync_func is None`` before they install the ``no_sync`` of their
own model chunks. The assertion protects a *custom* function from being overwritten; on the second call it
fires on what the first call installed (THUDM/slime#1779, #1857).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from ..common.chunks import SYNC_FUNCTIONS, Model, config_of, distinct_configs, is_data_parallel

#: Where a value is: the id of its owner, and a name.
Place = tuple[int, str]


def clear_installed(model: Model, *configs: Any, keep: Container[Place] = ()) -> None:
    """Clear the functions that a former call installed, so that the framework can install them afresh.

    ``no_sync_func`` becomes ``None`` when it consists only of ``no_sync`` methods of data-parallel chunks, of
    this model or of a former one. ``grad_sync_func`` and ``param_sync_func``, on which no framework asserts,
    become ``None`` when they belong to a former model. A foreign callable stays, and the framework's
    assertion fires on it as its authors intended. ``configs`` are cleared besides those of the chunks.
    ``keep`` has the places that are left alone: the id of a config, and the attribute.
    """
    for config in distinct_configs(model, *configs):
        for attribute in (name for name in SYNC_FUNCTIONS if (id(config), name) not in keep):
            functions = getattr(config, attribute, None)
            owners = _owners(functions, SYNC_FUNCTIONS[attribute], model)
            if owners and (attribute == "no_sync_func" or not belongs_to(model, functions, attribute)):
                setattr(config, attribute, None)


def install_per_config(install: Callable[[list[Any]], Any], model: Model) -> None:
    """Run a framework's installer, which expects one config for each chunk, on chunks that share a config.

    verl's ``register_megatron_training_hooks`` loops over the chunks and asserts in the second round that the
    shared config has no ``no_sync_func`` yet, which the first round has just installed
    (verl-project/verl#7380). Called once per chunk, each call installs that chunk's method; the list that the
    interleaved schedule expects is put together from them.
    """
    installed: list[dict[str, Any]] = []
    for chunk in model:
        config = config_of(chunk)
        for attribute, method in SYNC_FUNCTIONS.items():
            if _owners(getattr(config, attribute, None), method, model):
                setattr(config, attribute, None)
        install([chunk])
        installed.append({attribute: getattr(config, attribute, None) for attribute in SYNC_FUNCTIONS})
    for config in distinct_configs(model):
        for attribute in SYNC_FUNCTIONS:
            functions = [functions[attribute] for functions in installed if functions[attribute] is not None]
            if len(functions) == len(model) > 1:
                setattr(config, attribute, functions)


def belongs_to(model: Model, functions: Any, attribute: str) -> bool:
    """Return whether these are what a framework installs as ``config.<attribute>`` for this very model."""
    owners = _owners(functions, SYNC_FUNCTIONS[attribute], model)
    return bool(owners) and all(_is_among(owner, model) for owner in owners)


def _owners(functions: Any, method: str, model: Model) -> list[Any]:
    """Return the chunks whose method this is (or these are); an empty list if any function is foreign."""
    functions = functions if isinstance(functions, list | tuple) else [functions]
    owners = [getattr(function, "__self__", None) for function in functions]
    none_is_foreign = all(
        getattr(function, "__name__", None) == method and (_is_among(owner, model) or is_data_parallel(owner))
        for function, owner in zip(functions, owners, strict=True)
    )
    return owners if none_is_foreign else []


def _is_among(chunk: Any, model: Sequence[Any]) -> bool:
    return any(chunk is other for other in model)
