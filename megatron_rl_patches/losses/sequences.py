"""Positions of the response tokens of a microbatch in the logits of one context-parallel rank.

The samples of a microbatch, each a prompt and a response, are either packed (``thd``): they follow one
another, each with its own padding, and padding ends the stream; or padded (``bshd``): each sample is a row of
the batch, and all rows have the same length. Context parallelism (CP) divides them in one of two ways:

* zigzag: of ``2 * cp_size`` chunks of a sample, rank ``r`` has the chunks ``r`` and ``2 * cp_size - 1 - r``,
  so that causal attention costs all ranks the same;
* all-gather (packed only): the whole stream is cut into ``cp_size`` contiguous pieces.

These are the layouts of slime (``cp_utils.py``, ``data.get_batch``), miles and verl (``mcore/util.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.devices import on_device
from ..errors import InvalidInputError
from .vocab.arguments import RowIndex, as_slices, check_instance, check_integer, check_lengths, integers


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Index vectors that map the response tokens of a microbatch to rows of the logits of one CP rank.

    :meth:`build` makes one for each microbatch and documents the attributes that are not listed here. The
    index vectors are int64 ``[n]``, of the ``n`` response tokens that this rank scores, sample by sample.

    Attributes:
        logits_shape: shape of this rank's logits without the vocabulary: ``(1, rows)`` or ``(batch, seq)``.
        response_rows: row of this rank's logits, ``[num_rows, vocab]``, that predicts each token.
        response_slices: the same rows as slices, which losses read without a copy; as numbers if runs of
            consecutive rows are short.
        response_index: position of each token in the concatenation of all full responses.
        local_lengths: for each sample, how many of its response tokens are among the ``n``.
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    cp_rank: int
    cp_size: int
    logits_shape: tuple[int, int]
    response_rows: Tensor
    response_slices: RowIndex
    response_index: Tensor
    local_lengths: tuple[int, ...]

    @classmethod
    def build(
        cls,
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        *,
        qkv_format: str = "thd",
        max_seq_lens: Sequence[int] | None = None,
        padded_lengths: Sequence[int] | None = None,
        num_rows: int | None = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        allgather_cp: bool = False,
        own_rows: bool = False,
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """Return the layout of a microbatch.

        All ranks of the CP group pass the same, except for ``cp_rank``. So where arguments do not fit
        together, :class:`InvalidInputError` is raised on every rank.

        Args:
            total_lengths: tokens of each sample, prompt and response.
            response_lengths: tokens of each response, which ends its sample and may be empty. The prompt has
                at least one token, from which the first response token is predicted.
            qkv_format: ``"thd"`` (packed) or ``"bshd"`` (padded), as Megatron calls them.
            max_seq_lens: required for ``bshd`` only: the length to which each sample is padded, the same for
                all. Zigzag CP rounds it up to a multiple of ``2 * cp_size``.
            padded_lengths: only for ``thd``: length of each sample with its padding, the difference of
                successive ``cu_seqlens_q_padded``. Default: the least that zigzag CP needs, else no padding.
            num_rows: only for ``thd``: rows of one rank's logits, ``logits.shape[1]``; by default the fewest
                that hold the samples. All-gather CP cuts the stream at its multiples.
            cp_rank: this rank in the CP group of ``cp_size`` ranks.
            allgather_cp: all-gather CP instead of zigzag CP.
            own_rows: ``response_rows`` are the rows of the response tokens themselves, as for value heads,
                and not those that predict them. A response may then be a whole sample.
            device: device of the logits, where the index vectors are put.
        """
        check_instance("own_rows", own_rows, bool)
        check_instance("allgather_cp", allgather_cp, bool)
        if qkv_format not in ("thd", "bshd"):
            raise InvalidInputError(f"qkv_format is {qkv_format!r}; pass 'thd' (packed) or 'bshd' (padded)")
        is_bshd = qkv_format == "bshd"
        size = check_integer("cp_size", cp_size, 1, "the size of the CP group: 0 <= cp_rank < cp_size")
        check_integer("cp_rank", cp_rank, 0, f"0 <= cp_rank < cp_size, which is {size}", highest=size - 1)
        if allgather_cp and is_bshd:
            raise InvalidInputError(
                "all-gather CP cuts a packed stream: use qkv_format 'thd', or zigzag CP (allgather_cp=False)"
            )
        totals = integers("total_lengths", total_lengths)
        responses = integers("response_lengths", response_lengths)
        total, response = _checked_lengths(totals, responses, without_prompt=own_rows)
        chunks = 2 * cp_size if cp_size > 1 and not allgather_cp else 1
        has_thd = padded_lengths is not None or num_rows is not None
        if (max_seq_lens is None) == is_bshd or (is_bshd and has_thd):
            raise InvalidInputError(
                "qkv_format 'bshd' needs max_seq_lens, and takes no padded_lengths and no num_rows; "
                "'thd' takes no max_seq_lens: pass padded_lengths"
            )
        lengths = max_seq_lens if is_bshd else padded_lengths
        padded, logits_shape = _padding(total, lengths, num_rows, is_bshd, cp_size, chunks)

        sample = torch.arange(len(responses), device="cpu").repeat_interleave(response)
        # Position in the sample of what predicts each token.
        first = total - (0 if own_rows else 1) - response.cumsum(0)
        position = torch.arange(len(sample), device="cpu") + first[sample]
        rank, row = _locate(sample, position, padded, chunks, logits_shape[0] * logits_shape[1])
        index = (rank == cp_rank).nonzero().squeeze(1)
        slices, rows = as_slices(row[index]), on_device(row[index], device)
        return cls(
            *(totals, responses, cp_rank, cp_size, logits_shape),
            response_rows=rows,
            response_slices=rows if isinstance(slices, Tensor) else slices,
            response_index=on_device(index, device),
            local_lengths=tuple(sample[index].bincount(minlength=len(responses)).tolist()),
        )

    @property
    def num_rows(self) -> int:
        """Rows of this rank's logits, padding included."""
        return self.logits_shape[0] * self.logits_shape[1]

    def rows_of(self, logits: Tensor) -> Tensor:
        """Return the model's logits, which must be of this layout, as ``[num_rows, vocab / tp]``."""
        check_instance("logits", logits)
        if tuple(logits.shape[:-1]) not in (self.logits_shape, (self.num_rows,)):
            raise InvalidInputError(
                f"logits are {list(logits.shape)}, but their layout is {list(self.logits_shape)} without the "
                "vocabulary: pass [batch, seq, vocab] of its lengths (padded at the end: num_rows=...)"
            )
        if logits.device != self.response_rows.device:
            devices = f"logits are on {logits.device}, their layout on {self.response_rows.device}"
            raise InvalidInputError(f"{devices}; pass device=logits.device to SequenceLayout.build")
        return logits.flatten(0, -2)

    def response_targets(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the token ids that ``response_rows`` predict, int64 ``[n]``.

        ``tokens`` are all whole samples, ``[total_length]`` each, since a token and the row that predicts it
        may stand on different ranks; other lengths raise :class:`InvalidInputError`.
        """
        return self.targets(tokens).index_select(0, self.response_index)

    def targets(self, tokens: Sequence[Tensor]) -> Tensor:
        """Return the response tokens of all samples in a row, also those that other ranks predict."""
        samples = self._checked("tokens", tokens, self.total_lengths, most=1)
        for sample in samples:
            if sample.dtype == torch.bool or sample.is_floating_point() or sample.is_complex():
                raise InvalidInputError(f"tokens are {sample.dtype}, expected torch.int64 [total_length]")
        pairs = zip(samples, self.total_lengths, self.response_lengths, strict=True)
        return torch.cat([sample[total - response :] for sample, total, response in pairs]).long()

    def split_responses(self, values: Tensor) -> list[Tensor]:
        """Split values ``[n, ...]`` of this rank's response tokens: ``[local_length, ...]`` per sample."""
        self._checked("values", [values], [len(self.response_index)])
        return list(torch.split(values, list(self.local_lengths)))

    def local_parts(self, responses: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's tokens of full responses ``[response_length, ...]``, such as loss masks."""
        whole = torch.cat(self._checked("responses", responses, self.response_lengths))
        return self.split_responses(whole.index_select(0, self.response_index))

    def gather_responses(
        self, values: Tensor | Sequence[Tensor], cp_group: dist.ProcessGroup | None = None
    ) -> list[Tensor]:
        """Return full responses, on every CP rank, from the values that each rank has for its own tokens.

        ``values`` are ``[n, ...]``, or one tensor per sample as :meth:`split_responses` returns them, of a
        floating or integer dtype, which the result ``[response_length, ...]`` per sample has, too. A group or
        values that do not fit the layout raise :class:`InvalidInputError` before the all-reduce.

        One all-reduce runs over ``cp_group``, and another one in backward if the values require grad. Ranks
        with tokens must agree on that; a placeholder of a rank without tokens need not require it. The
        gradient is that of the *sum* of all CP ranks' losses. The loss of every rank must depend on the
        result, be it on an empty slice, since the all-reduce in backward waits for all ranks.
        """
        self.check_group(cp_group)
        if isinstance(values, Tensor):
            self._checked("values", [values], [len(self.response_index)])
        else:
            values = torch.cat(self._checked("values", values, self.local_lengths))
        return list(torch.split(self.gathered(values, cp_group), list(self.response_lengths)))

    def gathered(self, values: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
        """Return what :meth:`gather_responses` does, without checks and in one tensor."""
        length = sum(self.response_lengths)
        if self.cp_size == 1 or length == 0:
            return values  # all ranks know this, so none of them waits in an all-reduce

        requires_grad = values.requires_grad and torch.is_grad_enabled()
        # The last row, one more, shows ranks without tokens whether the values of the others require grad.
        summed = values.new_zeros((length + 1, *values.shape[1:]))
        summed.index_copy_(0, self.response_index, values.detach())
        summed[length] = requires_grad and len(values) > 0
        dist.all_reduce(summed, group=cp_group)
        if not len(values):
            requires_grad = torch.is_grad_enabled() and bool(summed[length].any())
        result = summed[:length]
        if requires_grad:
            source = values if values.requires_grad else values.detach().requires_grad_()
            result = _Gathered.apply(source, result, self, cp_group)  # type: ignore[no-untyped-call]
        return result

    def _checked(self, name: str, values: Any, lengths: Sequence[int], most: int = 9) -> list[Tensor]:
        whose = f"the layout of CP rank {self.cp_rank} of {self.cp_size}"
        whose += f"; pass {name} and layout of the same microbatch"
        return check_lengths(name, values, lengths, whose, most=most)

    def check_group(self, cp_group: dist.ProcessGroup | None) -> None:
        """Raise :class:`InvalidInputError` if this is not the group that the layout was built for."""
        rank, size = (0, 1) if cp_group is None else (dist.get_rank(cp_group), dist.get_world_size(cp_group))
        if (rank, size) != (self.cp_rank, self.cp_size):
            actual = "cp_group is None" if cp_group is None else f"in cp_group this is rank {rank} of {size}"
            raise InvalidInputError(
                f"{actual}, but the layout is that of rank {self.cp_rank} of {self.cp_size} context-parallel "
                "ranks; pass cp_group, and build the layout with the rank and size of that group"
            )


class _Gathered(torch.autograd.Function):
    """Connects gathered responses with the values of this rank for backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gathered: Tensor, layout: SequenceLayout, group: Any) -> Tensor:
        ctx.index, ctx.group = layout.response_index, group
        return gathered.view_as(gathered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_gathered: Tensor) -> tuple[Tensor | None, ...]:
        grad_gathered = grad_gathered.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_gathered, group=ctx.group)
        return grad_gathered.index_select(0, ctx.index), None, None, None


def _checked_lengths(totals: Sequence[int], responses: Sequence[int], without_prompt: bool) -> Tensor:
    """Return both, ``[2, b]``; a response is shorter than its sample, unless that may be without a prompt."""
    if not totals or len(totals) != len(responses):
        numbers = f"there are {len(totals)} samples and {len(responses)} response_lengths"
        raise InvalidInputError(f"{numbers}; pass one per sample, for at least one sample")
    total, response = lengths = torch.tensor([totals, responses], device="cpu")
    wrong = ((response < 0) | (response >= total + without_prompt)).nonzero()
    if len(wrong):
        sample = int(wrong[0])
        raise InvalidInputError(
            f"response_lengths: sample {sample} has {totals[sample]} tokens and a response of "
            f"{responses[sample]}; expected 0 or more, after a prompt token, which predicts the first of them"
        )
    return lengths


def _padding(
    total: Tensor, lengths: Any, num_rows: int | None, is_bshd: bool, cp_size: int, multiple: int
) -> tuple[Tensor, tuple[int, int]]:
    """Return each sample's padded length, and the shape of one rank's logits without the vocabulary."""
    name, expected = "padded_lengths", f"one per sample, no less than its tokens and a multiple of {multiple}"
    if is_bshd:
        name, expected = "max_seq_lens", "the same length for every sample, no less than the longest"
    padded = -(-total // multiple) * multiple
    if lengths is not None:
        padded = torch.tensor(integers(name, lengths), device="cpu")
    fits = len(padded) == len(total) and not (padded < total).any()
    if not fits or (padded != padded[0] if is_bshd else padded % multiple).any():
        raise InvalidInputError(f"{name} are {padded.tolist()} for {total.tolist()} tokens; pass {expected}")
    if is_bshd:
        padded = -(-padded // multiple) * multiple
        return padded, (len(padded), int(padded[0]) // cp_size)
    needed = -(-int(padded.sum()) // cp_size)
    num_rows = needed if num_rows is None else num_rows
    if check_integer("num_rows", num_rows, 0, "the rows of the logits of a rank") < needed:
        raise InvalidInputError(
            f"num_rows is {num_rows}, but samples of {padded.tolist()} tokens, padding included, "
            f"take {needed} rows on each of {cp_size} CP rank(s)"
        )
    return padded, (1, num_rows)


def _locate(
    sample: Tensor, position: Tensor, padded: Tensor, chunks: int, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Return, for each token, the CP rank that has it and its row in the logits of that rank.

    Without zigzag CP, when ``chunks`` is 1, each rank has the next ``num_rows`` rows of the stream.
    """
    start = (padded.cumsum(0) - padded)[sample]
    if chunks == 1:
        return (start + position) // num_rows, (start + position) % num_rows
    chunk_length = padded[sample] // chunks
    chunk = position // chunk_length
    mirrored = chunks - 1 - chunk
    row = start // (chunks // 2) + (chunk > mirrored) * chunk_length + position % chunk_length
    return torch.minimum(chunk, mirrored), row
