"""Megatron's pipeline schedules, forward only: from microbatches to values per token on the last stage."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from tqdm import tqdm

from ...common.agreement import gathered, raise_on_all
from ...common.chunks import (
    SYNC_FUNCTIONS,
    as_chunks,
    config_of,
    distinct_configs,
    modules_with_modes,
    unwrap,
)
from ...common.devices import copied_to, on_device
from ...common.ranks import is_rank_0
from ...common.scopes import replaced
from ...errors import InvalidInputError
from ...losses.logits.deferred import hide_columns
from ...losses.output_layer import deferring
from ...reentry.forward_pre_hooks import gathered_parameters
from ..models.isolation import rng_tracker_is_seeded, rng_tracker_that_does_not_fork
from .agreement import check_model, check_options, groups_that_wait, shares_experts
from .microbatches import Microbatch, parse_microbatches

Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]
#: The tensor-parallel group over which the vocabulary is split, or ``None`` if it is not.
Group = torch.distributed.ProcessGroup | None
#: Computes tensors ``[n, ...]`` for the ``n`` response tokens of a microbatch from that microbatch and its
#: logits ``[T, vocabulary / tp]``.
Score = Callable[[Microbatch, torch.Tensor, Group], tuple[torch.Tensor, ...]]

# Classes whose attribute scales an auxiliary loss in backward.
_LOSS_SCALERS = (
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)


def forward_only(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    microbatches: Sequence[Mapping[str, Any]],
    score: Score,
    forward: Forward | None,
    vocab_size: int | None,
    output_device: torch.device | str,
    progress: bool,
    check: Callable[[Sequence[Microbatch]], str | None] | None = None,
    every_token: bool = False,
    temperature: float = 1.0,
    allgather_cp: bool = False,
) -> list[tuple[torch.Tensor, ...]] | None:
    """Run the model and score each microbatch on the last stage; see :func:`~.forward.forward_log_probs`.

    ``check`` returns what is wrong with data that only the last stage has. What it returns, and any other
    problem with the arguments, is raised on all ranks that would wait; an ``InvalidInputError`` of ``score``
    on all stages. ``temperature`` and ``allgather_cp`` are checked here and used by ``score`` alone. The
    result has for each sample, in the original order, the part of each tensor of ``score`` that belongs to
    its response, or with ``every_token`` to the whole sample, with memory of its own; it is ``None`` on
    stages other than the last.
    """
    chunks = list(as_chunks(model))
    config: Any = config_of(chunks[0]) if chunks else None
    groups = groups_that_wait(chunks, config)
    context_parallel = _ContextParallel.of_groups() if forward is None else _ContextParallel()
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    on_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    problem = None
    try:  # Nothing may be raised before raise_on_all: ranks that have no problem would wait for this one.
        check_model(chunks, config)
        padded_size = vocabulary_of(chunks)
        check_options(forward, vocab_size, padded_size, output_device, temperature, allgather_cp)
        device = next(chunks[-1].parameters()).device
        batches = parse_microbatches(
            microbatches,
            packing=forward is not None,
            vocabulary=vocab_size or padded_size,
            sequence_parallel_size=tensor_parallel_size if config.sequence_parallel else 1,
            cp_rank=context_parallel.rank,
            cp_size=context_parallel.size,
            device=device,
            every_token=every_token,
            positions=_positions_of(chunks[0]) if forward is None else None,
            heads=getattr(config, "num_attention_heads", 1) // tensor_parallel_size,
        )
        if check is not None and on_last_stage:
            problem = check(batches)
    except InvalidInputError as error:
        problem = str(error)  # the error itself would keep this frame, and the model, in a cycle
    except Exception as error:
        with suppress(InvalidInputError):
            raise_on_all(f"{type(error).__name__}: {error}", groups)
        raise
    raise_on_all(problem, groups)
    # The interleaved schedule takes full groups.
    group_size = config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    schedule = _filled(batches, len(batches) + -len(batches) % group_size)
    schedule = _agreed_by_replicas(schedule, config)
    shapes = {batch.tokens_bs.shape for batch in batches}
    problems: list[str] = []
    hide = not (progress and is_rank_0())
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
            variable_seq_lengths=forward is not None or len(shapes) > 1 or config.variable_seq_lengths,
        ),
        _without_mtp(chunks),
        _preserved_loss_scales(),
        tqdm(total=len(schedule), desc="scoring", unit="microbatch", leave=False, disable=hide) as bar,
    ):

        def forward_step(
            batches: Iterator[Microbatch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
            batch = next(batches)
            with deferring(unwrap(chunk)):
                output = (forward or context_parallel.forward)(chunk, batch.fields)
            if chunk is chunks[-1]:
                bar.update()
            if not _attribute(chunk, "post_process", True):
                return output, None
            scores: list[list[torch.Tensor]] = []
            try:
                for part in _scored(output, batch, chunk, score, vocab_size):
                    responses = batch.layout.gather_responses(part, context_parallel.group)
                    scores.append([copied_to(one, output_device, non_blocking=True) for one in responses])
            except InvalidInputError as error:  # the other stages wait for this one until the schedule ends
                problems.append(str(error))
            # Return a dummy: the schedule would keep the logits while the next microbatch runs.
            return output.new_zeros(1), lambda output, non_loss_data: scores

        (size, width), *_ = shapes
        collected = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(schedule) for _ in chunks],
            model=chunks,
            num_microbatches=len(schedule),
            seq_length=width,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        if device.type == "cuda" and torch.device(output_device).type == "cpu":
            # Once for all copies to host memory.
            torch.cuda.current_stream(device).synchronize()
        raise_on_all(problems[0] if problems else None, [parallel_state.get_pipeline_model_parallel_group()])
        return _by_sample(batches, collected[: len(batches)]) if on_last_stage else None


def vocabulary_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> int | None:
    """Return the number of ids of the model, padding included; ``None`` if the model does not say."""
    size: int | None = _attribute(as_chunks(model)[0], "vocab_size", None)
    return size


def _positions_of(chunk: torch.nn.Module) -> int | None:
    """Return how many positions the model has embeddings for; ``None``: it has none, or does not say."""
    if _attribute(chunk, "position_embedding_type", None) != "learned_absolute":
        return None
    size: int | None = _attribute(chunk, "max_sequence_length", None)
    return size


def _filled(batches: list[Microbatch], length: int) -> list[Microbatch]:
    """Return ``length`` microbatches: the smallest one is repeated at the end, and its scores are dropped."""
    smallest = sorted(batches, key=lambda batch: batch.tokens_bs.numel())[:1]
    return batches + smallest * (length - len(batches))


def _agreed_by_replicas(schedule: list[Microbatch], config: Any) -> list[Microbatch]:
    """Return as many microbatches as other replicas have.

    Experts are divided over data-parallel replicas. A replica with fewer microbatches would leave the others
    waiting in the token dispatcher. One collective, if there are such replicas.

    Raises:
        InvalidInputError: the dispatcher ``allgather`` would get tokens of different shapes.
    """
    ranks = []
    if shares_experts(config):
        shapes = [tuple(batch.tokens_bs.shape) for batch in schedule]
        ranks = gathered(shapes, parallel_state.get_expert_model_parallel_group())
    rounds = max([len(schedule), *map(len, ranks)])
    if ranks and config.moe_token_dispatcher_type == "allgather":
        full = [of_rank + [min(of_rank, key=math.prod)] * (rounds - len(of_rank)) for of_rank in ranks]
        for number, of_round in enumerate(zip(*full, strict=True)):
            if len(set(of_round)) > 1:
                raise InvalidInputError(
                    f"microbatch {number} has other shapes on other expert-parallel ranks, {of_round}, and "
                    "moe_token_dispatcher_type='allgather' needs the same: pad the tokens, give all ranks "
                    "as many microbatches, or use 'alltoall'"
                )
    return _filled(schedule, rounds)


class _ContextParallel(NamedTuple):
    """This rank's place in the context-parallel group, which shares sequences in zigzag; default: alone."""

    rank: int = 0
    size: int = 1
    group: Group = None

    @classmethod
    def of_groups(cls) -> _ContextParallel:
        size = parallel_state.get_context_parallel_world_size()
        group = parallel_state.get_context_parallel_group() if size > 1 else None
        return cls(parallel_state.get_context_parallel_rank(), size, group)

    def cut(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's two chunks of whole sequences, as Megatron's ``get_batch`` cuts them."""
        if self.size == 1:
            return values
        chunks = values.chunk(2 * self.size, dim=dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=dim)

    def forward(self, chunk: torch.nn.Module, fields: Mapping[str, Any]) -> torch.Tensor:
        """Run a model chunk on this rank's part of a microbatch."""
        device = next(chunk.parameters()).device
        tokens_bs = on_device(fields["tokens"], device)
        position_ids, attention_mask = fields.get("position_ids"), fields.get("attention_mask")
        if position_ids is None:
            position_ids = torch.arange(tokens_bs.shape[1], device=device).expand_as(tokens_bs)
        if attention_mask is not None:
            attention_mask = on_device(attention_mask, device)
            if attention_mask.shape[2] > 1:  # else one row for all tokens of a sequence
                attention_mask = self.cut(attention_mask, dim=2)
        position_ids = self.cut(on_device(position_ids, device))
        output: torch.Tensor = chunk(
            self.cut(tokens_bs), position_ids, attention_mask, **_without_float32_copy(chunk)
        )
        return output


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


def _without_float32_copy(chunk: Any) -> dict[str, bool]:
    """Return the argument, new in megatron-core 0.15, that saves a copy of all logits in float32."""
    while chunk is not None:
        if "fp32_output" in inspect.signature(chunk.forward).parameters:
            return {"fp32_output": False}
        chunk = getattr(chunk, "module", None)
    return {}


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
    if group.size() == 1 or not _attribute(chunk, "parallel_output", True):
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


def _attribute(chunk: torch.nn.Module, name: str, default: Any) -> Any:
    """Return an attribute of the model inside any wrappers."""
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:
        return default
