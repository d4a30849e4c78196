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

from ..engine.call import adapter_at
from ..engine.spec import Patch, Site
from ..errors import PatchError
from ..frameworks import WITH_MEGATRON_UTILS

if TYPE_CHECKING:
    from ..engine.judge import SiteStatus
    from ..engine.target_source import TargetSource

_DDP = "megatron.core.distributed.distributed_data_parallel"
_TRAIN = "megatron_rl_patches.frameworks.reentry:train"
_SAVE = "megatron_rl_patches.frameworks.reentry:save"
_MODELS = tuple(f"{framework}.backends.megatron_utils.model" for framework in WITH_MEGATRON_UTILS)
_HANDLES = "remove_forward_pre_hook_handles"
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class ReentrantTrainOptions:
    """Options of the patch.

    Attributes:
        train_functions: ``"package.module:function"`` of further ``train``-like functions, for frameworks
            that this package has never seen. Each takes the list of model chunks as a parameter named
            ``model``.
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
                    f"train function {path!r}: expected 'package.module:function', for example "
                    "'my_rl.megatron.model:train'"
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


# --- sites


def _configured(options: ReentrantTrainOptions) -> tuple[Site, ...]:
    paths = (path.split(":") for path in options.train_functions)
    return tuple(Site(module, name, adapter_at(_TRAIN), parameters=("model",)) for module, name in paths)


def _notes(statuses: Sequence[SiteStatus]) -> list[str]:
    """Return what ``train()`` has warned of in this process."""
    from ..reentry import checks

    return checks.found()


patch = Patch(
    name="reentrant-train",
    summary="train(), save() and evaluation can be called again and again on the same model",
    upstream=("THUDM/slime#1857", "THUDM/slime#1779", "verl-project/verl#7380"),
    options=ReentrantTrainOptions,
    configured=_configured,
    notes=_notes,
)
patch.wrap(
    _DDP,
    "DistributedDataParallel.disable_forward_pre_hook",
    "megatron_rl_patches.frameworks.reentry:disable_forward_pre_hook",
    parameters=("param_sync",),
    requires_names=(_HANDLES, "use_forward_hook"),
    skip_if=_disable_is_harmless,
)
patch.wrap(
    _DDP,
    "DistributedDataParallel.enable_forward_pre_hook",
    "megatron_rl_patches.frameworks.reentry:enable_forward_pre_hook",
    requires_names=(_HANDLES, "use_forward_hook"),
    skip_if=_enable_is_harmless,
)
patch.wrap(
    "megatron.core.pipeline_parallel.schedules",
    "forward_step",
    "megatron_rl_patches.frameworks.reentry:forward_step",
    introduced_with="forward_step",
    optional_module=True,
)
patch.wrap(_MODELS, "train", _TRAIN, parameters=("model", "optimizer"), skip_if=_train_is_reentrant)
patch.wrap(
    _MODELS,
    "save",
    "megatron_rl_patches.frameworks.reentry:save",
    parameters=("model",),
    skip_if=_restores_hooks,
)
patch.wrap(
    "megatron.training.training",
    "train",
    "megatron_rl_patches.frameworks.reentry:megatron_train",
    parameters=("model", "optimizer", "config"),
    skip_if=_train_is_reentrant,
)
patch.wrap(
    "megatron.training.training",
    "save_checkpoint_and_time",
    "megatron_rl_patches.frameworks.reentry:megatron_save",
    parameters=("model",),
    skip_if=_save_is_safe,
)
patch.wrap(
    "megatron.bridge.training.train",
    "train",
    "megatron_rl_patches.frameworks.reentry:bridge_train",
    parameters=("model", "optimizer", "global_state"),
    skip_if=_train_is_reentrant,
)
patch.wrap(
    "megatron.bridge.training.setup",
    "_update_model_config_funcs",
    "megatron_rl_patches.frameworks.reentry:bridge_set_up",
    parameters=("model", "model_config"),
    skip_if=_setup_is_reentrant,
)
patch.wrap(
    "verl.utils.megatron_utils",
    "register_megatron_training_hooks",
    "megatron_rl_patches.frameworks.reentry:verl_register",
    parameters=("model", "optimizer"),
    skip_if=_chunks_may_share_a_config,
    introduced_with="no_sync_func",
)
