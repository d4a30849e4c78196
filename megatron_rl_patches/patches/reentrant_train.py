"""``train()``, ``save()`` and evaluation can be called again and again on the same model.

What is around each function is in :mod:`..frameworks.training` and :mod:`..reentry`.

Not patched: FSDP chunks (they have no forward pre-hooks), SkyRL, AReaL and NeMo-RL's policy worker
(re-entrant already), ms-swift and ROLL (one-shot trainers), and anything that ends the process. NeMo-RL's
value worker calls the methods of ``DistributedDataParallel`` and needs no site of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engine.call import Call
from ..engine.patch import Patch, Site
from ..engine.statuses import SiteStatus
from ..engine.target_source import TargetSource
from ..errors import PatchError
from ..frameworks import megatron_utils

_MODELS = megatron_utils("model")
_VERL_WORKERS = "verl.workers.engine_workers"
_MEGATRON, _BRIDGE = "megatron.training.training", "megatron.bridge.training"
_SET_UP = "_update_model_config_funcs"
_TRAIN, _SCORE = ".frameworks.training:train", ".frameworks.training:score"
_HANDLES = "remove_forward_pre_hook_handles"
_FUNCTION_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@dataclass(frozen=True)
class ReentrantTrainOptions:
    """Options of the patch.

    Attributes:
        train_functions: ``"package.module:function"`` of your own functions that train. Each takes the list
            of model chunks as a parameter named ``model``. A function of the file that Python runs cannot be
            named here: decorate it with :func:`megatron_rl_patches.reentry.reentrant_train`.
        warn: warn once of each setting that silently spoils reinforcement learning.
        memory_phases: log a line with the peak memory of scoring, forward, loss and backward, step and save
            for each rollout, and one where a phase raises; ``with reentrant_train(...)`` logs none.
        verify: at the first guarded ``train()`` wait up to 5 minutes until each rank has begun it, and
            compare them with ``verify_ranks()``; all stop if they differ. Without the patch it does nothing.

    Raises:
        PatchError: a function is named in another way.
    """

    train_functions: tuple[str, ...] = ()
    warn: bool = True
    memory_phases: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        for path in self.train_functions:
            if path.startswith("__main__:"):
                raise PatchError(
                    f"train function {path!r}: functions of the program cannot be named; decorate this one: "
                    "train = megatron_rl_patches.reentry.reentrant_train(train)"
                )
            if not _FUNCTION_PATH.fullmatch(path):
                raise PatchError(
                    f"train function {path!r}: expected 'module:function', for example "
                    "'my_rl.megatron.model:train'"
                )


# --- reasons why a site is left alone, judged from the target's code; ``None`` if it has the fault


def _disable_is_harmless(target: TargetSource) -> str | None:
    fails = target.looks_up_unchecked(_HANDLES)  # where a submodule has no handle
    return None if fails else "upstream disables without assuming that the hooks are on"


def _enable_is_harmless(target: TargetSource) -> str | None:
    fails = target.asserts(_HANDLES)
    return None if fails else "upstream enables without assuming that the hooks are off"


def _train_is_reentrant(target: TargetSource) -> str | None:
    """Return ``None`` if the loop fails after an earlier call, or leaves state behind when it raises."""
    fails = target.asserts("no_sync_func") or _calls_interval_timer(target, "start")
    if fails or not target.cleans_up("no_sync_func"):
        return None
    return "it does not fail after an earlier call, and cleans up when it raises"


def _setup_is_reentrant(target: TargetSource) -> str | None:
    fails = target.asserts("no_sync_func")
    return None if fails else "it does not assert that no_sync_func is None"


def _chunks_may_share_a_config(target: TargetSource) -> str | None:
    fails = target.asserts("no_sync_func", in_loop=True)
    return None if fails else "it does not assert that no_sync_func is None for each chunk"


def _save_is_safe(target: TargetSource) -> str | None:
    """Return ``None`` if it stops a timer that only ``train()`` starts, or switches hooks as up to 0.15."""
    return None if _calls_interval_timer(target, "stop") else _restores_hooks(target)


def _log_ends_intervals(target: TargetSource) -> str | None:
    fails = "not is_first_iteration" in target.assigned("should_reset")
    return None if fails else "the first iteration of a call may end an interval"


def _calls_interval_timer(target: TargetSource, method: str) -> bool:
    return any("'interval-time'" in call.function for call in target.calls(method))


def _restores_hooks(target: TargetSource) -> str | None:
    if not any(map(target.mentions, ("disable_forward_pre_hook", "enable_forward_pre_hook"))):
        return "it does not switch forward pre-hooks"
    restores = target.cleans_up("enable_forward_pre_hook")
    return "it restores the hooks when saving raises" if restores else None


# --- adapters of torch's statistics, whose peaks are reset by phases of memory


def memory_stats(call: Call) -> Any:
    """Return torch's statistics, with the peaks that phases have reset."""
    from ..inference.memory.report import reset_peaks

    if stats := call():
        stats.update({name: max(peak, stats[name]) for name, peak in reset_peaks(call["device"]).items()})
    return stats


def reset_peak_memory_stats(call: Call) -> None:
    """Reset torch's peaks, and those that phases have reset."""
    from ..inference.memory.report import reset_peaks

    call()
    reset_peaks(call["device"]).clear()


# --- sites


def _configured(options: ReentrantTrainOptions) -> tuple[Site, ...]:
    if options.verify:
        from ..engine.api import verify_ranks
        from ..frameworks.training import compare_ranks_at_first_call
        from ..reentry import guard

        guard.before_calls[:] = [partial(compare_ranks_at_first_call, verify_ranks, lambda: _now().verify)]
    paths = [path.split(":") for path in options.train_functions]
    sites = [Site(module, qualname, _TRAIN, parameters=("model",)) for module, qualname in paths]
    if options.memory_phases:
        from ..frameworks.training import memory_phases
        from ..reentry import guard

        guard.around_decorated = lambda call: memory_phases(_now(), "other", call.model, call.optimizer)
        for adapter in (memory_stats, reset_peak_memory_stats):
            sites.append(Site("torch.cuda.memory", adapter.__name__, adapter, ("device",)))
        scores = [(module, "forward_only") for module in _MODELS]
        scores += [(_VERL_WORKERS, f"ActorRolloutRefWorker.compute_{n}log_prob") for n in ("", "ref_")]
        for module, name in scores:
            since = name.rpartition(".")[2]
            sites.append(Site(module, name, _SCORE, optional_module=True, introduced_with=since))
    return tuple(sites)


def _now() -> ReentrantTrainOptions:
    """Return the options of the patch, and the defaults after it was reverted."""
    from ..engine.installer import installer

    is_selected = any(s.patch == patch.name and s.state != "reverted" for s in installer.status())
    return installer.options[patch.name] if is_selected else ReentrantTrainOptions()


def _decorated() -> list[SiteStatus]:
    from ..reentry import guard

    names = dict.fromkeys(guard.decorated.values())
    return [SiteStatus(patch.name, n.split(".")[0], n, "applied", "by its decorator") for n in names]


def _notes(statuses: Sequence[SiteStatus]) -> list[str]:
    """Return what ``train()`` has warned of in this process."""
    from ..reentry import training_warnings

    return training_warnings.reported()


patch = Patch(
    name="reentrant-train",
    summary="you can call train(), save() and evaluation again and again on the same model",
    upstream=(
        "THUDM/slime#1857",
        "THUDM/slime#1779",
        "verl-project/verl#7380",
        "NVIDIA/Megatron-LM#6237",
    ),
    options=ReentrantTrainOptions,
    configured=_configured,
    notes=_notes,
    decorated=_decorated,
)

for _method, _read, _skip_if in (
    ("disable_forward_pre_hook", ("param_sync",), _disable_is_harmless),
    ("enable_forward_pre_hook", (), _enable_is_harmless),
):
    patch.wrap(
        "megatron.core.distributed.distributed_data_parallel",
        f"DistributedDataParallel.{_method}",
        f".frameworks.training:{_method}",
        parameters=_read,
        requires_names=(_HANDLES, "use_forward_hook"),
        skip_if=_skip_if,
    )
patch.wrap(_MODELS, "train", _TRAIN, parameters=("model", "optimizer"), skip_if=_train_is_reentrant)
patch.wrap(_MODELS, "save", ".frameworks.training:save", parameters=("model",), skip_if=_restores_hooks)
_BRIDGE_READS = ("model", "optimizer", "global_state")
for _module, _function, _adapter, _parameters, _skip_if in (
    (_MEGATRON, "train", "megatron_train", ("model", "optimizer", "config"), _train_is_reentrant),
    (_MEGATRON, "save_checkpoint_and_time", "megatron_save", ("model",), _save_is_safe),
    (f"{_BRIDGE}.train", "train", "bridge_train", _BRIDGE_READS, _train_is_reentrant),
    (f"{_BRIDGE}.setup", _SET_UP, f"bridge{_SET_UP}", ("model", "model_config"), _setup_is_reentrant),
):
    _path = f".frameworks.training:{_adapter}"
    patch.wrap(_module, _function, _path, parameters=_parameters, skip_if=_skip_if)
patch.wrap(
    _MEGATRON,
    "training_log",
    ".frameworks.training:megatron_training_log",
    parameters=("iteration", "is_first_iteration"),
    skip_if=_log_ends_intervals,
    introduced_with="is_first_iteration",
)
patch.wrap(
    "verl.utils.megatron_utils",
    "register_megatron_training_hooks",
    ".frameworks.training:verl_register_megatron_training_hooks",
    parameters=("model", "optimizer"),
    skip_if=_chunks_may_share_a_config,
    introduced_with="no_sync_func",
)
patch.wrap(
    [_VERL_WORKERS, "verl.workers.megatron_workers"],
    "ActorRolloutRefWorker.update_actor",
    ".frameworks.training:update_verl_actor",
    introduced_with="update_actor",
    optional_module=True,
)
