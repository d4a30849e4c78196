"""Lengths of the samples of a microbatch: do they add up, and how long is each with its padding?

Every rank of a context-parallel group is given the same lengths, so either all of them raise or none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInputError

Lengths = tuple[int, ...]


def integers(lengths: Sequence[int]) -> Lengths:
    return tuple(int(length) for length in lengths)


def check_lengths(totals: Lengths, responses: Lengths) -> None:
    if not totals or len(totals) != len(responses):
        raise InvalidInputError(
            f"{len(totals)} total lengths and {len(responses)} response lengths were given; "
            "give one of each per sample, for at least one sample"
        )
    for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if not 0 <= response < total:
            raise InvalidInputError(
                f"sample {sample} has {total} tokens and a response of {response}; a response is shorter "
                "than its sample, as its first token is predicted from the one before; keep a prompt token"
            )


def check_context_parallel(cp_rank: int, cp_size: int, allgather_cp: bool, qkv_format: str) -> None:
    if qkv_format not in ("thd", "bshd"):
        raise InvalidInputError(f"qkv_format is {qkv_format!r}; give 'thd' (packed) or 'bshd' (padded)")
    if not 0 <= cp_rank < cp_size:
        raise InvalidInputError(f"cp_rank is {cp_rank} and cp_size {cp_size}; give 0 <= cp_rank < cp_size")
    if allgather_cp and qkv_format != "thd":
        raise InvalidInputError(
            f"all-gather CP cuts one packed stream, so it needs qkv_format 'thd', not {qkv_format!r}; "
            "pack the samples, or use zigzag CP (allgather_cp=False)"
        )


def padded_to_one_length(
    totals: Lengths,
    max_seq_lens: Sequence[int] | None,
    padded_lengths: Sequence[int] | None,
    multiple: int,
) -> Lengths:
    """Padded lengths for ``bshd``: the same for all samples, rounded up to ``multiple``."""
    if max_seq_lens is None or padded_lengths is not None:
        raise InvalidInputError("qkv_format 'bshd' needs max_seq_lens, and takes no padded_lengths")
    maximum = integers(max_seq_lens)
    if len(maximum) != len(totals) or len(set(maximum)) != 1 or maximum[0] < max(totals):
        raise InvalidInputError(
            f"max_seq_lens are {list(maximum)} for samples of {list(totals)} tokens; "
            "give the same length for every sample, no less than the longest"
        )
    return tuple(round_up(length, multiple) for length in maximum)


def padded_one_by_one(
    totals: Lengths,
    max_seq_lens: Sequence[int] | None,
    padded_lengths: Sequence[int] | None,
    multiple: int,
) -> Lengths:
    """Padded lengths for ``thd``: those given, or each sample rounded up to ``multiple``."""
    if max_seq_lens is not None:
        raise InvalidInputError("max_seq_lens are for qkv_format 'bshd'; for 'thd' give padded_lengths")
    if padded_lengths is None:
        return tuple(round_up(total, multiple) for total in totals)
    padded = integers(padded_lengths)
    if len(padded) != len(totals) or any(p < t or p % multiple for p, t in zip(padded, totals, strict=True)):
        raise InvalidInputError(
            f"padded_lengths are {list(padded)} for samples of {list(totals)} tokens; "
            f"give one per sample, no less than its tokens and a multiple of {multiple}"
        )
    return padded


def rows_of_rank(padded: Lengths, num_rows: int | None, cp_size: int) -> int:
    """Rows of a packed stream on one rank: ``num_rows``, or the fewest that hold all samples."""
    needed = round_up(sum(padded), cp_size) // cp_size
    if num_rows is not None and num_rows < needed:
        raise InvalidInputError(
            f"num_rows is {num_rows}, but samples of {list(padded)} tokens, padding included, "
            f"take {needed} rows on each of {cp_size} CP rank(s)"
        )
    return needed if num_rows is None else num_rows


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
