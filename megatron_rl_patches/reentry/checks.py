"""What silently spoils reinforcement learning on Megatron, looked for around ``train()`` and said once.

Training goes on as it would without these checks, which start no collective. They read the config of the
model, the number of tokens of each microbatch, and the state of the parameter all-gather.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .._chunks import Model, as_chunks, bucket_groups, distinct_configs

_log = logging.getLogger("megatron_rl_patches")

#: What was found in this process: setting -> message.
_found: dict[str, str] = {}
#: Numbers of tokens that the loss of each microbatch returned, while a ``train()`` is watched.
_token_counts: ContextVar[list[Any] | None] = ContextVar("token_counts", default=None)
_has_trained = False


def found() -> list[str]:
    """Return the messages of everything that was found in this process so far."""
    return [*_found.values()]


def has_found(setting: str) -> bool:
    """Return whether something was reported about the setting already."""
    return setting in _found


def forget() -> None:
    """Forget what was found, and look again at the next ``train()``."""
    global _has_trained
    _found.clear()
    _has_trained = False


def report(message: str, *, setting: str, aloud: bool) -> None:
    """Record what was found about a setting, once, and log it if ``aloud``."""
    if setting not in _found:
        _found[setting] = message
        if aloud:
            _log.warning("megatron_rl_patches: %s", message)


@contextmanager
def watched(model: Any) -> Iterator[None]:
    """Look at the first call of ``train()`` in this process that returns; the body is that call.

    Args:
        model: list of model chunks, or one chunk.
    """
    global _has_trained
    if _has_trained:
        yield
        return
    chunks = as_chunks(model)
    configs = distinct_configs(chunks)
    counts: list[Any] = []
    token = _token_counts.set(counts)
    try:
        yield
    finally:
        _token_counts.reset(token)
    _has_trained = True
    _check_dropout(configs)
    _check_token_weights(configs, counts)
    _check_parameters_are_gathered(chunks)


def note_tokens(forward_step_result: Any) -> None:
    """Note the number of tokens that Megatron's ``forward_step`` returns beside its outputs.

    It is zero where the loss function does not return one, and on all pipeline stages but the last.
    """
    counts = _token_counts.get()
    if counts is not None and isinstance(forward_step_result, tuple) and len(forward_step_result) == 2:
        counts.append(forward_step_result[1])


def _check_dropout(configs: list[Any]) -> None:
    for setting in ("hidden_dropout", "attention_dropout"):
        rate = max((getattr(config, setting, 0.0) or 0.0 for config in configs), default=0.0)
        if rate > 0:
            report(
                f"{setting}={rate:g}: dropout is on while the policy trains and off while it samples and "
                "scores, so their log-probs differ even with the same weights, and ratios of probabilities "
                f"are wrong. Megatron's default is 0.1: set --{setting.replace('_', '-')} 0",
                setting=setting,
                aloud=_is_rank_0(),
            )


def _check_token_weights(configs: list[Any], counts: list[Any]) -> None:
    if not counts or any(getattr(config, "calculate_per_token_loss", False) for config in configs):
        return
    tokens = [count for count in map(int, counts) if count > 0]
    if tokens and min(tokens) != max(tokens):
        report(
            "calculate_per_token_loss=False: the loss function returns its number of tokens, and Megatron "
            f"divides the loss of each microbatch by it. Microbatches had {min(tokens)} to {max(tokens)} "
            f"tokens, so a token of one counts {max(tokens) / min(tokens):.2g} times as much as a token of "
            "another. Set --calculate-per-token-loss (config.calculate_per_token_loss=True)",
            setting="calculate_per_token_loss",
            aloud=is_first_of_stage(),
        )


def _check_parameters_are_gathered(chunks: Model) -> None:
    if any(_is_stale(group) for chunk in chunks for group in bucket_groups(chunk)):
        report(
            "overlap_param_gather=True: train() left the forward pre-hooks on and returned before the "
            "parameters of its last step were gathered. Until the next forward pass every rank has new "
            "values of its own share alone, so weights that are sent or saved now mix two steps. Call "
            "disable_forward_pre_hook() of each chunk at the end of train(), as Megatron's train() does",
            setting="overlap_param_gather",
            aloud=_is_rank_0(),
        )


def _is_stale(group: Any) -> bool:
    """Return whether the parameters of this bucket group have not been gathered since the last step."""
    if not group.ddp_config.overlap_param_gather or _group_size(group) == 1:
        return False
    return group.param_gather_handle is not None or not group.param_gather_dispatched


def _group_size(group: Any) -> int:
    return int(getattr(group, "intra_distributed_optimizer_instance_size", 0))


def _is_rank_0() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)


def is_first_of_stage() -> bool:
    """Return whether this is the first rank of its pipeline stage."""
    if _is_rank_0():
        return True
    from megatron.core import parallel_state

    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    return not any(ranks)
