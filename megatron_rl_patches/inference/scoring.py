"""Log-probabilities of given tokens, through Megatron's own pipeline schedules, forward only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from tqdm import tqdm

from ..errors import InvalidInputError
from ..losses import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from ._meta_device import rng_tracker_that_does_not_fork
from ._microbatches import Microbatch, checked
from .global_state import cuda_rng_tracker

Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]


class Scores(NamedTuple):
    """What the last pipeline stage knows of each sample, in the original order."""

    #: Per sample ``[response_length]``, float32: log-probability of each response token.
    log_probs: list[torch.Tensor]
    #: Per sample ``[response_length]``, float32, in nats: entropy of the distribution that predicts it.
    entropy: list[torch.Tensor] | None


def forward_log_probs(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    microbatches: Sequence[Mapping[str, Any]],
    *,
    forward: Forward | None = None,
    with_entropy: bool = False,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> Scores | None:
    """Score given tokens with a model: forward only, without pipelining, with PP, or interleaved (VPP).

    All ranks of a tensor- and pipeline-parallel group call it with the same microbatches, each data-parallel
    replica with its own. Groups are those of ``megatron.core.parallel_state``. Nothing is left behind, also
    when it raises: no autograd graph, no activation; training modes and config are as before. Models in
    ``DistributedDataParallel`` are scored as well as inference-only ones.

    Args:
        model: model chunk, or list of them, as Megatron's ``get_model`` returns.
        microbatches: mappings of

            * ``tokens``: int64 ``[b, s]``, padded on the right with any valid token; shapes may differ;
            * ``lengths``: ``b`` numbers of tokens, prompt and response together;
            * ``response_lengths``: ``b`` numbers of tokens to score at the end of each sample. Default: all
              but the first, which nothing predicts;
            * ``indices``: ``b`` positions of the samples in the result. Default: in order;
            * ``position_ids``, int64 ``[b, s]``, and ``attention_mask``: for the model. Default: counted from
              0; ``None``, with which Megatron's own layer specs attend causally, so never to the padding.

            With ``forward``, ``tokens`` may be ``[1, t]`` with the samples packed one after the other.
        forward: runs a model chunk on one of ``microbatches`` and returns the chunk's output, which on the
            last stage is the logits ``[b, s, vocabulary / tp]``, of whole sequences also under context
            parallelism. Default: ``chunk(tokens, position_ids, attention_mask)``.
        with_entropy: also return the entropy.
        temperature: logits are divided by it.
        vocab_size: ids from here on are padding of the vocabulary and have probability zero; default: the
            model's ids all count, as they do in training with Megatron's losses.
        output_device: where the results go.
        progress: show a progress bar on global rank 0.

    Returns:
        :class:`Scores` on the last pipeline stage, the same bits on all its tensor-parallel ranks; ``None``
        on the other stages.

    Raises:
        InvalidInputError: on every rank alike, before any communication; but logits of a wrong shape from
            ``forward`` show on the last stage only.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    _check_layout(chunks, forward)
    if not temperature > 0:
        raise InvalidInputError(f"temperature is {temperature}. Expected: more than 0, as it divides logits.")
    config = get_model_config(chunks[0])
    padded_size = _attribute(chunks[0], "vocab_size", None)
    if vocab_size is not None and not 0 < vocab_size <= (padded_size or vocab_size):
        raise InvalidInputError(f"vocab_size is {vocab_size}. Expected: 1 to {padded_size}, the model's ids.")
    batches = checked(
        microbatches,
        packing=forward is not None,
        vocabulary=vocab_size or padded_size,
        multiple=parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1,
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
            output = (forward or _forward)(chunk, batch.given)
            if chunk is chunks[-1]:
                bar.update()
            if not _attribute(chunk, "post_process", True):
                return output, None
            scores = _score(output, batch, chunk, temperature, with_entropy, vocab_size)
            # In place of the logits, which the schedule would hold while the next microbatch runs.
            return output.new_zeros(1), lambda output, non_loss_data: scores

        (size, width), *_ = shapes
        scores = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(schedule) for _ in chunks],
            model=chunks,
            num_microbatches=len(schedule),
            seq_length=width,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        if not _on_last_stage():
            return None
        log_probs, entropies = zip(*scores, strict=True)
        return Scores(
            _by_sample(batches, log_probs, output_device),
            _by_sample(batches, entropies, output_device) if with_entropy else None,
        )


def _check_layout(chunks: list[torch.nn.Module], forward: Forward | None) -> None:
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if len(chunks) != virtual:
        raise InvalidInputError(
            f"the model has {len(chunks)} chunks, parallel_state a virtual pipeline size of {virtual}: give "
            "all chunks of this rank, built for the parallel groups that are initialised."
        )
    context_parallel = parallel_state.get_context_parallel_world_size()
    if context_parallel > 1 and forward is None:
        raise InvalidInputError(
            f"the context-parallel size is {context_parallel}, and how sequences are cut is the host's "
            "choice: give a `forward` that cuts the tokens and returns the logits of whole sequences."
        )


def _whole_groups(batches: list[Microbatch], config: Any) -> list[Microbatch]:
    """Batches followed by what fills up the last group: the interleaved schedule takes whole groups only."""
    missing = -len(batches) % config.microbatch_group_size_per_vp_stage
    filler = min(batches, key=lambda batch: batch.tokens_bs.numel())
    unscored = replace(filler, indices=[], response_lengths=[], rows_n=filler.rows_n[:0])
    return [*batches, *[unscored] * missing]


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


def _forward(chunk: torch.nn.Module, given: Mapping[str, Any]) -> torch.Tensor:
    device = next(chunk.parameters()).device
    tokens_bs = given["tokens"].to(device, non_blocking=True)
    position_ids, attention_mask = given.get("position_ids"), given.get("attention_mask")
    if position_ids is None:
        position_ids = torch.arange(tokens_bs.shape[1], device=device).expand_as(tokens_bs)
    else:
        position_ids = position_ids.to(device, non_blocking=True)
    if attention_mask is not None:
        attention_mask = attention_mask.to(device, non_blocking=True)
    return chunk(tokens_bs, position_ids, attention_mask, **_without_float32_copy(chunk))


def _without_float32_copy(chunk: Any) -> dict[str, bool]:
    """Keeps ``Float16Module`` from copying all logits to float32; before megatron-core 0.15 nothing does."""
    while chunk is not None:
        if "fp32_output" in inspect.signature(chunk.forward).parameters:
            return {"fp32_output": False}
        chunk = getattr(chunk, "module", None)
    return {}


def _score(
    logits_bsv: torch.Tensor,
    batch: Microbatch,
    chunk: Any,
    temperature: float,
    with_entropy: bool,
    vocab_size: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if logits_bsv.shape[:2] != batch.tokens_bs.shape:
        raise InvalidInputError(
            f"`forward` returned {list(logits_bsv.shape)} on the last stage. Expected: logits "
            f"[{', '.join(map(str, batch.tokens_bs.shape))}, vocabulary / tp], as the tokens are."
        )
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not _attribute(chunk, "parallel_output", True):
        group = None
    if vocab_size is not None:
        first_id = logits_bsv.shape[2] * (0 if group is None else group.rank())
        logits_bsv[..., max(0, vocab_size - first_id) :] = float("-inf")
    rows_n, targets_n = (tensor.to(logits_bsv.device) for tensor in (batch.rows_n, batch.targets_n))
    options: dict[str, Any] = {"tp_group": group, "rows": rows_n, "temperature": temperature}
    logits_tv = logits_bsv.flatten(0, 1)
    if with_entropy:
        return vocab_parallel_log_probs_and_entropy(logits_tv, targets_n, **options)
    return vocab_parallel_log_probs(logits_tv, targets_n, **options), None


def _on_last_stage() -> bool:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return parallel_state.get_pipeline_model_parallel_rank() == stages - 1


def _by_sample(
    batches: Sequence[Microbatch], scored: Sequence[torch.Tensor], device: torch.device | str
) -> list[torch.Tensor]:
    """Scores cut into samples, in the original order, each with memory of its own."""
    lengths = [length for batch in batches for length in batch.response_lengths]
    indices = [index for batch in batches for index in batch.indices]
    pieces = torch.split(torch.cat(list(scored)).to(device), lengths)
    return [piece.clone() for _, piece in sorted(zip(indices, pieces, strict=True), key=lambda pair: pair[0])]


def _attribute(chunk: torch.nn.Module, name: str, default: Any) -> Any:
    """An attribute of the model inside any wrappers."""
    try:
        return get_attr_wrapped_model(chunk, name)
    except RuntimeError:
        return default
