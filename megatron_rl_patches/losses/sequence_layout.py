"""Where the response tokens of a microbatch stand in the logits of this context-parallel rank.

A microbatch of samples, each a prompt and a response, reaches the model in one of two layouts:

* packed (``thd``): the samples one after another, each with its own padding, then tail padding;
* padded (``bshd``): one row of the batch per sample, all of one length.

Context parallelism (CP) divides them in one of two ways:

* zigzag: every sample is cut into ``2 * cp_size`` equal chunks; rank ``r`` holds the chunks ``r`` and
  ``2 * cp_size - 1 - r`` of each, so that causal attention costs every rank the same;
* all-gather (packed only): the whole stream is cut into ``cp_size`` contiguous pieces.

These are the layouts of slime (``cp_utils.py``, ``data.get_batch``), miles and verl (``mcore/util.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidInputError
from ._lengths import (
    check_context_parallel,
    check_lengths,
    integers,
    padded_one_by_one,
    padded_to_one_length,
    rows_of_rank,
)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Index vectors from the response tokens of a microbatch to the logits rows of one CP rank.

    Made by :meth:`build`, once per microbatch. ``n`` is the number of response tokens whose log-prob this
    rank computes. The vectors are int64, ``[n]``, ordered by sample and then by position in the response.

    Attributes:
        response_rows: the row of this rank's logits, ``[num_rows, vocab]``, that predicts the token.
        samples: the sample to which the token belongs.
        positions: the token's position in the response of that sample.
        response_index: both as one: the token's position in the concatenation of all full responses.
        local_lengths: of each sample, how many of its response tokens are among the ``n``.
        logits_shape: of this rank's logits, without the vocabulary: ``(1, rows)`` or ``(batch, seq)``.
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    cp_rank: int
    cp_size: int
    allgather_cp: bool
    logits_shape: tuple[int, int]
    response_rows: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor
    response_index: torch.Tensor
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
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """Lay out a microbatch. Every rank of the CP group gives the same arguments, but for ``cp_rank``.

        Args:
            total_lengths: tokens of each sample, prompt and response.
            response_lengths: tokens of each response, the last ones of its sample; may be 0, and leaves at
                least one token of prompt, from which the first response token is predicted.
            qkv_format: ``"thd"`` (packed) or ``"bshd"`` (padded), as Megatron calls them.
            max_seq_lens: for ``bshd``: the length to which each sample is padded, the same for all. Zigzag CP
                rounds it up to a multiple of ``2 * cp_size``.
            padded_lengths: for ``thd``: the length of each sample with its own padding, the differences of
                ``cu_seqlens_q_padded``. By default, as in slime, samples are padded to multiples of
                ``2 * cp_size`` for zigzag CP and not at all otherwise.
            num_rows: for ``thd``: rows of one rank's logits, ``logits.shape[1]``; by default the fewest that
                hold the samples. With all-gather CP it also says where the stream is cut.
            cp_rank: rank in the CP group.
            cp_size: ranks in the CP group.
            allgather_cp: all-gather CP instead of zigzag CP.
            device: where the index vectors go; that of the logits.

        Raises:
            InvalidInputError: the arguments do not fit together; on every rank alike.
        """
        totals, responses = integers(total_lengths), integers(response_lengths)
        check_lengths(totals, responses)
        check_context_parallel(cp_rank, cp_size, allgather_cp, qkv_format)
        chunks = 2 * cp_size if cp_size > 1 and not allgather_cp else 1
        if qkv_format == "bshd":
            padded = padded_to_one_length(totals, max_seq_lens, padded_lengths, chunks)
            if num_rows is not None:
                raise InvalidInputError("num_rows is for qkv_format 'thd'; 'bshd' takes max_seq_lens only")
            logits_shape = (len(padded), padded[0] // cp_size)
        else:
            padded = padded_one_by_one(totals, max_seq_lens, padded_lengths, chunks)
            logits_shape = (1, rows_of_rank(padded, num_rows, cp_size))

        # On the CPU, where finding this rank's tokens does not wait for a device.
        length = torch.tensor(responses, device="cpu")
        sample = torch.arange(len(responses), device="cpu").repeat_interleave(length)
        position = torch.arange(sum(responses), device="cpu") - _starts(length)[sample]
        prompt = torch.tensor(totals, device="cpu") - length
        place = prompt[sample] + position - 1  # of the token from which this one is predicted
        num_rows = logits_shape[0] * logits_shape[1]
        rank, row = _locate(sample, place, torch.tensor(padded, device="cpu"), chunks, num_rows)
        index = (rank == cp_rank).nonzero().squeeze(1)
        return cls(
            total_lengths=totals,
            response_lengths=responses,
            cp_rank=cp_rank,
            cp_size=cp_size,
            allgather_cp=allgather_cp,
            logits_shape=logits_shape,
            response_rows=row[index].to(device),
            samples=sample[index].to(device),
            positions=position[index].to(device),
            response_index=index.to(device),
            local_lengths=integers(sample[index].bincount(minlength=len(responses)).tolist()),
        )

    @property
    def num_rows(self) -> int:
        """Rows of this rank's logits, padding included."""
        return self.logits_shape[0] * self.logits_shape[1]

    def response_targets(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Response tokens of this rank, ``[n]``, int64: what ``response_rows`` predict.

        A token and the row that predicts it may stand on different ranks; hence whole samples are needed.

        Args:
            tokens: whole samples, ``[total_length]`` each (slime's ``unconcat_tokens``).
        """
        self._check_lengths_of("tokens", tokens, self.total_lengths)
        responses = [
            sample.narrow(0, len(sample) - length, length)
            for sample, length in zip(tokens, self.response_lengths, strict=True)
        ]
        return torch.cat(responses).index_select(0, self.response_index).long()

    def shifted_targets(self, tokens: Sequence[torch.Tensor], ignore_index: int = -100) -> torch.Tensor:
        """What every row of this rank's logits predicts, ``[num_rows]``, int64.

        As :meth:`response_targets`, with ``ignore_index`` for the rows of prompts and padding.
        """
        targets = self.response_rows.new_full((self.num_rows,), ignore_index)
        return targets.index_copy_(0, self.response_rows, self.response_targets(tokens))

    def split_responses(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Values of this rank's response tokens, ``[n, ...]``, as one ``[local_length, ...]`` per sample."""
        if len(values) != len(self.response_index):
            raise InvalidInputError(
                f"values of {len(values)} tokens were given; CP rank {self.cp_rank} of {self.cp_size} has "
                f"{len(self.response_index)} response tokens: give one value for each of response_rows"
            )
        return list(torch.split(values, list(self.local_lengths)))

    def local_parts(self, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of full responses, ``[response_length, ...]`` per sample, the tokens of this rank.

        For what the host holds in full: loss masks, advantages, log-probs of the rollout.
        """
        self._check_lengths_of("responses", responses, self.response_lengths)
        return self.split_responses(torch.cat(list(responses)).index_select(0, self.response_index))

    def to_zigzag(self, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of full responses, the tokens that this rank has under zigzag CP with the least padding.

        For hosts that run the model under all-gather CP and all that comes after it under zigzag CP, as slime
        does: ``layout.to_zigzag(layout.gather_responses(log_probs, cp_group))``.
        """
        return self._zigzag.local_parts(responses)

    def gather_responses(
        self, values: torch.Tensor | Sequence[torch.Tensor], cp_group: dist.ProcessGroup | None = None
    ) -> list[torch.Tensor]:
        """Full responses, on every CP rank, of values that each rank has for its own tokens.

        One all-reduce over the CP group, and one more in backward if the values require grad. The gradient
        is that of the *sum* of all CP ranks' losses. Each of these must depend on the result, if only on an
        empty slice of it: backward waits for all ranks.

        The result requires grad exactly when the values do. What a rank without tokens has is a placeholder,
        which may say anything; it learns from the same all-reduce whether the others take part in backward
        (they must agree).

        Args:
            values: ``[n, ...]``, or per sample as from :meth:`split_responses`; floating or integer.
            cp_group: the CP group; not needed when ``cp_size`` is 1.

        Returns:
            ``[response_length, ...]`` per sample.

        Raises:
            InvalidInputError: the group or the values are not those of this layout.
        """
        self._check_group(cp_group)
        if not isinstance(values, torch.Tensor):
            self._check_lengths_of("values", values, self.local_lengths)
            values = torch.cat(list(values))
        parts = self.split_responses(values)
        length = sum(self.response_lengths)
        if self.cp_size == 1 or length == 0:
            return parts  # every rank knows that there is nothing to gather

        requires_grad = values.requires_grad and torch.is_grad_enabled()
        # One row more than tokens: in it, the ranks with tokens tell those without whether they require grad.
        summed = values.new_zeros((length + 1, *values.shape[1:]))
        summed.index_copy_(0, self.response_index, values.detach())
        summed[length] = requires_grad and len(values) > 0
        dist.all_reduce(summed, group=cp_group)
        full = summed[:length]
        if not len(values):
            requires_grad = torch.is_grad_enabled() and bool(summed[length].any())
        if requires_grad:
            leaf_or_values = values if values.requires_grad else values.detach().requires_grad_()
            full = _Gathered.apply(leaf_or_values, full, self.response_index, cp_group)  # type: ignore[no-untyped-call]
        return list(torch.split(full, list(self.response_lengths)))

    @cached_property
    def _zigzag(self) -> SequenceLayout:
        if not self.allgather_cp:
            return self
        return SequenceLayout.build(
            self.total_lengths,
            self.response_lengths,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            device=self.response_index.device,
        )

    def _check_lengths_of(self, name: str, given: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
        sizes = [len(tensor) for tensor in given]
        if sizes != list(lengths):
            raise InvalidInputError(
                f"{name} have the lengths {sizes}, but {list(lengths)} in the layout of CP rank "
                f"{self.cp_rank} of {self.cp_size}; give {name} and layout of the same microbatch"
            )

    def _check_group(self, cp_group: dist.ProcessGroup | None) -> None:
        if cp_group is None:
            if self.cp_size > 1:
                raise InvalidInputError(f"the layout is for {self.cp_size} CP ranks; give their cp_group")
            return
        rank, size = dist.get_rank(cp_group), dist.get_world_size(cp_group)
        if (rank, size) != (self.cp_rank, self.cp_size):
            raise InvalidInputError(
                f"in cp_group this is rank {rank} of {size}, but the layout was built for rank "
                f"{self.cp_rank} of {self.cp_size}; build it with the rank and size of the group"
            )


class _Gathered(torch.autograd.Function):
    """Ties gathered responses to the values of this rank; the gathering itself is done."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, full: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_full: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad_full = grad_full.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_full, group=ctx.group)
        return grad_full.index_select(0, index), None, None, None


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cumsum(0) - lengths


def _locate(
    sample: torch.Tensor, place: torch.Tensor, padded: torch.Tensor, chunks: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """CP rank and row there of the token at ``place`` in ``sample``.

    ``padded`` are lengths of samples, ``chunks`` is the chunks of each under zigzag CP, and 1 otherwise:
    then the rows follow one another from rank to rank, ``num_rows`` on each.
    """
    start = _starts(padded)[sample]
    if chunks == 1:
        return (start + place) // num_rows, (start + place) % num_rows
    chunk_length = padded[sample] // chunks
    chunk = place // chunk_length
    mirrored = chunks - 1 - chunk
    row = start // (chunks // 2) + (chunk > mirrored) * chunk_length + place % chunk_length
    return torch.minimum(chunk, mirrored), row
