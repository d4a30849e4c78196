"""The state in which a model scores, from which it comes back as it was."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from megatron.core.utils import get_attr_wrapped_model

from ...common.chunks import SYNC_FUNCTIONS, distinct_configs, modules_with_modes, unwrap
from ...common.scopes import replaced
from ...reentry.forward_pre_hooks import gathered_parameters
from ..models.isolation import rng_tracker_is_seeded, rng_tracker_that_does_not_fork
from .plan import Plan

# Classes whose attribute scales an auxiliary loss in backward.
_LOSS_SCALERS = (
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)


@contextmanager
def scoring(plan: Plan) -> Iterator[None]:
    """Put the model in the state in which it scores, and at the end back into the one that it had."""
    chunks, config = plan.chunks, plan.config
    differ = len({batch.tokens_bs.shape for batch in plan.batches}) > 1
    with (
        torch.no_grad(),
        gathered_parameters(chunks),
        _evaluating(chunks),
        # A schedule calls the sync functions when it enters ``no_sync``, and some of them are only undone by
        # a backward pass, which never comes here. Without equal shapes the stages tell each other the shape
        # of every activation that they send.
        replaced(
            config,
            **dict.fromkeys(("timers", *SYNC_FUNCTIONS)),
            variable_seq_lengths=plan.options.forward is not None or differ or config.variable_seq_lengths,
        ),
        _without_mtp(chunks),
        _preserved_loss_scales(),
    ):
        yield


@contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put the model in eval mode, and at the end each module in the mode that it had."""
    modes = modules_with_modes(chunks)
    try:
        for chunk in chunks:
            chunk.eval()
        # Megatron forks the RNG tracker for dropout, and an unseeded tracker cannot fork. There is no dropout
        # in eval mode, so nothing is lost if the tracker does not fork.
        with nullcontext() if rng_tracker_is_seeded() else rng_tracker_that_does_not_fork():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for chunk in chunks:
            # The stage keeps the last activation that it received. This frees it.
            get_attr_wrapped_model(chunk, "set_input_tensor")([None])


@contextmanager
def _without_mtp(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Leave out the layers of multi-token prediction; megatron-core up to 0.16 needs labels to run them."""
    models = [unwrap(chunk) for chunk in chunks]
    with ExitStack() as stack:
        for config in distinct_configs(models):
            stack.enter_context(replaced(config, mtp_num_layers=None))
        for model in models:
            stack.enter_context(replaced(model, mtp_process=False))
        yield


@contextmanager
def _preserved_loss_scales() -> Iterator[None]:
    """Keep the scales of auxiliary losses, which schedules set for the whole process, forward only, too."""
    with ExitStack() as stack:
        for module, name in _LOSS_SCALERS:
            if (scaler := getattr(sys.modules.get(module), name, None)) is not None:
                # A scale that exists would be overwritten in place.
                stack.enter_context(replaced(scaler, main_loss_backward_scale=None))
        yield
