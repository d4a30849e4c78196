"""Microbatches to score: what callers give, checked before any communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidInputError
from ..losses import SequenceLayout


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One microbatch after checking.

    Attributes:
        samples: tokens of each sample, whole and without padding.
        layout: which rows of this rank's logits predict response tokens.
    """

    given: Mapping[str, Any]
    tokens_bs: torch.Tensor
    samples: list[torch.Tensor]
    indices: list[int]
    layout: SequenceLayout

    @property
    def targets_n(self) -> torch.Tensor:
        """The tokens that the rows of the layout predict."""
        device = self.layout.response_rows.device
        return self.layout.response_targets([sample.to(device) for sample in self.samples])


def checked(
    given: Sequence[Mapping[str, Any]],
    *,
    packing: bool,
    vocabulary: int | None,
    sequence_parallel_size: int = 1,
    cp_rank: int = 0,
    cp_size: int = 1,
    device: torch.device | str = "cpu",
) -> list[Microbatch]:
    """Check what :func:`~megatron_rl_patches.inference.forward_log_probs` was given.

    Args:
        given: the microbatches.
        packing: may several samples stand in one row?
        vocabulary: token ids must be smaller; ``None`` if nobody knows.
        sequence_parallel_size: ranks of the tensor-parallel group that share the sequence too.
        cp_rank: of the ranks among which zigzag context parallelism cuts the sequences.
        cp_size: how many these are.
        device: where the logits will be.
    """
    if not given:
        raise InvalidInputError("there are no microbatches to score: give every rank one at least.")
    microbatches: list[Microbatch] = []
    count = 0
    for number, mapping in enumerate(given):
        try:
            microbatch = _microbatch(
                mapping, count, packing, {"cp_rank": cp_rank, "cp_size": cp_size, "device": device}
            )
            _check_tokens(microbatch.tokens_bs, vocabulary, sequence_parallel_size, cp_size)
        except InvalidInputError as error:
            raise InvalidInputError(f"microbatch {number}: {error}") from None
        microbatches.append(microbatch)
        count += len(microbatch.indices)
    indices = [index for microbatch in microbatches for index in microbatch.indices]
    if sorted(indices) != list(range(count)):
        raise InvalidInputError(
            f"indices {_few(indices)} are no permutation of 0 to {count - 1}: give each of the {count} "
            "samples its own position in the result, in all microbatches or in none."
        )
    return microbatches


def _microbatch(
    given: Mapping[str, Any], first_index: int, packing: bool, context_parallel: dict[str, Any]
) -> Microbatch:
    if missing := [name for name in ("tokens", "lengths") if given.get(name) is None]:
        raise InvalidInputError(f"there is no {' and no '.join(repr(name) for name in missing)} in it.")
    tokens_bs = given["tokens"]
    if not isinstance(tokens_bs, torch.Tensor) or tokens_bs.dtype != torch.int64 or tokens_bs.dim() != 2:
        found = getattr(tokens_bs, "dtype", type(tokens_bs).__name__), list(getattr(tokens_bs, "shape", ()))
        raise InvalidInputError(f"tokens are {found[0]} {found[1]}. Expected: an int64 tensor [b, s].")
    lengths = _integers(given["lengths"])
    starts = _starts(lengths, tokens_bs.shape[0], tokens_bs.shape[1], packing)
    responses = _integers(_or(given.get("response_lengths"), [length - 1 for length in lengths]))
    if len(responses) != len(lengths) or any(
        not 0 <= response < length for response, length in zip(responses, lengths, strict=True)
    ):
        raise InvalidInputError(
            f"response_lengths {_few(responses)} do not fit lengths {_few(lengths)}. Expected: one for each "
            "sample, at most its length - 1, as nothing predicts its first token."
        )
    indices = _integers(_or(given.get("indices"), range(first_index, first_index + len(lengths))))
    if len(indices) != len(lengths):
        raise InvalidInputError(f"there are {len(indices)} indices for {len(lengths)} samples.")
    size, width = tokens_bs.shape
    samples = [
        tokens_bs.flatten()[start : start + length] for start, length in zip(starts, lengths, strict=True)
    ]
    padding: dict[str, Any] = {"qkv_format": "bshd", "max_seq_lens": [width] * size}
    if len(lengths) > size:
        padding = {"qkv_format": "thd", "padded_lengths": lengths, "num_rows": width}
    layout = SequenceLayout.build(lengths, responses, **padding, **context_parallel)
    return Microbatch(given, tokens_bs, samples, indices, layout)


def _starts(lengths: list[int], size: int, width: int, packing: bool) -> list[int]:
    """Where each sample starts in the flattened tokens."""
    if len(lengths) == size > 0 and all(0 < length <= width for length in lengths):
        return [sample * width for sample in range(size)]
    if packing and size == 1 and lengths and min(lengths) > 0 and sum(lengths) <= width:
        return [sum(lengths[:sample]) for sample in range(len(lengths))]
    raise InvalidInputError(
        f"lengths {_few(lengths)} do not fit tokens of shape [{size}, {width}]. Expected: one "
        f"of 1 to {width} for each row; with a `forward` of yours, also several that add up to no more, "
        "for a single row."
    )


def _check_tokens(
    tokens_bs: torch.Tensor, vocabulary: int | None, sequence_parallel_size: int, cp_size: int
) -> None:
    chunks = 2 * cp_size if cp_size > 1 else 1
    multiple = chunks * sequence_parallel_size
    if tokens_bs.shape[1] % multiple:
        reasons = [f"2 × context-parallel size {cp_size}"] * (cp_size > 1)
        reasons += [f"tensor-parallel size {sequence_parallel_size}, for sequence parallelism"] * (
            sequence_parallel_size > 1
        )
        raise InvalidInputError(
            f"tokens are {tokens_bs.shape[1]} wide. Expected: a multiple of {multiple} "
            f"({' × '.join(reasons)}); pad them on the right."
        )
    lowest, highest = (int(extreme) for extreme in torch.aminmax(tokens_bs))
    # Vocabulary-parallel embeddings take such a token for zeros, and do not say so.
    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
        raise InvalidInputError(
            f"token ids are {lowest} to {highest}. Expected: 0 to "
            f"{'?' if vocabulary is None else vocabulary - 1}; is this the tokenizer of this model, and is "
            "the padding a valid token?"
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _integers(values: Any) -> list[int]:
    return [int(value) for value in (values.tolist() if isinstance(values, torch.Tensor) else values)]


def _few(values: list[int]) -> str:
    return f"{values[:10]}{' ...' if len(values) > 10 else ''}"
