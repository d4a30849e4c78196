"""Log-probabilities of given tokens, and most probable tokens, through Megatron's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from ..errors import InvalidInputError
from ..losses import (
    TopKDistribution,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from ._forward_only import Forward, forward_only, vocabulary_of
from ._microbatches import Microbatch

Model = torch.nn.Module | Sequence[torch.nn.Module]


class Scores(NamedTuple):
    """What the last pipeline stage knows of each sample, in the original order."""

    #: Per sample ``[response_length]``, float32: log-probability of each response token.
    log_probs: list[torch.Tensor]
    #: Per sample ``[response_length]``, float32, in nats: entropy of the distribution that predicts it.
    entropy: list[torch.Tensor] | None


def forward_log_probs(
    model: Model,
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
            parallelism. Default: ``chunk(tokens, position_ids, attention_mask)``; under context parallelism
            with the two chunks of each sequence that Megatron gives this rank (zigzag).
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
    _check_temperature(temperature)

    def score(
        batch: Microbatch, logits_tv: torch.Tensor, group: torch.distributed.ProcessGroup | None
    ) -> tuple[torch.Tensor, ...]:
        options = _options(batch, group, temperature)
        if with_entropy:
            return vocab_parallel_log_probs_and_entropy(logits_tv, batch.targets_n, **options)
        return (vocab_parallel_log_probs(logits_tv, batch.targets_n, **options),)

    found = forward_only(
        model,
        microbatches,
        score,
        forward=forward,
        vocab_size=vocab_size,
        output_device=output_device,
        progress=progress,
    )
    if found is None:
        return None
    log_probs, *entropies = zip(*found, strict=True)
    return Scores(list(log_probs), list(entropies[0]) if with_entropy else None)


def forward_topk(
    model: Model,
    microbatches: Sequence[Mapping[str, Any]],
    k: int | None = None,
    *,
    at: Sequence[torch.Tensor | TopKDistribution] | None = None,
    forward: Forward | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    allgather_cp: bool = False,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> list[TopKDistribution] | None:
    """The distributions that predict response tokens: of their k most probable tokens, or at given ones.

    For distillation on the student's own top-k, with ``teacher`` and ``student`` models, or one pool::

        old = forward_topk(student, microbatches, k=64)
        teacher = forward_topk(teacher, microbatches, at=old)

    Otherwise as :func:`forward_log_probs`: ranks, schedules, microbatches, and what is left behind.

    Args:
        k: how many of the most probable tokens.
        at: in place of ``k``: token ids ``[response_length, K]`` of each sample, or the distributions that
            have them, in the order of the results. Read on the last stage; the others may give ``None``, as
            they have got.
        allgather_cp: refused: under context parallelism the sequences are cut in zigzag.

    Returns:
        One :class:`~megatron_rl_patches.losses.TopKDistribution` per sample, of ``response_length`` tokens,
        in the original order, on the last pipeline stage, the same bits on all its tensor-parallel and
        context-parallel ranks; ``None`` on the other stages.

    Raises:
        InvalidInputError: as :func:`forward_log_probs`; ``at`` has not as many entries as there are samples;
            and on the last stage alone, where the others then wait in vain, if an entry does not fit.
    """
    _check_temperature(temperature)
    if allgather_cp:
        raise InvalidInputError(
            "all-gather context parallelism is not supported here: cut the sequences in zigzag, or give a "
            "`forward` that returns the logits of whole sequences."
        )
    most = vocab_size or vocabulary_of(model)
    if k is not None and (at is not None or k < 1 or (most is not None and k > most)):
        raise InvalidInputError(f"k is {k}. Expected: 1 to {most}, the vocabulary, and no `at` beside it.")
    lengths = [batch["lengths"] for batch in microbatches if batch.get("lengths") is not None]
    samples = sum(map(len, lengths))
    if at is not None and len(lengths) == len(microbatches) and len(at) != samples:
        raise InvalidInputError(f"`at` has ids for {len(at)} samples, and the microbatches have {samples}.")

    def score(
        batch: Microbatch, logits_tv: torch.Tensor, group: torch.distributed.ProcessGroup | None
    ) -> tuple[torch.Tensor, ...]:
        options = _options(batch, group, temperature)
        if k is not None:
            found = vocab_parallel_topk(logits_tv, k, **options)
            return found.indices, found.log_probs, found.tail_log_prob
        indices = _ids_of(batch, at)
        return indices, *vocab_parallel_log_probs_at(logits_tv, indices, with_tail=True, **options)

    found = forward_only(
        model,
        microbatches,
        score,
        forward=forward,
        vocab_size=vocab_size,
        output_device=output_device,
        progress=progress,
    )
    return None if found is None else [TopKDistribution(*sample) for sample in found]


def _ids_of(batch: Microbatch, at: Sequence[torch.Tensor | TopKDistribution] | None) -> torch.Tensor:
    """Of the rows of the batch on this rank."""
    if at is None:
        raise InvalidInputError("neither k nor `at` is given: which tokens of the vocabulary to score?")
    of_samples = [at[index] for index in batch.indices]
    ids = [sample.indices if isinstance(sample, TopKDistribution) else sample for sample in of_samples]
    device = batch.layout.response_rows.device
    return torch.cat(batch.layout.local_parts([sample.to(device) for sample in ids]))


def _options(
    batch: Microbatch, group: torch.distributed.ProcessGroup | None, temperature: float
) -> dict[str, Any]:
    return {"tp_group": group, "rows": batch.layout.response_rows, "temperature": temperature}


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InvalidInputError(f"temperature is {temperature}. Expected: more than 0, as it divides logits.")
