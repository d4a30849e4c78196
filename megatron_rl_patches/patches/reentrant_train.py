"""``train()``, ``save()`` and evaluation can be called again and again on the same model.

Not patched: FSDP chunks (they have no forward pre-hooks), SkyRL, AReaL and NeMo-RL's policy worker
(re-entrant already), ms-swift and ROLL (one-shot trainers), and anything that ends the process. NeMo-RL's
value worker calls the methods of ``DistributedDataParallel`` and needs no site of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..engine.arguments import bind
from ..engine.spec import Patch, Site

if TYPE_CHECKING:
    from ..engine.facts import Facts
    from ..settings import Settings

_DDP = "megatron.core.distributed.distributed_data_parallel"
_HANDLES = "remove_forward_pre_hook_handles"


# --- not needed: judged from the target's code


def _disable_is_harmless(facts: Facts) -> str | None:
    """A handle is looked up for every submodule, come what may: that is the ``KeyError``."""
    for loop in _walk(facts, ast.For):
        looked_up = [
            node
            for node in ast.walk(loop)
            if isinstance(node, ast.Subscript) and _named(node.value, _HANDLES)
        ]
        guarded = any(isinstance(node, ast.If | ast.Try) for node in ast.walk(loop))
        if looked_up and not guarded and not _tests_handles_first(facts):
            return None
    return "upstream disables without assuming that the hooks are on"


def _enable_is_harmless(facts: Facts) -> str | None:
    asserts = any(_mentions(node.test, _HANDLES) for node in _walk(facts, ast.Assert))
    return None if asserts else "upstream enables without assuming that the hooks are off"


def _tests_handles_first(facts: Facts) -> bool:
    return any(_mentions(node.test, _HANDLES) for node in _walk(facts, ast.If))


def _train_is_reentrant(facts: Facts) -> str | None:
    """It fails on what a former call left behind, or leaves things behind itself when it raises."""
    fails = _asserts_no_sync_func(facts.function) or _calls_interval_timer(facts, "start")
    cleans_up = any(node.finalbody or node.handlers for node in _walk(facts, ast.Try))
    if fails or not cleans_up:
        return None
    return "it does not trip over a former call, and cleans up when it raises"


def _setup_is_reentrant(facts: Facts) -> str | None:
    fails = _asserts_no_sync_func(facts.function)
    return None if fails else "it does not assert that no_sync_func is None"


def _chunks_may_share_a_config(facts: Facts) -> str | None:
    fails = any(_asserts_no_sync_func(loop) for loop in _walk(facts, ast.For))
    return None if fails else "it does not assert that no_sync_func is None for each chunk"


def _asserts_no_sync_func(tree: ast.AST | None) -> bool:
    assert tree is not None
    asserts = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return any(_mentions(node.test, "no_sync_func") for node in asserts)


def _save_is_safe(facts: Facts) -> str | None:
    """Megatron-LM's: switches hooks (up to 0.15), and stops a timer that only ``train()`` starts."""
    hooks = _leaves_hooks_as_found(facts)
    return None if _calls_interval_timer(facts, "stop") else hooks


def _calls_interval_timer(facts: Facts, method: str) -> bool:
    """``timers('interval-time', ...).method(...)``"""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and any(
            isinstance(node, ast.Constant) and node.value == "interval-time" for node in ast.walk(call.func)
        )
        for call in _walk(facts, ast.Call)
    )


def _leaves_hooks_as_found(facts: Facts) -> str | None:
    toggles = {"disable_forward_pre_hook", "enable_forward_pre_hook"} & facts.names
    if not toggles:
        return "it does not switch forward pre-hooks"
    finals = [node for attempt in _walk(facts, ast.Try) for node in attempt.finalbody]
    if any(_mentions(node, "enable_forward_pre_hook") for node in finals):
        return "it restores the hooks when saving raises"
    return None


def _walk(facts: Facts, kind: type[Any]) -> Iterator[Any]:
    assert facts.function is not None
    return (node for node in ast.walk(facts.function) if isinstance(node, kind))


def _mentions(tree: ast.AST, name: str) -> bool:
    return any(_named(node, name) for node in ast.walk(tree))


def _named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (
        isinstance(node, ast.Name) and node.id == name
    )


# --- adapters


def _arguments(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return bind(wrapped, args, kwargs, defaults=True).arguments


def _train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    from ..reentry.guard import TrainGuard, installs_sync_functions

    bound = _arguments(wrapped, args, kwargs)
    with TrainGuard(
        bound["model"],
        optimizer=bound.get("optimizer"),
        config=bound.get("config"),
        installs=installs_sync_functions(wrapped),
        **options,
    ):
        return wrapped(*args, **kwargs)


def _save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..reentry.forward_pre_hooks import preserved_hooks

    with preserved_hooks(_arguments(wrapped, args, kwargs)["model"]):
        return wrapped(*args, **kwargs)


def _configured(settings: Settings) -> tuple[Site, ...]:
    paths = (path.split(":") for path in settings.train_functions)
    return tuple(Site(module, qualname, _train, uses=("model",)) for module, qualname in paths)


# --- sites

patch = Patch(
    name="reentrant-train",
    summary="train(), save() and evaluation can be called again and again on the same model",
    upstream=("THUDM/slime#1857", "THUDM/slime#1779", "verl-project/verl#7380"),
    configured=_configured,
)


@patch.wrap(
    _DDP,
    "DistributedDataParallel.disable_forward_pre_hook",
    uses=("param_sync",),
    mentions=(_HANDLES, "use_forward_hook"),
    not_needed=_disable_is_harmless,
)
def disable_forward_pre_hook(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry import forward_pre_hooks

    forward_pre_hooks.disable(wrapped, instance, *args, **kwargs)


@patch.wrap(
    _DDP,
    "DistributedDataParallel.enable_forward_pre_hook",
    mentions=(_HANDLES, "use_forward_hook"),
    not_needed=_enable_is_harmless,
)
def enable_forward_pre_hook(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry import forward_pre_hooks

    forward_pre_hooks.enable(wrapped, instance)


for _host in ("slime", "miles"):  # OpenClaw-RL vendors slime under its own name
    _module = f"{_host}.backends.megatron_utils.model"
    patch.wrap(_module, "train", uses=("model", "optimizer"), not_needed=_train_is_reentrant)(_train)
    patch.wrap(_module, "save", uses=("model",), not_needed=_leaves_hooks_as_found)(_save)


@patch.wrap(
    "megatron.training.training",
    "train",
    uses=("model", "optimizer", "config"),
    not_needed=_train_is_reentrant,
)
def megatron_train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from megatron.training.global_vars import get_timers

    return _train(wrapped, instance, args, kwargs, timers=get_timers())


@patch.wrap(
    "megatron.training.training",
    "save_checkpoint_and_time",
    uses=("model",),
    not_needed=_save_is_safe,
)
def megatron_save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from megatron.training.global_vars import get_timers

    from ..reentry.guard import INTERVAL_TIMER
    from ..reentry.timers import started

    with started(get_timers(), INTERVAL_TIMER):
        return _save(wrapped, instance, args, kwargs)


@patch.wrap(
    "megatron.bridge.training.train",
    "train",
    uses=("model", "optimizer", "global_state"),
    not_needed=_train_is_reentrant,
)
def bridge_train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    timers = _arguments(wrapped, args, kwargs)["global_state"].timers
    return _train(wrapped, instance, args, kwargs, timers=timers)


@patch.wrap(
    "megatron.bridge.training.setup",
    "_update_model_config_funcs",
    uses=("model", "model_config"),
    not_needed=_setup_is_reentrant,
    copied_by=("nemo_rl",),
)
def bridge_update_model_config_funcs(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    from ..reentry.sync_functions import clear_installed

    bound = _arguments(wrapped, args, kwargs)
    clear_installed(bound["model"], bound["model_config"])
    return wrapped(*args, **kwargs)


@patch.wrap(
    "verl.utils.megatron_utils",
    "register_megatron_training_hooks",
    uses=("model", "optimizer"),
    not_needed=_chunks_may_share_a_config,
    predates_without="no_sync_func",
)
def verl_register_megatron_training_hooks(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry.sync_functions import install_per_config

    bound = _arguments(wrapped, args, kwargs)
    install_per_config(lambda chunks: wrapped(**{**bound, "model": chunks}), bound["model"])
