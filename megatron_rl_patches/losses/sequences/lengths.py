"""Checks of the lengths of a microbatch's samples, and their lengths with padding.

All ranks of a context-parallel group pass the same lengths, so either all of them raise or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidInputError
from ..vocab.arguments import check_integer, integers

Lengths = tuple[int, ...]


def check_lengths(totals: Lengths, responses: Lengths, without_prompt: bool = False) -> None:
    """Check that every sample has one response, shorter than the sample unless it may be without a prompt."""
    if not totals or len(totals) != len(responses):
        raise InvalidInputError(
            f"there are {len(totals)} samples and {len(responses)} response_lengths; "
            "pass one per sample, for at least one sample"
        )
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if not 0 <= response < total + without_prompt:
            raise InvalidInputError(
                f"response_lengths: sample {sample} has {total} tokens and a response of {response}; "
                "a response is shorter than its sample, as its first token is predicted from the one before; "
                "keep a prompt token"
            )


def check_context_parallel(cp_rank: int, cp_size: int, allgather_cp: bool, qkv_format: str) -> None:
    if qkv_format not in ("thd", "bshd"):
        raise InvalidInputError(f"qkv_format is {qkv_format!r}; pass 'thd' (packed) or 'bshd' (padded)")
    size = check_integer("cp_size", cp_size, 1, "how many ranks the CP group has: 0 <= cp_rank < cp_size")
    check_integer("cp_rank", cp_rank, 0, f"0 <= cp_rank < cp_size, which is {size}", highest=size - 1)
    if allgather_cp and qkv_format != "thd":
        raise InvalidInputError(
            f"all-gather CP cuts one packed stream, so it needs qkv_format 'thd', not {qkv_format!r}; "
            "pack the samples, or use zigzag CP (allgather_cp=False)"
        )


def pad(
    totals: Lengths,
    max_seq_lens: Sequence[int] | None,
    padded_lengths: Sequence[int] | None,
    num_rows: int | None,
    *,
    qkv_format: str,
    cp_size: int,
    multiple: int,
) -> tuple[Lengths, tuple[int, int]]:
    """Return each sample's padded length, and the shape of one rank's logits without the vocabulary."""
    if qkv_format == "bshd":
        if max_seq_lens is None or padded_lengths is not None or num_rows is not None:
            raise InvalidInputError(
                "qkv_format 'bshd' needs max_seq_lens, and takes no padded_lengths and no num_rows"
            )
        maximum = integers("max_seq_lens", max_seq_lens)
        if len(maximum) != len(totals) or len(set(maximum)) != 1 or maximum[0] < max(totals):
            raise InvalidInputError(
                f"max_seq_lens are {list(maximum)} for samples of {list(totals)} tokens; "
                "pass the same length for every sample, no less than the longest"
            )
        length = _round_up(maximum[0], multiple)
        return (length,) * len(totals), (len(totals), length // cp_size)
    if max_seq_lens is not None:
        raise InvalidInputError("max_seq_lens are for qkv_format 'bshd'; for 'thd' pass padded_lengths")
    padded = tuple(_round_up(total, multiple) for total in totals)
    if padded_lengths is not None:
        padded = integers("padded_lengths", padded_lengths)
    if len(padded) != len(totals) or any(p < t or p % multiple for p, t in zip(padded, totals, strict=True)):
        raise InvalidInputError(
            f"padded_lengths are {list(padded)} for samples of {list(totals)} tokens; "
            f"pass one per sample, no less than its tokens and a multiple of {multiple}"
        )
    needed = _round_up(sum(padded), cp_size) // cp_size
    if num_rows is not None:
        check_integer("num_rows", num_rows, 0, "the rows of the logits of a rank")
    if num_rows is not None and num_rows < needed:
        raise InvalidInputError(
            f"num_rows is {num_rows}, but samples of {list(padded)} tokens, padding included, "
            f"take {needed} rows on each of {cp_size} CP rank(s)"
        )
    return padded, (1, needed if num_rows is None else num_rows)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
