"""Microbatches to score: parsed and checked before any communication."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...common.devices import on_device
from ...common.text import listed
from ...errors import InvalidInputError
from ...losses import SequenceLayout


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One microbatch after checking; ``fields`` is the mapping that the caller passed."""

    fields: Mapping[str, Any]
    tokens_bs: torch.Tensor
    #: Tokens of each sample, whole and without padding.
    samples: list[torch.Tensor]
    #: Position of each sample in the result.
    indices: list[int]
    #: Which rows of this rank's logits predict response tokens.
    layout: SequenceLayout

    @property
    def targets_n(self) -> torch.Tensor:
        """Tokens ``[n]`` that the ``n`` rows of the layout predict."""
        device = self.layout.response_rows.device
        return self.layout.response_targets([on_device(sample, device) for sample in self.samples])


@dataclass(frozen=True)
class Limits:
    """What the microbatches of a model on one rank must fit.

    Attributes:
        packing: whether one row may hold several samples.
        vocabulary: number of token ids, if it is known.
        sequence_parallel_size: size of the tensor-parallel group if it splits the sequence too, else 1.
        device: where the logits will be.
        every_token: the layouts have the rows of all tokens of each sample, in place of those that predict a
            response.
        positions: for how many positions the model has embeddings, if it looks positions up.
    """

    packing: bool
    vocabulary: int | None
    sequence_parallel_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    device: torch.device | str = "cpu"
    every_token: bool = False
    positions: int | None = None


def parse_microbatches(mappings: Sequence[Mapping[str, Any]], limits: Limits) -> list[Microbatch]:
    """Parse and check the microbatches of :func:`~megatron_rl_patches.inference.forward_log_probs`."""
    if isinstance(mappings, Mapping) or not isinstance(mappings, Sequence):
        raise InvalidInputError(
            f"microbatches are a {type(mappings).__name__}. Expected: a list of mappings, also for one."
        )
    if not mappings:
        raise InvalidInputError("there are no microbatches to score: pass at least one on every rank.")
    microbatches: list[Microbatch] = []
    count = 0
    for number, mapping in enumerate(mappings):
        try:
            microbatch = _microbatch(mapping, count, limits)
            _check_tokens(microbatch.tokens_bs, limits)
            if not limits.packing:  # else a function of the caller's reads them, in any form
                _check_what_the_model_reads(mapping, microbatch.tokens_bs, limits)
        except InvalidInputError as error:
            raise InvalidInputError(f"microbatch {number}: {error}") from None
        microbatches.append(microbatch)
        count += len(microbatch.indices)
    indices = [index for microbatch in microbatches for index in microbatch.indices]
    if sorted(indices) != list(range(count)):
        raise InvalidInputError(
            f"indices [{listed(indices)}] are no permutation of 0 to {count - 1}: pass for each of the "
            f"{count} samples its own position in the result, in all microbatches or in none."
        )
    return microbatches


def _microbatch(fields: Mapping[str, Any], first_index: int, limits: Limits) -> Microbatch:
    if not isinstance(fields, Mapping):
        raise InvalidInputError(f"it is a {type(fields).__name__}. Expected: a mapping with tokens.")
    if missing := [name for name in ("tokens", "lengths") if fields.get(name) is None]:
        raise InvalidInputError(f"there is no {' and no '.join(repr(name) for name in missing)} in it.")
    tokens_bs = fields["tokens"]
    if not isinstance(tokens_bs, torch.Tensor) or tokens_bs.dtype != torch.int64 or tokens_bs.dim() != 2:
        raise InvalidInputError(f"tokens are {described(tokens_bs)}. Expected: an int64 tensor [b, s].")
    size, width = tokens_bs.shape
    lengths = _integers("lengths", fields["lengths"])
    samples = _samples(tokens_bs, lengths, limits.packing)
    if limits.every_token:
        responses = lengths
    else:
        responses = _integers(
            "response_lengths", fields.get("response_lengths"), [length - 1 for length in lengths]
        )
    indices = _integers("indices", fields.get("indices"), [first_index + i for i in range(len(lengths))])
    if len(indices) != len(lengths):
        raise InvalidInputError(f"there are {len(indices)} indices for {len(lengths)} samples.")
    padding: dict[str, Any] = {"qkv_format": "bshd", "max_seq_lens": [width] * size}
    if len(lengths) > size:
        padding = {"qkv_format": "thd", "padded_lengths": lengths, "num_rows": width}
    layout = SequenceLayout.build(
        lengths,
        responses,
        own_rows=limits.every_token,
        cp_rank=limits.cp_rank,
        cp_size=limits.cp_size,
        device=limits.device,
        **padding,
    )
    return Microbatch(fields, tokens_bs, samples, indices, layout)


def _samples(tokens_bs: torch.Tensor, lengths: list[int], packing: bool) -> list[torch.Tensor]:
    """Return the tokens of each sample."""
    size, width = tokens_bs.shape
    if len(lengths) == size > 0 and all(0 < length <= width for length in lengths):
        return [row[:length] for row, length in zip(tokens_bs, lengths, strict=True)]
    if packing and size == 1 and lengths and min(lengths) > 0 and sum(lengths) <= width:
        return list(torch.split(tokens_bs[0, : sum(lengths)], lengths))
    raise InvalidInputError(
        f"lengths [{listed(lengths)}] do not fit tokens of shape [{size}, {width}]. Expected: one "
        f"of 1 to {width} for each row; with a `forward` of yours, also several that add up to no more, "
        "for a single row."
    )


def _check_tokens(tokens_bs: torch.Tensor, limits: Limits) -> None:
    cp_size, sequence_parallel_size = limits.cp_size, limits.sequence_parallel_size
    multiple = (2 * cp_size if cp_size > 1 else 1) * sequence_parallel_size
    if tokens_bs.shape[1] % multiple:
        reasons = [f"2 × context-parallel size {cp_size}"] if cp_size > 1 else []
        if sequence_parallel_size > 1:
            reasons.append(f"tensor-parallel size {sequence_parallel_size}, for sequence parallelism")
        raise InvalidInputError(
            f"tokens are {tokens_bs.shape[1]} wide. Expected: a multiple of {multiple} "
            f"({' × '.join(reasons)}); pad them on the right."
        )
    # Vocabulary-parallel embeddings silently use zeros for such a token.
    if wrong := range_of_wrong_ids(tokens_bs, limits.vocabulary):
        raise InvalidInputError(
            f"token ids are {wrong}; is this the tokenizer of this model, and is the padding a valid token?"
        )


def range_of_wrong_ids(ids: torch.Tensor, vocabulary: int | None) -> str:
    """Return lowest and highest id, and what was expected, if one is not of the vocabulary; else ""."""
    lowest, highest = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    if lowest >= 0 and (vocabulary is None or highest < vocabulary):
        return ""
    return f"{lowest} to {highest}. Expected: 0 to {'?' if vocabulary is None else vocabulary - 1}"


def _check_what_the_model_reads(fields: Mapping[str, Any], tokens_bs: torch.Tensor, limits: Limits) -> None:
    """Refuse what would raise within the model, on some pipeline stages only."""
    size, width = tokens_bs.shape
    ids, mask = fields.get("position_ids"), fields.get("attention_mask")
    if ids is None:
        ids = torch.arange(width)[None]
    is_integer = isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not is_integer or tuple(ids.shape) not in ((size, width), (1, width)):
        raise InvalidInputError(
            f"position_ids are {described(ids)}. Expected: an int64 tensor [{size}, {width}], as tokens are."
        )
    if wrong := range_of_wrong_ids(ids, limits.positions):
        raise InvalidInputError(f"position_ids are {wrong}, the positions of the model.")
    if mask is None:
        return
    allowed = ((1, size), (1,), (1, width), (width,))
    is_mask = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == len(allowed)
    if not is_mask or not all(n in of_dim for n, of_dim in zip(mask.shape, allowed, strict=True)):
        raise InvalidInputError(
            f"attention_mask is {described(mask)}. Expected: a bool tensor [{size}, 1, {width}, {width}], "
            "True where a token must not look."
        )


def described(value: Any) -> str:
    """Return dtype and shape of a tensor, or the type of anything else."""
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dtype} {list(value.shape)}" if is_tensor else type(value).__name__


def _integers(name: str, values: Any, default: list[int] | None = None) -> list[int]:
    if values is None and default is not None:
        return default
    try:
        return [operator.index(value) for value in getattr(values, "tolist", lambda: values)()]
    except TypeError:
        raise InvalidInputError(f"{name} are {values!r}. Expected: a list of integers.") from None
