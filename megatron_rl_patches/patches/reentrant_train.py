"""``train()``, ``save()`` and evaluation can be called again and again on the same model.

=============  ============================================  =========================  ==================
framework      function                                      what is around it          left alone when
=============  ============================================  =========================  ==================
megatron-core  ``disable_forward_pre_hook``, ``enable_...``  any order and number       upstream allows it
megatron-core  ``forward_step``                              counts tokens to warn
slime, miles   ``train``                                     ``TrainGuard``             it is re-entrant
slime, miles   ``save``                                      hooks as before            it restores hooks
Megatron-LM    ``train``                                     ``TrainGuard``             it is re-entrant
Megatron-LM    ``save_checkpoint_and_time``                  hooks and timer as before  it restores hooks
Bridge         ``train``                                     ``TrainGuard``             it is re-entrant
Bridge         ``_update_model_config_funcs``                clears its own functions   it asserts nothing
verl           ``register_megatron_training_hooks``          one call per config        it asserts nothing
any            ``Settings(train_functions=...)``             ``TrainGuard``
=============  ============================================  =========================  ==================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. What is around the
functions is in :mod:`..reentry`.

Not patched: FSDP chunks (they have no forward pre-hooks), SkyRL, AReaL and NeMo-RL's policy worker
(re-entrant already), ms-swift and ROLL (one-shot trainers), and anything that ends the process. NeMo-RL's
value worker calls the methods of ``DistributedDataParallel`` and needs no site of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.sources import PROGRAM, is_the_program
from ..engine.spec import Patch, Site
from ..errors import PatchError
from ..frameworks import WITH_MEGATRON_UTILS
from ..frameworks.arguments import bind

if TYPE_CHECKING:
    from ..engine.judge import SiteStatus
    from ..engine.target_source import TargetSource

_DDP = "megatron.core.distributed.distributed_data_parallel"
_HANDLES = "remove_forward_pre_hook_handles"
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class ReentrantTrainOptions:
    """Options of the patch.

    Attributes:
        train_functions: ``"package.module:function"`` of further ``train``-like functions, for frameworks
            that this package has never seen. Each takes the list of model chunks as a parameter named
            ``model``. That of a single file is ``"file:function"`` or, in the program itself,
            ``"__main__:function"``.
        warn: look for settings that silently spoil reinforcement learning, and warn once of each.

    Raises:
        PatchError: a function is named in another way.
    """

    train_functions: tuple[str, ...] = ()
    warn: bool = True

    def __post_init__(self) -> None:
        for path in self.train_functions:
            if not _FUNCTION_PATH.fullmatch(path):
                raise PatchError(
                    f"train function {path!r}: expected 'module:function', for example "
                    "'my_rl.megatron.model:train', or '__main__:train' for the program itself"
                )


# --- reasons why a site is left alone, judged from the target's code


def _disable_is_harmless(target: TargetSource) -> str | None:
    """Return why the site is left alone; ``None`` if a loop looks up a handle for every submodule.

    The look-up raises ``KeyError`` for a submodule without a handle.
    """
    for loop in _walk(target, ast.For):
        looked_up = [
            node
            for node in ast.walk(loop)
            if isinstance(node, ast.Subscript) and _named(node.value, _HANDLES)
        ]
        guarded = any(isinstance(node, ast.If | ast.Try) for node in ast.walk(loop))
        if looked_up and not guarded and not _tests_handles_first(target):
            return None
    return "upstream disables without assuming that the hooks are on"


def _enable_is_harmless(target: TargetSource) -> str | None:
    asserts = any(_mentions(node.test, _HANDLES) for node in _walk(target, ast.Assert))
    return None if asserts else "upstream enables without assuming that the hooks are off"


def _tests_handles_first(target: TargetSource) -> bool:
    return any(_mentions(node.test, _HANDLES) for node in _walk(target, ast.If))


def _train_is_reentrant(target: TargetSource) -> str | None:
    """Return why the loop is left alone; ``None`` if it fails after an earlier call, or leaves state behind.

    A loop that does not clean up leaves state behind when it raises.
    """
    fails = _asserts_no_sync_func(target.function) or _calls_interval_timer(target, "start")
    cleans_up = any(node.finalbody or node.handlers for node in _walk(target, ast.Try))
    if fails or not cleans_up:
        return None
    return "it does not fail after an earlier call, and cleans up when it raises"


def _setup_is_reentrant(target: TargetSource) -> str | None:
    fails = _asserts_no_sync_func(target.function)
    return None if fails else "it does not assert that no_sync_func is None"


def _chunks_may_share_a_config(target: TargetSource) -> str | None:
    fails = any(_asserts_no_sync_func(loop) for loop in _walk(target, ast.For))
    return None if fails else "it does not assert that no_sync_func is None for each chunk"


def _asserts_no_sync_func(tree: ast.AST | None) -> bool:
    assert tree is not None
    asserts = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return any(_mentions(node.test, "no_sync_func") for node in asserts)


def _save_is_safe(target: TargetSource) -> str | None:
    """Return why Megatron-LM's function is left alone.

    ``None`` if it stops a timer that only ``train()`` starts, or switches hooks as up to 0.15.
    """
    hooks = _restores_hooks(target)
    return None if _calls_interval_timer(target, "stop") else hooks


def _calls_interval_timer(target: TargetSource, method: str) -> bool:
    """Return whether the function calls ``timers('interval-time', ...).method(...)``."""
    return any(
        isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and any(
            isinstance(node, ast.Constant) and node.value == "interval-time" for node in ast.walk(call.func)
        )
        for call in _walk(target, ast.Call)
    )


def _restores_hooks(target: TargetSource) -> str | None:
    toggles = {"disable_forward_pre_hook", "enable_forward_pre_hook"} & target.names
    if not toggles:
        return "it does not switch forward pre-hooks"
    finals = [node for attempt in _walk(target, ast.Try) for node in attempt.finalbody]
    if any(_mentions(node, "enable_forward_pre_hook") for node in finals):
        return "it restores the hooks when saving raises"
    return None


def _walk(target: TargetSource, kind: type[Any]) -> Iterator[Any]:
    assert target.function is not None
    return (node for node in ast.walk(target.function) if isinstance(node, kind))


def _mentions(tree: ast.AST, name: str) -> bool:
    return any(_named(node, name) for node in ast.walk(tree))


def _named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (
        isinstance(node, ast.Name) and node.id == name
    )


# --- adapters


def _arguments(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return bind(wrapped, args, kwargs, defaults=True).arguments


def _train(
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: ReentrantTrainOptions,
    timers: Any = None,
    installs: bool = True,
) -> Any:
    from ..reentry.guard import TrainGuard
    from ..reentry.training_warnings import watched

    bound = _arguments(wrapped, args, kwargs)
    guard = TrainGuard(
        bound["model"],
        optimizer=bound.get("optimizer"),
        timers=timers,
        config=bound.get("config"),
        installs=installs,
    )
    if not options.warn:
        with guard:
            return wrapped(*args, **kwargs)
    from ..frameworks import rollout_log_probs

    rollout_log_probs.check(bound.get("data_iterator"))
    with watched(bound["model"], bound.get("optimizer")), guard:
        return wrapped(*args, **kwargs)


def _forward_step(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..reentry.training_warnings import note_tokens

    result = wrapped(*args, **kwargs)
    note_tokens(result)
    return result


def _save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..reentry.forward_pre_hooks import preserved_hooks

    with preserved_hooks(_arguments(wrapped, args, kwargs)["model"]):
        return wrapped(*args, **kwargs)


def _configured(options: ReentrantTrainOptions) -> tuple[Site, ...]:
    paths = [path.split(":") for path in options.train_functions]
    # A file that runs as the program is not imported under its own name, unless another module does so.
    paths += [[PROGRAM, function] for module, function in paths if is_the_program(module)]
    functions = [
        Site(module, name, _train, parameters=("model",), pass_options=True) for module, name in paths
    ]
    # The engine looks at the program whenever a patched function is called. This one is called by every loop
    # after it has defined its functions, and before it trains.
    if any(site.module == PROGRAM for site in functions):
        functions.append(Site(_DDP, "DistributedDataParallel.__init__", _unchanged))
    return tuple(functions)


def _unchanged(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(*args, **kwargs)


def _notes(statuses: Sequence[SiteStatus]) -> list[str]:
    """Return what ``train()`` has warned of in this process."""
    from ..reentry import training_warnings

    return training_warnings.reported()


# --- sites

patch = Patch(
    name="reentrant-train",
    summary="train(), save() and evaluation can be called again and again on the same model",
    upstream=("THUDM/slime#1857", "THUDM/slime#1779", "verl-project/verl#7380"),
    options=ReentrantTrainOptions,
    configured=_configured,
    notes=_notes,
)


@patch.wrap(
    _DDP,
    "DistributedDataParallel.disable_forward_pre_hook",
    parameters=("param_sync",),
    requires_names=(_HANDLES, "use_forward_hook"),
    skip_if=_disable_is_harmless,
)
def disable_forward_pre_hook(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry import forward_pre_hooks

    forward_pre_hooks.disable(wrapped, instance, *args, **kwargs)


@patch.wrap(
    _DDP,
    "DistributedDataParallel.enable_forward_pre_hook",
    requires_names=(_HANDLES, "use_forward_hook"),
    skip_if=_enable_is_harmless,
)
def enable_forward_pre_hook(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry import forward_pre_hooks

    forward_pre_hooks.enable(wrapped, instance)


patch.wrap(
    "megatron.core.pipeline_parallel.schedules",
    "forward_step",
    introduced_with="forward_step",
    optional_module=True,
)(_forward_step)

for _framework in WITH_MEGATRON_UTILS:
    _module = f"{_framework}.backends.megatron_utils.model"
    patch.wrap(
        _module,
        "train",
        parameters=("model", "optimizer"),
        skip_if=_train_is_reentrant,
        pass_options=True,
    )(_train)
    patch.wrap(_module, "save", parameters=("model",), skip_if=_restores_hooks)(_save)


@patch.wrap(
    "megatron.training.training",
    "train",
    parameters=("model", "optimizer", "config"),
    skip_if=_train_is_reentrant,
    pass_options=True,
)
def megatron_train(
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: ReentrantTrainOptions,
) -> Any:
    from megatron.training.global_vars import get_timers

    return _train(wrapped, instance, args, kwargs, options=options, timers=get_timers())


@patch.wrap(
    "megatron.training.training",
    "save_checkpoint_and_time",
    parameters=("model",),
    skip_if=_save_is_safe,
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
    parameters=("model", "optimizer", "global_state"),
    skip_if=_train_is_reentrant,
    pass_options=True,
)
def bridge_train(
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    options: ReentrantTrainOptions,
) -> Any:
    timers = _arguments(wrapped, args, kwargs)["global_state"].timers
    # setup() has installed the sync functions, once.
    return _train(wrapped, instance, args, kwargs, options=options, timers=timers, installs=False)


@patch.wrap(
    "megatron.bridge.training.setup",
    "_update_model_config_funcs",
    parameters=("model", "model_config"),
    skip_if=_setup_is_reentrant,
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
    parameters=("model", "optimizer"),
    skip_if=_chunks_may_share_a_config,
    introduced_with="no_sync_func",
)
def verl_register_megatron_training_hooks(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    from ..reentry.sync_functions import install_per_config

    bound = _arguments(wrapped, args, kwargs)
    install_per_config(lambda chunks: wrapped(**{**bound, "model": chunks}), bound["model"])
