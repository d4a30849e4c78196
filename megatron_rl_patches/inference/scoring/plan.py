"""What a run of the schedule needs, checked and agreed on by all ranks that would wait for this one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state

from ...common.agreement import gathered, raise_on_all
from ...common.chunks import as_chunks, attribute_of, config_of
from ...common.devices import on_device
from ...errors import InvalidInputError
from ...losses.vocab.arguments import VocabParallelOptions, is_integer
from ...reentry.forward_pre_hooks import why_not_gathered
from ..weights import checksum
from .microbatches import Limits, ScoringBatch, parse_microbatches

Model = torch.nn.Module | Sequence[torch.nn.Module]
Microbatches = Sequence[Mapping[str, Any]]
Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]
#: The tensor-parallel group over which the vocabulary is split, or ``None`` if it is not.
Group = torch.distributed.ProcessGroup | None
#: Returns what is wrong with data that only the last stage has.
Check = Callable[[Sequence[ScoringBatch]], str | None]


@dataclass(frozen=True)
class ScoreOptions:
    """Options that the functions of scoring share; see :func:`~.forward.forward_log_probs`.

    ``function`` is the one that was called. With ``every_token`` the result has a row for each token of a
    sample, not of its response alone. ``of_last_stage`` are arguments that other stages do not read.
    """

    function: str
    forward: Forward | None = None
    output_device: torch.device | str = "cpu"
    progress: bool = True
    vocab_size: int | None = None
    temperature: float = 1.0
    of_last_stage: Mapping[str, Any] = field(default_factory=dict)
    every_token: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """A run of the schedule."""

    chunks: Sequence[torch.nn.Module]
    config: Any
    options: ScoreOptions
    #: This rank's microbatches, and those that it runs: more at the end, whose scores are dropped.
    batches: Sequence[ScoringBatch]
    schedule: Sequence[ScoringBatch]
    #: This rank's place, if the model's input is cut here.
    context_parallel: ContextParallel
    #: The groups through which this rank reaches those that score the same samples.
    alike: Sequence[Group]

    def forward(self, chunk: torch.nn.Module, batch: ScoringBatch) -> Any:
        """Run a chunk on a microbatch."""
        return (self.options.forward or self.context_parallel.forward)(chunk, batch.fields)


def plan_of(model: Model, microbatches: Microbatches, options: ScoreOptions, check: Check | None) -> Plan:
    """Check what the caller passed, and agree on it with the ranks that would wait for this one."""
    chunks = list(as_chunks(model))
    config: Any = config_of(chunks[0]) if chunks else None
    # In this order, what differs between last stages alone reaches every rank that would wait, too.
    alike = [parallel_state.get_context_parallel_group(), parallel_state.get_model_parallel_group()]
    groups, experts = list(alike), None
    if getattr(config, "num_moe_experts", None) and config.expert_model_parallel_size > 1:
        experts = parallel_state.get_expert_model_parallel_group()
        groups.append(experts)
    if any(getattr(chunk, "use_forward_hook", False) for chunk in chunks):  # parameters may be gathered
        groups.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
    context_parallel = ContextParallel.of_groups() if options.forward is None else ContextParallel()
    problem = data = None
    try:  # Nothing may be raised before raise_on_all: ranks that have no problem would wait for this one.
        _check(chunks, config, options)
        batches = parse_microbatches(microbatches, _limits(chunks, config, options, context_parallel))
        if check is not None and is_last_stage():
            problem = check(batches)
        if problem is None:
            data = _data_of(batches, options)
    except InvalidInputError as error:
        problem = str(error)  # the error itself would keep this frame, and the model, in a cycle
    except Exception as error:
        with suppress(InvalidInputError):
            raise_on_all(f"{type(error).__name__}: {error}", groups)
        raise
    raise_on_all(problem, groups, data, alike)
    smallest = min(batches, key=lambda batch: batch.tokens_bs.numel())
    schedule = batches + [smallest] * (_agreed_rounds(batches, chunks, config, experts) - len(batches))
    return Plan(chunks, config, options, batches, schedule, context_parallel, alike)


def _data_of(batches: Sequence[ScoringBatch], options: ScoreOptions) -> dict[str, Any]:
    """Return what ranks that score the same samples must have in common, by name."""
    data: dict[str, Any] = {"function": options.function, "the number of microbatches": len(batches)}
    for number, tokens in enumerate(_digests([batch.tokens_bs for batch in batches])):
        layout, of_microbatch = batches[number].layout, f"of microbatch {number}"
        data[f"tokens {of_microbatch}"] = tokens
        data[f"lengths {of_microbatch}"] = layout.total_lengths
        data[f"response_lengths {of_microbatch}"] = layout.response_lengths
    data |= {"temperature": float(options.temperature), "vocab_size": options.vocab_size}
    own = options.of_last_stage if is_last_stage() else {}
    return data | {name: _digests(x) if isinstance(x, Sequence) else x for name, x in own.items()}


def _digests(ids: Sequence[torch.Tensor]) -> list[str]:
    """Return a text for each int64 tensor that depends on its shape, its values and their places."""
    sums = checksum(ids, stretch=8)
    return [f"{[*x.shape]} with checksum {n % 2**64:x}" for x, n in zip(ids, sums, strict=True)]


def _check(chunks: Sequence[torch.nn.Module], config: Any, options: ScoreOptions) -> None:
    """Refuse chunks that are not this rank's part of a model of Megatron's, or that cannot be scored now.

    Wrong options are refused on all stages, also on those that do not read them.
    """
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if len(chunks) != virtual:
        raise InvalidInputError(
            f"the model has {len(chunks)} chunks, parallel_state a virtual pipeline size of {virtual}: pass "
            "all chunks of this rank, built for the parallel groups that are initialized."
        )
    if config is None:
        raise InvalidInputError(
            f"the model is a {type(chunks[0]).__name__}. Expected: a model of Megatron's, which has a config."
        )
    if problem := why_not_gathered(chunks):
        raise InvalidInputError(problem)
    VocabParallelOptions(temperature=options.temperature)
    if options.forward is not None and not callable(options.forward):
        raise InvalidInputError(
            f"forward is {options.forward!r}. Expected: a function of a model chunk and a microbatch."
        )
    size, padded_size = options.vocab_size, vocabulary_of(chunks)
    if size is not None and not (is_integer(size) and 0 < size <= (padded_size or size)):
        raise InvalidInputError(f"vocab_size is {size!r}. Expected: 1 to {padded_size}, the model's ids.")
    try:
        torch.device(options.output_device)
    except (RuntimeError, TypeError):
        raise InvalidInputError(
            f"output_device is {options.output_device!r}. Expected: a device of torch."
        ) from None


def is_last_stage() -> bool:
    """Return whether this rank is on the last pipeline stage."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def _limits(
    chunks: Sequence[torch.nn.Module], config: Any, options: ScoreOptions, context_parallel: ContextParallel
) -> Limits:
    """Return what microbatches must fit."""
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    embedding = attribute_of(chunks[0], "position_embedding_type")
    looks_up_positions = embedding == "learned_absolute" and options.forward is None
    return Limits(
        packing=options.forward is not None,
        vocabulary=options.vocab_size or vocabulary_of(chunks),
        sequence_parallel_size=tensor_parallel_size if config.sequence_parallel else 1,
        cp_rank=context_parallel.rank,
        cp_size=context_parallel.size,
        device=next(chunks[-1].parameters()).device,
        every_token=options.every_token,
        positions=attribute_of(chunks[0], "max_sequence_length") if looks_up_positions else None,
    )


def vocabulary_of(model: Model) -> int | None:
    """Return the number of ids of the model, padding included; ``None`` if the model does not say."""
    return attribute_of(as_chunks(model)[0], "vocab_size")


def _agreed_rounds(
    batches: Sequence[ScoringBatch], chunks: Sequence[torch.nn.Module], config: Any, experts: Group
) -> int:
    """Return how many microbatches this rank runs: whole groups if interleaved, and as many as its replicas.

    Experts are divided over data-parallel replicas. A replica with fewer microbatches would leave the others
    waiting in the token dispatcher. One collective, if there are such replicas.
    """
    group_size = config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    shapes = gathered([tuple(batch.tokens_bs.shape) for batch in batches], experts)
    most = max(map(len, shapes))
    rounds = most + -most % group_size
    if len(shapes) > 1 and config.moe_token_dispatcher_type == "allgather":
        full = [of_rank + [min(of_rank, key=math.prod)] * (rounds - len(of_rank)) for of_rank in shapes]
        for number, of_round in enumerate(zip(*full, strict=True)):
            if len(set(of_round)) > 1:
                raise InvalidInputError(
                    f"microbatch {number} has other shapes on other expert-parallel ranks, {of_round}, and "
                    "moe_token_dispatcher_type='allgather' needs the same: pad the tokens, give all ranks "
                    "as many microbatches, or use 'alltoall'"
                )
    return rounds


class ContextParallel(NamedTuple):
    """This rank's place in the context-parallel group, which shares sequences in zigzag; default: alone."""

    rank: int = 0
    size: int = 1
    group: Group = None

    @classmethod
    def of_groups(cls) -> ContextParallel:
        size = parallel_state.get_context_parallel_world_size()
        group = parallel_state.get_context_parallel_group() if size > 1 else None
        return cls(parallel_state.get_context_parallel_rank(), size, group)

    def cut(self, values_bs: torch.Tensor) -> torch.Tensor:
        """Return this rank's two chunks of whole sequences, as Megatron's ``get_batch`` cuts them."""
        if self.size == 1:
            return values_bs
        chunks = values_bs.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[self.rank], chunks[-1 - self.rank]], dim=1)

    def forward(self, chunk: torch.nn.Module, fields: Mapping[str, Any]) -> torch.Tensor:
        """Run a model chunk on this rank's part of a microbatch."""
        device = next(chunk.parameters()).device
        tokens_bs = on_device(fields["tokens"], device)
        positions_bs = torch.arange(tokens_bs.shape[1], device=device).expand_as(tokens_bs)
        return chunk(self.cut(tokens_bs), self.cut(positions_bs), None, **_without_float32_copy(chunk))


def _without_float32_copy(chunk: Any) -> dict[str, bool]:
    """Return the argument, new in megatron-core 0.15, that saves a copy of all logits in float32."""
    while chunk is not None:
        if "fp32_output" in inspect.signature(chunk.forward).parameters:
            return {"fp32_output": False}
        chunk = getattr(chunk, "module", None)
    return {}
