"""Megatron's pipeline schedules, forward only: from microbatches to values per token on the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from ...common.agreement import raise_on_all
from ...common.chunks import unwrap
from ...common.devices import copied_to
from ...common.ranks import is_rank_0
from ...errors import InvalidInputError
from ...losses.logits.deferred import hide_columns
from ...losses.output_layer import deferring
from .microbatches import Microbatch
from .modes import scoring
from .plan import Check, Group, Plan, ScoreOptions, attribute_of, is_last_stage, plan_of

#: Computes tensors ``[n, ...]`` for the ``n`` response tokens of a microbatch from that microbatch and its
#: logits ``[T, vocabulary / tp]``.
Score = Callable[[Microbatch, torch.Tensor, Group], tuple[torch.Tensor, ...]]


def forward_only(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    microbatches: Sequence[Mapping[str, Any]],
    score: Score,
    options: ScoreOptions,
    check: Check | None = None,
) -> list[tuple[torch.Tensor, ...]] | None:
    """Run the model and score each microbatch on the last stage; see :func:`~.forward.forward_log_probs`.

    What ``check`` returns, and any other problem with the arguments, is raised on all ranks that would wait;
    an ``InvalidInputError`` of ``score`` on all stages. The result has for each sample, in the original
    order, the part of each tensor of ``score`` that belongs to it, with memory of its own; it is ``None`` on
    stages other than the last.
    """
    plan = plan_of(model, microbatches, options, check)
    with scoring(plan):
        scores, problem = _run(plan, score)
        if plan.device.type == "cuda" and torch.device(options.output_device).type == "cpu":
            # Once for all copies to host memory.
            torch.cuda.current_stream(plan.device).synchronize()
        raise_on_all(problem, [parallel_state.get_pipeline_model_parallel_group()])
    return _by_sample(plan.batches, scores[: len(plan.batches)]) if is_last_stage() else None


def _run(plan: Plan, score: Score) -> tuple[list[Any], str | None]:
    """Run the schedule; return the scores of each microbatch, and what was wrong with the first bad one."""
    problems: list[str] = []
    bar = None
    if plan.options.progress and is_rank_0():  # a bar that is only hidden would leave a semaphore behind
        bar = tqdm(total=len(plan.schedule), desc="scoring", unit="microbatch", leave=False)

    def forward_step(
        batches: Iterator[Microbatch], chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        batch = next(batches)
        with deferring(unwrap(chunk)):
            output = plan.forward(chunk, batch)
        if bar is not None and chunk is plan.chunks[-1]:
            bar.update()
        if not attribute_of(chunk, "post_process", True):
            return output, None
        scores: list[list[torch.Tensor]] = []
        try:
            for part in _scored(output, batch, chunk, score, plan.options.vocab_size):
                responses = batch.layout.gather_responses(part, plan.context_parallel.group)
                device = plan.options.output_device
                scores.append([copied_to(one, device, non_blocking=True) for one in responses])
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


def _scored(
    logits_bsv: torch.Tensor, batch: Microbatch, chunk: Any, score: Score, vocab_size: int | None
) -> tuple[torch.Tensor, ...]:
    """Call ``score`` with the logits of the last stage, those of padding ids set to -inf."""
    if logits_bsv.shape[:2] != batch.layout.logits_shape:
        raise InvalidInputError(
            f"`forward` returned {list(logits_bsv.shape)} on the last stage. Expected: logits "
            f"[{', '.join(map(str, batch.layout.logits_shape))}, vocabulary / tp], as the tokens are."
        )
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not attribute_of(chunk, "parallel_output", True):
        group = None
    if vocab_size is not None:
        first_id = logits_bsv.shape[2] * (0 if group is None else group.rank())
        logits_bsv = hide_columns(logits_bsv, max(0, vocab_size - first_id))
    return score(batch, logits_bsv.flatten(0, 1), group)


def _by_sample(
    batches: Sequence[Microbatch], scores: Sequence[Sequence[Sequence[torch.Tensor]]]
) -> list[tuple[torch.Tensor, ...]]:
    """Put the scores of the samples of all batches in the original order."""
    samples: dict[int, tuple[torch.Tensor, ...]] = {}
    for batch, kinds in zip(batches, scores, strict=True):
        samples |= zip(batch.indices, zip(*kinds, strict=True), strict=True)
    return [samples[index] for index in range(len(samples))]
