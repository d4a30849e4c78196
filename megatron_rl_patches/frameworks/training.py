"""What is around ``train()``, ``save()`` and set-up of Megatron, and of the frameworks on top of it.

torch is imported only where it is needed, since the loops of a test may run without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..common.chunks import distinct_configs
from ..common.scopes import Scope
from ..engine.call import Call
from ..reentry import forward_pre_hooks, training_warnings
from ..reentry.guard import TrainGuard
from ..reentry.running_calls import places_in_use
from ..reentry.sync_functions import clear_installed, install_per_config
from ..reentry.timers import interval_timer_started

#: A mean difference above this, in nats per token, is reported. bfloat16 on both sides gives 0.01 to 0.05.
_MAX_DIFFERENCE = 0.1
#: Schedulers, each with the step at which loading a checkpoint left it.
_loaded: Scope[list[tuple[Any, int]]] = Scope("loaded_schedulers")


def train(call: Call, timers: Any = None, installs: bool = True) -> Any:
    """Run a training loop that can be called again, and warn of what spoils reinforcement learning.

    Args:
        timers: Megatron's, where the loop leaves one running.
        installs: the loop installs the sync functions itself, see :class:`.TrainGuard`.
    """
    warn = call.options.warn
    if warn:
        check_rollout_log_probs(call.get("data_iterator"))
    optimizer, config = call.get("optimizer"), call.get("config")
    with TrainGuard(call["model"], optimizer, timers, config, installs, warn):
        return call()


def megatron_train(call: Call) -> Any:
    """:func:`train` of Megatron-LM."""
    from megatron.training.global_vars import get_timers

    return train(call, timers=get_timers())


def megatron_training_log(call: Call) -> Any:
    """Log an iteration, and begin a new interval where one ends, at the first iteration of a call, too.

    Megatron-LM's ``train()`` says of its first iteration that its line does not end an interval, so the next
    line counts it a second time (NVIDIA/Megatron-LM#6237). That is right only between two ends.
    """
    from megatron.training.global_vars import get_args

    if call["is_first_iteration"] and call["iteration"] % get_args().log_interval == 0:
        return call(is_first_iteration=False)
    return call()


def bridge_train(call: Call) -> Any:
    """:func:`train` of Megatron-Bridge, whose ``setup()`` has installed the sync functions, once."""
    return train(call, timers=call["global_state"].timers, installs=False)


def forward_step(call: Call) -> Any:
    """Run one forward step, and count the tokens of its loss."""
    result = call()
    if call.options.warn:
        training_warnings.note_tokens(call.get("model"), result, bool(call.get("is_last_stage")))
    return result


def save(call: Call) -> Any:
    """Save, and leave the forward pre-hooks as they were."""
    with forward_pre_hooks.preserved_hooks(call["model"]):
        return call()


def megatron_save(call: Call) -> Any:
    """:func:`save` of Megatron-LM, which stops a timer that only its ``train()`` starts."""
    from megatron.training.global_vars import get_timers

    with interval_timer_started(get_timers()):
        return save(call)


def disable_forward_pre_hook(call: Call) -> None:
    """Disable the hooks, which may be off already."""
    forward_pre_hooks.disable(call.function, call.instance, *call.args, **call.kwargs)


def enable_forward_pre_hook(call: Call) -> None:
    """Enable the hooks, which may be on already."""
    forward_pre_hooks.enable(call.function, call.instance)


def bridge_update_model_config_funcs(call: Call) -> Any:
    """Clear what a former call of Megatron-Bridge has installed, and install afresh."""
    model, config = call["model"], call["model_config"]
    clear_installed(model, config, keep=places_in_use(*distinct_configs(model, config)))
    return call()


def verl_register_megatron_training_hooks(call: Call) -> None:
    """Install verl's functions once per config, which its chunks may share."""
    install_per_config(lambda chunks: call(model=chunks), call["model"])


# --- after a resume


def initialize_model_and_optimizer(call: Call) -> Any:
    """Set up, and put schedulers back to the step at which loading a checkpoint left them.

    The function loads a checkpoint and then advances the scheduler by the checkpoint's iteration, although
    loading has set it already. If loading has not (``--no-load-optim``, a fresh start), the schedule starts
    from the beginning.
    """
    with _loaded.enter([]) as loaded:
        result = call()
    for scheduler, num_steps in loaded:
        if scheduler.num_steps != num_steps:
            scheduler.num_steps = num_steps
            scheduler.step(increment=0)  # sets learning rate and weight decay of that step
    return result


def load_checkpoint(call: Call) -> Any:
    """Load a checkpoint, and within :func:`initialize_model_and_optimizer` record the scheduler's step.

    It is recorded whether the checkpoint was loaded into the scheduler or not.
    """
    result, loaded, scheduler = call(), _loaded.get(), call.get("opt_param_scheduler")
    if loaded is not None and scheduler is not None:
        loaded.append((scheduler, scheduler.num_steps))
    return result


# --- the tokens of a rollout


def check_rollout_log_probs(data_iterator: Any) -> None:
    """Report, once per process, log-probs of the inference engine that differ from Megatron's.

    slime, vime and miles have both in the data of a rollout where they compute the policy's log-probs before
    training: ``rollout_log_probs`` as sampled, and ``log_probs`` of Megatron. With one step per rollout they
    take those of the loss, and with ``--use-rollout-logprobs`` they need none: then nothing is compared here,
    and slime's own metric ``train_rollout_logprob_abs_diff`` tells. verl has a metric, too.

    Args:
        data_iterator: what ``train()`` of a framework takes under this name: iterators, each with its
            ``rollout_data``. Iterators without such data are not looked at.
    """
    if training_warnings.was_reported("rollout_log_probs"):
        return
    first = data_iterator[0] if isinstance(data_iterator, Sequence) and data_iterator else None
    rollout = getattr(first, "rollout_data", None)
    if isinstance(rollout, Mapping):
        with training_warnings.harmless():
            _compare_log_probs(rollout)


def _compare_log_probs(rollout: Mapping[str, Any]) -> None:
    import torch

    def joined(values: Sequence[Any]) -> Any:
        return torch.cat([torch.as_tensor(value).detach().float().reshape(-1) for value in values])

    trained, sampled = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if not trained or not sampled:
        return
    lengths = [len(values) for values in trained]
    masks = rollout.get("loss_masks") or [torch.ones(length) for length in lengths]
    if lengths != [len(mask) for mask in masks]:
        masks = _local_masks(rollout)
    if not lengths == [len(mask) for mask in masks] == [len(values) for values in sampled]:
        return  # nobody can tell here which values belong together
    differences = (joined(trained) - joined(sampled)).abs()
    differences = differences[joined(masks).to(differences.device).bool() & differences.isfinite()]
    if not len(differences):
        return
    mean, largest = torch.stack([differences.mean(), differences.max()]).tolist()
    if mean > _MAX_DIFFERENCE:
        training_warnings.report(
            f"rollout_log_probs: the log-probs of the inference engine and of Megatron differ by {mean:.2g} "
            f"nats per token on average and {largest:.2g} at most, on {len(differences)} tokens of this "
            f"rank; up to {_MAX_DIFFERENCE:g} on average is usual. The policy that samples is not the one "
            "that is trained. Look for weights that were sent before they were gathered, another precision, "
            "another temperature, experts that are chosen differently, or a run that samples with older "
            "weights by design",
            setting="rollout_log_probs",
            log=training_warnings.is_first_of_stage(),
        )


def _local_masks(rollout: Mapping[str, Any]) -> Sequence[Any]:
    """Return the loss masks of this context-parallel rank, which has a zigzag share of each response."""
    import torch
    from megatron.core import parallel_state

    from ..losses.sequences.layout import SequenceLayout

    layout = SequenceLayout.build(
        rollout["total_lengths"],
        rollout["response_lengths"],
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )
    return layout.local_parts([torch.as_tensor(mask).cpu() for mask in rollout["loss_masks"]])
