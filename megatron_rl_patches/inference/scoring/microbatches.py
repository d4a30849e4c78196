"""Microbatches to score: parsed and checked before any communication."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...common.devices import each_on_device
from ...common.text import listed
from ...errors import InvalidInputError
from ...losses import SequenceLayout
from ...losses.vocab.arguments import integers
from ..weights import checksum

Forward = Callable[[torch.nn.Module, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ScoringBatch:
    """One microbatch after checking; ``fields`` is the mapping that the caller passed."""

    fields: Mapping[str, Any]
    tokens_bs: torch.Tensor
    samples: list[torch.Tensor]  # tokens of each, whole and without padding
    first: int  # position of the first sample in the result
    layout: SequenceLayout  # which rows of this rank's logits predict response tokens

    @property
    def targets_n(self) -> torch.Tensor:
        """Tokens ``[n]`` that the ``n`` rows of the layout predict."""
        return self.layout.response_targets(each_on_device(self.samples, self.layout.response_rows.device))


@dataclass(frozen=True)
class ScoreOptions:
    """Options that the functions of scoring share; see :func:`~.forward.forward_log_probs`."""

    function: str  # the one that was called
    forward: Forward | None = None
    output_device: torch.device | str = "cpu"
    progress: bool = True
    vocab_size: int | None = None
    temperature: float = 1.0
    of_last_stage: Mapping[str, Any] = field(default_factory=dict)  # arguments that other stages do not read
    every_token: bool = False  # the result has a row for each token of a sample, not of its response alone


@dataclass(frozen=True)
class Limits:
    """What the microbatches of a model on one rank must fit."""

    vocabulary: int | None  # number of token ids, if it is known
    sequence_parallel_size: int = 1  # size of the tensor-parallel group, if it splits the sequence too
    cp_rank: int = 0
    cp_size: int = 1
    device: torch.device | str = "cpu"  # where the logits will be
    positions: int | None = None  # how wide tokens may be, since the model looks positions up


def parse_microbatches(
    mappings: Sequence[Mapping[str, Any]], options: ScoreOptions, limits: Limits
) -> list[ScoringBatch]:
    """Parse and check the microbatches of :func:`~.forward.forward_log_probs`."""
    if isinstance(mappings, Mapping) or not isinstance(mappings, Sequence):
        raise InvalidInputError(
            f"microbatches are a {type(mappings).__name__}. Expected: a list of mappings, also for one."
        )
    if not mappings:
        raise InvalidInputError("there are no microbatches to score: pass at least one on every rank.")
    batches: list[ScoringBatch] = []
    for number, mapping in enumerate(mappings):
        first = batches[-1].first + len(batches[-1].samples) if batches else 0
        try:
            batches.append(_microbatch(mapping, first, options, limits))
        except InvalidInputError as error:
            raise InvalidInputError(f"microbatch {number}: {error}") from None
    return batches


def _microbatch(
    mapping: Mapping[str, Any], first: int, options: ScoreOptions, limits: Limits
) -> ScoringBatch:
    if not isinstance(mapping, Mapping):
        raise InvalidInputError(f"it is a {type(mapping).__name__}. Expected: a mapping with tokens.")
    fields, old, new = mapping, "lengths", "total_lengths"
    if fields.get(old) is not None:
        if fields.get(new) is not None:
            raise InvalidInputError(
                f"{old} is the former name of {new}, and both are in it: leave {old} out."
            )
        warnings.warn(f"{old!r} of a microbatch is now {new!r}", DeprecationWarning, stacklevel=5)
        fields = {**fields, new: fields[old]}
    if missing := [name for name in ("tokens", "total_lengths") if fields.get(name) is None]:
        raise InvalidInputError(f"there is no {' and no '.join(repr(name) for name in missing)} in it.")
    if fields.get("indices") is not None:
        raise InvalidInputError("indices would not be read: results are in the order of the microbatches.")
    unread = [name for name in ("position_ids", "attention_mask") if fields.get(name) is not None]
    if unread and options.forward is None:
        raise InvalidInputError(f"{listed(unread)} would not be read: pass a `forward` that reads them.")
    tokens_bs = fields["tokens"]
    if not isinstance(tokens_bs, torch.Tensor) or tokens_bs.dtype != torch.int64 or tokens_bs.dim() != 2:
        raise InvalidInputError(f"tokens are {described(tokens_bs)}. Expected: an int64 tensor [b, s].")
    size, width = tokens_bs.shape
    lengths = list(integers("total_lengths", fields["total_lengths"]))
    samples = _samples(tokens_bs, lengths, packing=options.forward is not None)
    responses = lengths if options.every_token else fields.get("response_lengths")
    if responses is None:
        responses = [length - 1 for length in lengths]
    how: dict[str, Any] = {"qkv_format": "bshd", "max_seq_lens": [width] * size}
    if len(lengths) > size:
        how = {"qkv_format": "thd", "padded_lengths": lengths, "num_rows": width}
    how |= {"cp_rank": limits.cp_rank, "cp_size": limits.cp_size, "device": limits.device}
    layout = SequenceLayout.build(lengths, responses, **how, own_rows=options.every_token)
    multiple = (2 * limits.cp_size if limits.cp_size > 1 else 1) * limits.sequence_parallel_size
    if width % multiple:
        raise InvalidInputError(
            f"tokens are {width} wide. Expected: a multiple of {multiple}: 2 × context-parallel size, if it "
            "is above 1, × tensor-parallel size, for sequence parallelism; pad them on the right."
        )
    if limits.positions is not None and width > limits.positions:
        expected = f"at most {limits.positions}, the positions of the model"
        raise InvalidInputError(f"tokens are {width} wide. Expected: {expected}.")
    # Vocabulary-parallel embeddings silently use zeros for such a token.
    if wrong := range_of_wrong_ids(tokens_bs, limits.vocabulary):
        raise InvalidInputError(
            f"token ids are {wrong}; is this the tokenizer of this model, and is the padding a valid token?"
        )
    return ScoringBatch(mapping, tokens_bs, samples, first, layout)


def _samples(tokens_bs: torch.Tensor, lengths: list[int], packing: bool) -> list[torch.Tensor]:
    """Return the tokens of each sample."""
    size, width = tokens_bs.shape
    if len(lengths) == size > 0 and all(0 < length <= width for length in lengths):
        return [row[:length] for row, length in zip(tokens_bs, lengths, strict=True)]
    if packing and size == 1 and lengths and min(lengths) > 0 and sum(lengths) <= width:
        return list(torch.split(tokens_bs[0, : sum(lengths)], lengths))
    raise InvalidInputError(
        f"total_lengths [{listed(lengths)}] do not fit tokens of shape [{size}, {width}]. Expected: one of 1 "
        f"to {width} for each row; with a `forward` of yours also several, of a single row, whose sum fits."
    )


def range_of_wrong_ids(ids: torch.Tensor, vocabulary: int | None) -> str:
    """Return lowest and highest id, and what was expected, if one is not of the vocabulary; else ""."""
    lowest, highest = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    if lowest >= 0 and (vocabulary is None or highest < vocabulary):
        return ""
    return f"{lowest} to {highest}. Expected: 0 to {'?' if vocabulary is None else vocabulary - 1}"


def described(value: Any) -> str:
    """Return dtype and shape of a tensor, or the type of anything else."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, torch.Tensor) else type(value).__name__


def data_of(batches: Sequence[ScoringBatch], options: ScoreOptions, is_last_stage: bool) -> dict[str, Any]:
    """Return what ranks that score the same samples must have in common, by name."""
    data: dict[str, Any] = {"function": options.function, "the number of microbatches": len(batches)}
    for number, tokens in enumerate(_digests([batch.tokens_bs for batch in batches])):
        layout = batches[number].layout
        lengths = {"total_lengths": layout.total_lengths, "response_lengths": layout.response_lengths}
        own = {"tokens": tokens, **lengths}
        data |= {f"{name} of microbatch {number}": value for name, value in own.items()}
    data |= {"temperature": float(options.temperature), "vocab_size": options.vocab_size}
    if is_last_stage:
        read = options.of_last_stage.items()
        data |= {name: _digests(x) if isinstance(x, Sequence) else x for name, x in read}
    return data


def _digests(ids: Sequence[torch.Tensor]) -> list[str]:
    """Return a text for each int64 tensor that depends on its shape, its values and their places."""
    sums = checksum(ids, stretch=8)
    return [f"{[*x.shape]} with checksum {n % 2**64:x}" for x, n in zip(ids, sums, strict=True)]
