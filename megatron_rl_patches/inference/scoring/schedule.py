"""Megatron's pipeline schedules, forward only: from microbatches to values per token on the last stage.

The model runs in another state than it trains in, and comes back from it as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from ...common.agreement import raise_on_all
from ...common.chunks import SYNC_FUNCTIONS, attribute_of, distinct_configs, modules_with_modes, unwrap
from ...common.devices import copied_together
from ...common.ranks import is_rank_0
from ...common.scopes import replaced
from ...errors import InvalidInputError
from ...losses.output_layer import deferring
from ...reentry.forward_pre_hooks import gathered_parameters
from ..models.isolation import rng_tracker_is_seeded, rng_tracker_that_does_not_fork
from .microbatches import ScoringBatch, described
from .plan import Check, Group, Microbatches, Model, Plan, ScoreOptions, is_last_stage, plan_of

#: Computes tensors ``[n, ...]`` for the ``n`` response tokens of a microbatch from logits ``[T, V / tp]``.
Score = Callable[[ScoringBatch, torch.Tensor, Group], tuple[torch.Tensor, ...]]
# Classes whose attribute scales an auxiliary loss in backward.
_LOSS_SCALERS = (
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)


def forward_only(
    model: Model, microbatches: Microbatches, score: Score, options: ScoreOptions, check: Check | None = None
) -> list[tuple[torch.Tensor, ...]] | None:
    """Run the model and score each microbatch on the last stage; see :func:`~.forward.forward_log_probs`.

    What ``check`` returns, and any other problem with the arguments, is raised on all ranks that would wait;
    an ``InvalidInputError`` of ``score`` on all stages. The result has, for each sample in order, its part of
    each tensor of ``score``; it is ``None`` on stages other than the last.
    """
    plan = plan_of(model, microbatches, options, check)
    with _scoring(plan):
        scores, problem = _run(plan, score)
        device = next(plan.chunks[-1].parameters()).device
        if device.type == "cuda" and torch.device(options.output_device).type == "cpu":
            torch.cuda.current_stream(device).synchronize()  # once for all copies to host memory
        raise_on_all(problem, plan.alike)
    if not is_last_stage():
        return None
    own = scores[: len(plan.batches)]
    return [of_sample for kinds in own for of_sample in zip(*kinds, strict=True)]


@contextmanager
def _scoring(plan: Plan) -> Iterator[None]:
    """Put the model in the state in which it scores, and at the end back into the one that it had."""
    models = [unwrap(chunk) for chunk in plan.chunks]
    differ = len({batch.tokens_bs.shape for batch in plan.batches}) > 1
    with torch.no_grad(), gathered_parameters(plan.chunks), _evaluating(plan.chunks), ExitStack() as stack:

        def replace(owner: Any, **attributes: Any) -> None:
            stack.enter_context(replaced(owner, **attributes))

        # A schedule calls the sync functions when it enters ``no_sync``, and some of them are only undone by
        # a backward pass, which never comes here. If shapes differ, the stages tell each other every shape.
        variable = plan.options.forward is not None or differ or plan.config.variable_seq_lengths
        replace(plan.config, **dict.fromkeys(("timers", *SYNC_FUNCTIONS)), variable_seq_lengths=variable)
        # Multi-token prediction is left out: megatron-core up to 0.16 needs labels to run its layers.
        for config in distinct_configs(models):
            replace(config, mtp_num_layers=None)
        for model in models:
            replace(model, mtp_process=False)
        # Schedules set these scales for the whole process, forward only, too: in place, if they exist.
        for module, name in _LOSS_SCALERS:
            if (scaler := getattr(sys.modules.get(module), name, None)) is not None:
                replace(scaler, main_loss_backward_scale=None)
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
            attribute_of(chunk, "set_input_tensor")([None])


def _run(plan: Plan, score: Score) -> tuple[list[Any], str | None]:
    """Run the schedule; return the scores of each microbatch, and what was wrong with the first bad one."""
    problems: list[str] = []
    bar = None
    if plan.options.progress and is_rank_0():  # a bar that is only hidden would leave a semaphore behind
        bar = tqdm(total=len(plan.schedule), desc="scoring", unit="microbatch", leave=False)

    def forward_step(
        batches: Iterator[ScoringBatch], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        batch = next(batches)
        with deferring(unwrap(chunk)):
            output = plan.forward(chunk, batch)
        if bar is not None and chunk is plan.chunks[-1]:
            bar.update()
        is_last = attribute_of(chunk, "post_process", True)
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1 or not attribute_of(chunk, "parallel_output", True):
            group = None
        if problem := _problem_with(output, batch, is_last, plan.options.every_token):
            problems.append(problem)
            # Other ranks wait for this one: the next stage for an activation [s, b, h], others for a score.
            shape = *batch.tokens_bs.T.shape, plan.config.hidden_size
            if is_last:
                vocabulary = 1 if plan.options.every_token else attribute_of(chunk, "vocab_size") or 1
                shape = *batch.layout.logits_shape, -(-vocabulary // (group.size() if group else 1))
            output = next(chunk.parameters()).new_zeros(shape)
        if not is_last:
            return output, None
        scores: list[tuple[torch.Tensor, ...]] = []
        try:
            parts = score(batch, output.flatten(0, 1), group)
            group, lengths = plan.context_parallel.group, list(batch.layout.response_lengths)
            responses = [torch.cat(batch.layout.gather_responses(part, group)) for part in parts]
            # One copy for all: each block of pinned memory may make the GPU wait.
            copies = copied_together(responses, plan.options.output_device)
            scores.extend(torch.split(copy, lengths) for copy in copies)
        except InvalidInputError as error:  # the other stages wait for this one until the schedule ends
            problems.append(str(error))
        # Return a dummy: the schedule would keep the logits while the next microbatch runs.
        return output.new_zeros(1), lambda output, non_loss_data: scores

    size, width = plan.batches[0].tokens_bs.shape
    with bar or nullcontext():
        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(plan.schedule) for _ in plan.chunks],
            model=plan.chunks,
            num_microbatches=len(plan.schedule),
            seq_length=width,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return collected, problems[0] if problems else None


def _problem_with(output: Any, batch: ScoringBatch, is_last: bool, are_values: bool) -> str | None:
    """Say what is wrong with what a chunk returned, or ``forward``; ``None``: nothing."""
    if not isinstance(output, torch.Tensor):
        return f"`forward` returned {described(output)}. Expected: what the chunk returns."
    if is_last and (output.dim() != 3 or output.shape[:2] != batch.layout.logits_shape):
        return (
            f"`forward` returned {list(output.shape)} on the last stage. Expected: logits "
            f"[{', '.join(map(str, batch.layout.logits_shape))}, vocabulary / tp], as the tokens are."
        )
    if is_last and output.shape[2] == 1 and not are_values:
        return "the model returned one number per token, as a critic does, not logits: call forward_values"
    return None
