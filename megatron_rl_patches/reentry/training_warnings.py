"""Warnings of settings that spoil reinforcement learning on Megatron without an error.

The checks run in each guarded call, until they have found something. Training goes on as it would without
them: they start no collective, and an error in them is only logged. They read the model's config, its weights
and main parameters at entry, what reductions of gradients have left at a step, and the state of the
parameter all-gather.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..common.chunks import Model, bucket_groups, config_of, distinct_configs, unwrap
from ..common.messages import Message, is_first_of_stage, is_rank_0
from ..common.text import one_line
from .forward_pre_hooks import is_stale

_UNREDUCED = Message(
    "finalize_model_grads_func=None: the config that Megatron's schedules read, get_model_config(model[0]), "
    "has no function that reduces gradients ({elsewhere})",
    "{ranks} data-parallel ranks step with gradients that are not reduced, so their weights drift apart.",
    "Set get_model_config(model[0]).finalize_model_grads_func = "
    "megatron.core.distributed.finalize_model_grads.",
)
_STALE_PARAMETERS = Message(
    "overlap_param_gather=True: train() returned before the parameters of its last step were gathered",
    "Weights that are sent or saved before the next forward pass mix two steps.",
    "At the end of train(), call disable_forward_pre_hook() of each chunk, as Megatron's train() does.",
)
_DROPOUT = Message(
    "{name}={rate:g}: dropout is on while the policy trains and off while it samples and scores",
    "Log-probs differ even with the same weights, so ratios of probabilities are wrong.",
    "Megatron's default is 0.1: set --{argument} 0 (config.{name}=0).",
)
_MAIN_PARAMETERS = Message(
    "the optimizer's main parameters differ from the model's weights by more than rounding: something has "
    "loaded or changed weights without the optimizer",
    "The next step puts the old weights back, and training goes on from them.",
    "Call optimizer.reload_model_params() after weights are loaded, or load them before the optimizer is "
    "built. With optimizer_cpu_offload and without use_precision_aware_optimizer, only the latter helps.",
)
_REDUCED_TOO_EARLY = Message(
    "overlap_grad_reduce=True: a forward pass has begun while gradients of the same step were being reduced",
    "Gradients of later microbatches are not reduced, or only in part, and weights of ranks may differ.",
    "Run all microbatches of a step in one call of Megatron's schedule, or its calls through "
    "megatron_rl_patches.reentry.OptimizerStep, or switch overlap_grad_reduce off. "
    "A loop without Megatron's schedule runs all microbatches but the last one under no_sync().",
)
_MTP_WITHOUT_MASK = Message(
    "mtp_num_layers={layers}: the model trains without a loss_mask",
    "Multi-token prediction is trained on all tokens, prompts and padding too.",
    "Pass loss_mask, which is 1 for tokens that count, to the forward pass of the model.",
)
_CHECK_FAILED = Message(
    "a check of the settings of training raised an error: {error}",
    "This is harmless: training goes on without this check.",
    "Ignore it.",
    logging.DEBUG,
)
#: What was logged about each setting that was reported in this process.
messages: dict[str, str] = {}


@contextmanager
def harmless() -> Iterator[None]:
    """Keep an error of a check from training, where it would stop one rank while the others wait for it."""
    try:
        yield
    except Exception as error:
        _CHECK_FAILED.log(error=one_line(error))


class Watch:
    """What is looked at during one guarded call, which begins when this is made; see :class:`.TrainGuard`."""

    def __init__(self, model: Model, optimizer: Any = None, config: Any = None) -> None:
        self.chunks = model
        self.configs = distinct_configs(model)
        self._optimizer = optimizer
        self._other_configs = [config, *(getattr(unwrap(chunk), "config", None) for chunk in model)]
        self._has_stepped, self._sees_steps, self._has_mask = False, optimizer is None, True
        modules = [chunk for chunk in model if hasattr(chunk, "register_forward_pre_hook")]
        self._hooks = [m.register_forward_pre_hook(self._before_forward, with_kwargs=True) for m in modules]
        with harmless():
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                inner = getattr(part, "optimizer", part)  # of torch, within one of Megatron
                if hasattr(inner, "register_step_pre_hook"):
                    self._hooks.append(inner.register_step_pre_hook(self._before_step))
                    self._sees_steps = True
            for name in ("hidden_dropout", "attention_dropout"):
                rate = max((getattr(config, name, 0.0) or 0.0 for config in self.configs), default=0.0)
                if rate > 0:
                    argument = name.replace("_", "-")
                    report(name, _DROPOUT, says=is_rank_0, name=name, rate=rate, argument=argument)
        with harmless():
            if optimizer is not None and "main_parameters" not in messages:
                from .main_parameters import differ_from_weights

                if differ_from_weights(optimizer):
                    # Each rank compares its own shards, so any rank may be the only one that knows.
                    report("main_parameters", _MAIN_PARAMETERS, says=lambda: True)

    def end(self, failed: bool = False) -> None:
        """End, and check what was seen unless the call has failed."""
        for hook in self._hooks:
            hook.remove()
        for check in () if failed else (self._check_mtp_mask, self._check_parameters_are_gathered):
            with harmless():
                check()

    @harmless()
    def _before_forward(self, chunk: Any, _: object, arguments: dict[str, Any]) -> None:
        import torch

        if torch.is_grad_enabled():
            # An optimizer without one of torch's, such as a mock, does not show when it steps.
            self._has_stepped |= not self._sees_steps
            is_last = getattr(unwrap(chunk), "post_process", True)
            self._has_mask &= arguments.get("loss_mask") is not None or not is_last
            is_reducing = any(group.grad_reduce_handle is not None for group in bucket_groups(chunk))
            # Without a function that finalizes, a reduction of a former step may be left.
            if is_reducing and "finalize_model_grads_func" not in messages:
                report("overlap_grad_reduce", _REDUCED_TOO_EARLY)

    @harmless()
    def _before_step(self, *_: object) -> None:
        """Report a step on gradients that no schedule has reduced, for want of a function."""
        self._has_stepped = True
        setting = "finalize_model_grads_func"
        if setting in messages or getattr(config_of(self.chunks[0]), setting, None):
            return
        stepped = getattr(self._optimizer, "model_chunks", None) or self.chunks
        chunks = [chunk for chunk in self.chunks if any(chunk is other for other in stepped)]
        is_elsewhere = any(getattr(config, setting, None) for config in self._other_configs)
        groups = [group for c in chunks for group in bucket_groups(c) if _data_parallel_size(group) > 1]
        if any(_is_unreduced(group, is_elsewhere) for group in groups):
            which = "another config has one" if is_elsewhere else "no other config has one"
            report(setting, _UNREDUCED, elsewhere=which, ranks=max(map(_data_parallel_size, groups)))

    def _check_mtp_mask(self) -> None:
        layers = max((getattr(config, "mtp_num_layers", None) or 0 for config in self.configs), default=0)
        if layers and not self._has_mask:
            from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

            if MTPLossLoggingHelper.tracker:  # some releases need labels to train these layers
                report("loss_mask", _MTP_WITHOUT_MASK, layers=layers)

    def _check_parameters_are_gathered(self) -> None:
        """Report parameters of the last step that nobody has gathered."""
        hooked = [c for c in self.chunks if getattr(c, "remove_forward_pre_hook_handles", None)]
        groups = [group for chunk in hooked for group in bucket_groups(chunk)]
        if self._has_stepped and any(map(is_stale, groups)):
            report("overlap_param_gather", _STALE_PARAMETERS, says=is_rank_0)


def reported() -> list[str]:
    """Return the messages of everything that was reported in this process so far."""
    return [*messages.values()]


def report(
    setting: str, message: Message, says: Callable[[], bool] = is_first_of_stage, **values: Any
) -> None:
    """Keep the message about a setting, unless there is one already; ranks where ``says()`` holds log it."""
    if setting not in messages:
        messages[setting] = message.text(**values).removeprefix("megatron_rl_patches: ")
        if says():
            message.log(**values)


def _data_parallel_size(group: Any) -> int:
    """Return how many data-parallel ranks reduce the gradients of a bucket group."""
    name = "intra_distributed_optimizer_instance_group"
    process_group = getattr(group, name, None) or getattr(group, "data_parallel_group", None)
    return int(process_group.size()) if process_group is not None else 1


def _is_unreduced(group: Any, if_unknown: bool) -> bool:
    """Return whether the gradients of a bucket group have not been reduced before a step.

    A reduction that overlaps with backward leaves a handle, until somebody waits for it. One of the
    distributed optimizer's leaves shards of the buffer from the first step on. Others leave no trace.
    """
    if group.grad_reduce_handle is not None:
        return True
    shards = getattr(group, "cached_grad_buffer_shard_list", None)
    if group.ddp_config.use_distributed_optimizer and shards is not None:
        return all(shard is None for shard in shards)
    return if_unknown
