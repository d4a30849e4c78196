"""Megatron's pipeline schedules, forward only: microbatches in, what the last stage finds per token out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from tqdm import tqdm

from ..errors import InvalidInputError
from ._meta_device import rng_tracker_that_does_not_fork
from ._microbatches import Microbatch, checked
from .global_state import cuda_rng_tracker

Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]
#: Of the logits of a microbatch, ``[T, vocabulary / tp]``, and the tensor-parallel group that has the rest
#: (``None``: nobody), tensors ``[n, ...]`` for the ``n`` rows in its layout.
Score = Callable[
    [Microbatch, torch.Tensor, "torch.distributed.ProcessGroup | None"], tuple[torch.Tensor, ...]
]


def forward_only(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    microbatches: Sequence[Mapping[str, Any]],
    score: Score,
    *,
    forward: Forward | None,
    vocab_size: int | None,
    output_device: torch.device | str,
    progress: bool,
) -> list[tuple[torch.Tensor, ...]] | None:
    """Run the model and score each microbatch where its logits are; see :func:`.scoring.forward_log_probs`.

    Returns:
        Of each sample, in the original order, the part of each tensor of ``score`` that belongs to its
        response, with memory of its own; ``None`` off the last pipeline stage.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    _check_chunks(chunks)
    config = get_model_config(chunks[0])
    padded_size = vocabulary_of(chunks)
    if vocab_size is not None and not 0 < vocab_size <= (padded_size or vocab_size):
        raise InvalidInputError(f"vocab_size is {vocab_size}. Expected: 1 to {padded_size}, the model's ids.")
    context_parallel = _ContextParallel.of_groups() if forward is None else _ContextParallel()
    batches = checked(
        microbatches,
        packing=forward is not None,
        vocabulary=vocab_size or padded_size,
        sequence_parallel_size=(
            parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        ),
        cp_rank=context_parallel.rank,
        cp_size=context_parallel.size,
        device=next(chunks[-1].parameters()).device,
    )
    shapes = {batch.tokens_bs.shape for batch in batches}
    schedule = _whole_groups(batches, config) if len(chunks) > 1 else batches

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_evaluating(chunks))
        stack.enter_context(_set_up(config, variable_seq_lengths=forward is not None or len(shapes) > 1))
        bar = stack.enter_context(_progress_bar(len(schedule), progress))

        def forward_step(
            batches: Iterator[Microbatch], chunk: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
            batch = next(batches)
            if forward is None:
                output = _forward(chunk, batch.given, context_parallel)
            else:
                output = forward(chunk, batch.given)
            if chunk is chunks[-1]:
                bar.update()
            if not _attribute(chunk, "post_process", True):
                return output, None
            parts = _scored(output, batch, chunk, score, vocab_size)
            found = [torch.cat(batch.layout.gather_responses(part, context_parallel.group)) for part in parts]
            # In place of the logits, which the schedule would hold while the next microbatch runs.
            return output.new_zeros(1), lambda output, non_loss_data: found

        (size, width), *_ = shapes
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(schedule) for _ in chunks],
            model=chunks,
            num_microbatches=len(schedule),
            seq_length=width,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        if not is_on_last_stage():
            return None
        return _by_sample(batches, found[: len(batches)], output_device)


def vocabulary_of(model: torch.nn.Module | Sequence[torch.nn.Module]) -> int | None:
    """Ids of the model, padding included; ``None`` if it does not tell."""
    size: int | None = _attribute(
        model if isinstance(model, torch.nn.Module) else model[0], "vocab_size", None
    )
    return size


def is_on_last_stage() -> bool:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return parallel_state.get_pipeline_model_parallel_rank() == stages - 1


class _ContextParallel(NamedTuple):
    """This rank's place among those that share the sequences, cut in zigzag; by default it is alone."""

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None

    @classmethod
    def of_groups(cls) -> _ContextParallel:
        size = parallel_state.get_context_parallel_world_size()
        if size == 1:
            return cls()
        return cls(
            parallel_state.get_context_parallel_rank(), size, parallel_state.get_context_parallel_group()
        )

    def cut(self, values: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Of whole sequences, the two chunks of this rank, as Megatron's ``get_batch`` cuts them."""
        if self.size == 1:
            return values
        chunks = values.chunk(2 * self.size, dim=dim)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=dim)


def _check_chunks(chunks: list[torch.nn.Module]) -> None:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if len(chunks) != virtual:
        raise InvalidInputError(
            f"the model has {len(chunks)} chunks, parallel_state a virtual pipeline size of {virtual}: give "
            "all chunks of this rank, built for the parallel groups that are initialised."
        )


def _whole_groups(batches: list[Microbatch], config: Any) -> list[Microbatch]:
    """Batches followed by what fills up the last group: the interleaved schedule takes whole groups only."""
    missing = -len(batches) % config.microbatch_group_size_per_vp_stage
    return [*batches, *[min(batches, key=lambda batch: batch.tokens_bs.numel())] * missing]


@contextmanager
def _evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    try:
        for chunk in chunks:
            chunk.eval()
        # Megatron forks it for dropout, of which there is none here; who only scores has not seeded it.
        tracker = cuda_rng_tracker()
        unseeded = tracker is None or not tracker.get_states()
        with rng_tracker_that_does_not_fork() if unseeded else nullcontext():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for chunk in chunks:
            # Of what a stage receives, the last is held until the next call.
            get_attr_wrapped_model(chunk, "set_input_tensor")([None])


@contextmanager
def _set_up(config: Any, variable_seq_lengths: bool) -> Iterator[None]:
    """A config without the host's timers and sync functions, some of which no forward-only call leaves again.

    With ``variable_seq_lengths`` the stages tell each other the shape of what they send.
    """
    changes: dict[str, Any] = dict.fromkeys(("timers", "no_sync_func", "grad_sync_func", "param_sync_func"))
    changes["variable_seq_lengths"] = variable_seq_lengths or config.variable_seq_lengths
    before = {name: getattr(config, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _progress_bar(total: int, wanted: bool) -> Any:
    shown = wanted and torch.distributed.get_rank() == 0
    return tqdm(total=total, desc="scoring", unit="microbatch", leave=False, disable=not shown)


def _forward(
    chunk: torch.nn.Module, given: Mapping[str, Any], context_parallel: _ContextParallel
) -> torch.Tensor:
    device = next(chunk.parameters()).device
    tokens_bs = given["tokens"].to(device, non_blocking=True)
    position_ids, attention_mask = given.get("position_ids"), given.get("attention_mask")
    if position_ids is None:
        position_ids = torch.arange(tokens_bs.shape[1]).expand_as(tokens_bs)
    if attention_mask is not None:
        attention_mask = context_parallel.cut(attention_mask.to(device, non_blocking=True), dim=2)
    return chunk(
        context_parallel.cut(tokens_bs),
        context_parallel.cut(position_ids.to(device, non_blocking=True)),
        attention_mask,
        **_without_float32_copy(chunk),
    )


def _without_float32_copy(chunk: Any) -> dict[str, bool]:
    """Keeps ``Float16Module`` from copying all logits to float32; before megatron-core 0.15 nothing does."""
    while chunk is not None:
        if "fp32_output" in inspect.signature(chunk.forward).parameters:
            return {"fp32_output": False}
        chunk = getattr(chunk, "module", None)
    return {}


def _scored(
    logits_bsv: torch.Tensor, batch: Microbatch, chunk: Any, score: Score, vocab_size: int | None
) -> tuple[torch.Tensor, ...]:
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
        logits_bsv[..., max(0, vocab_size - first_id) :] = float("-inf")
    return score(batch, logits_bsv.flatten(0, 1), group)


def _by_sample(
    batches: Sequence[Microbatch], found: Sequence[Sequence[torch.Tensor]], device: torch.device | str
) -> list[tuple[torch.Tensor, ...]]:
    lengths = [length for batch in batches for length in batch.layout.response_lengths]
    indices = [index for batch in batches for index in batch.indices]
    kinds = [torch.split(torch.cat(parts).to(device), lengths) for parts in zip(*found, strict=True)]
    samples = zip(indices, zip(*kinds, strict=True), strict=True)
    return [tuple(part.clone() for part in sample) for _, sample in sorted(samples, key=lambda pair: pair[0])]


def _attribute(chunk: torch.nn.Module, name: str, default: Any) -> Any:
    """An attribute of the model inside any wrappers."""
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:
        return default
