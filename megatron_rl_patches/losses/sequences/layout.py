"""Positions of the response tokens of a microbatch in the logits of one context-parallel rank.

The samples of a microbatch, each a prompt and a response, reach the model in one of two layouts:

* packed (``thd``): the samples follow one another, each with its own padding, and padding ends the stream;
* padded (``bshd``): each sample is a row of the batch, and all rows have the same length.

Context parallelism (CP) divides them in one of two ways:

* zigzag: each sample is cut into ``2 * cp_size`` chunks of the same length. Rank ``r`` has the chunks ``r``
  and ``2 * cp_size - 1 - r``, so that causal attention costs all ranks the same;
* all-gather (packed only): the whole stream is cut into ``cp_size`` contiguous pieces.

These are the layouts of slime (``cp_utils.py``, ``data.get_batch``), miles and verl (``mcore/util.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...common.devices import on_device
from ...errors import InvalidInputError
from ..vocab.arguments import RowIndex, as_slices, check_instance, check_list, integers
from .lengths import check_context_parallel, check_lengths, pad


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """Index vectors that map the response tokens of a microbatch to rows of the logits of one CP rank.

    :meth:`build` makes one for each microbatch and documents the attributes that are not listed here. This
    rank computes the log-probs of ``n`` response tokens. The index vectors are int64 ``[n]``, ordered by
    sample and then by position in the response.

    Attributes:
        logits_shape: shape of this rank's logits without the vocabulary: ``(1, rows)`` or ``(batch, seq)``.
        response_rows: row of this rank's logits, ``[num_rows, vocab]``, that predicts each token.
        response_slices: the same rows as slices, which losses read without a copy; as numbers if runs of
            consecutive rows are short.
        samples: sample to which each token belongs.
        positions: position of each token in the response of its sample.
        response_index: position of each token in the concatenation of all full responses.
        local_lengths: for each sample, how many of its response tokens are among the ``n``.
    """

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    cp_rank: int
    cp_size: int
    allgather_cp: bool
    logits_shape: tuple[int, int]
    response_rows: torch.Tensor
    response_slices: RowIndex
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
        own_rows: bool = False,
        device: torch.device | str = "cpu",
    ) -> SequenceLayout:
        """Return the layout of a microbatch. All ranks of the CP group pass the same, except for ``cp_rank``.

        Args:
            total_lengths: tokens of each sample, prompt and response.
            response_lengths: tokens of each response, which ends its sample. A response may be empty. The
                prompt has at least one token, from which the first response token is predicted.
            qkv_format: ``"thd"`` (packed) or ``"bshd"`` (padded), as Megatron calls them.
            max_seq_lens: only for ``bshd``, and required there: the length to which each sample is padded,
                the same for all. Zigzag CP rounds it up to a multiple of ``2 * cp_size``.
            padded_lengths: only for ``thd``: length of each sample with its padding, the difference of
                successive ``cu_seqlens_q_padded``. By default samples are padded to multiples of
                ``2 * cp_size`` for zigzag CP and not at all otherwise.
            num_rows: only for ``thd``: rows of one rank's logits, ``logits.shape[1]``; by default the fewest
                that hold the samples. All-gather CP cuts the stream at its multiples.
            cp_rank: this rank in the CP group.
            cp_size: number of ranks in the CP group.
            allgather_cp: all-gather CP instead of zigzag CP.
            own_rows: ``response_rows`` are the rows of the response tokens themselves, as value heads need
                them, and not those that predict them. A response may then be a whole sample.
            device: device of the logits, where the index vectors are put.

        Raises:
            InvalidInputError: the arguments do not fit together; raised on every rank of the CP group.
        """
        for name, flag in {"own_rows": own_rows, "allgather_cp": allgather_cp}.items():
            check_instance(name, flag, bool)
        totals = integers("total_lengths", total_lengths)
        responses = integers("response_lengths", response_lengths)
        check_lengths(totals, responses, without_prompt=own_rows)
        check_context_parallel(cp_rank, cp_size, allgather_cp, qkv_format)
        chunks = 2 * cp_size if cp_size > 1 and not allgather_cp else 1
        lengths = max_seq_lens, padded_lengths, num_rows
        padded, logits_shape = pad(totals, *lengths, qkv_format=qkv_format, cp_size=cp_size, multiple=chunks)

        # On the CPU, since nonzero() would wait for a GPU.
        length = torch.tensor(responses, device="cpu")
        sample = torch.arange(len(responses), device="cpu").repeat_interleave(length)
        position = torch.arange(sum(responses), device="cpu") - _starts(length)[sample]
        prompt = torch.tensor(totals, device="cpu") - length
        predictor = prompt[sample] + position - (0 if own_rows else 1)  # position in the sample
        num_rows = logits_shape[0] * logits_shape[1]
        rank, row = _locate(sample, predictor, torch.tensor(padded, device="cpu"), chunks, num_rows)
        index = (rank == cp_rank).nonzero().squeeze(1)
        slices = as_slices(row[index])
        return cls(
            *(totals, responses, cp_rank, cp_size, allgather_cp, logits_shape),
            response_rows=on_device(row[index], device),
            response_slices=on_device(slices, device) if isinstance(slices, torch.Tensor) else slices,
            samples=on_device(sample[index], device),
            positions=on_device(position[index], device),
            response_index=on_device(index, device),
            local_lengths=tuple(sample[index].bincount(minlength=len(responses)).tolist()),
        )

    @property
    def num_rows(self) -> int:
        """Rows of this rank's logits, padding included."""
        return self.logits_shape[0] * self.logits_shape[1]

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits as ``[num_rows, vocab / tp]``.

        Logits of another shape, or on another device, raise :class:`InvalidInputError`.
        """
        check_instance("logits", logits)
        if tuple(logits.shape[:-1]) not in (self.logits_shape, (self.num_rows,)):
            raise InvalidInputError(
                f"logits are {list(logits.shape)}, but their layout is {list(self.logits_shape)} without the "
                "vocabulary: pass [batch, seq, vocab] of the lengths that it was built for (for packed "
                "samples that are padded at the end, num_rows=logits.shape[1])"
            )
        if logits.device != self.response_rows.device:
            raise InvalidInputError(
                f"logits are on {logits.device}, their layout on {self.response_rows.device}; "
                "pass device=logits.device to SequenceLayout.build"
            )
        return logits.flatten(0, -2)

    def response_targets(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the token ids that ``response_rows`` predict, int64 ``[n]``.

        ``tokens`` are all whole samples, ``[total_length]`` each (slime's ``unconcat_tokens``), since a token
        and the row that predicts it may stand on different ranks; other lengths raise
        :class:`InvalidInputError`.
        """
        return self.targets(tokens).index_select(0, self.response_index).long()

    def targets(self, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the response tokens of all samples in a row, also those that other ranks predict."""
        self._check_lengths_of("tokens", tokens, self.total_lengths)
        for sample in tokens:
            dtype = sample.dtype
            if sample.dim() != 1 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
                raise InvalidInputError(
                    f"tokens are {sample.dtype} {list(sample.shape)}, expected torch.int64 [total_length]"
                )
        pairs = zip(tokens, self.response_lengths, strict=True)
        return torch.cat([sample.narrow(0, len(sample) - length, length) for sample, length in pairs])

    def split_responses(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split values of this rank's response tokens ``[n, ...]`` into ``[local_length, ...]`` per sample.

        Another number of values raises :class:`InvalidInputError`.
        """
        check_instance("values", values)
        if values.dim() == 0 or len(values) != len(self.response_index):
            raise InvalidInputError(
                f"values are {list(values.shape)}; CP rank {self.cp_rank} of {self.cp_size} has "
                f"{len(self.response_index)} response tokens: pass one value for each of response_rows"
            )
        return list(torch.split(values, list(self.local_lengths)))

    def local_parts(self, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tokens of this rank out of full responses, ``[local_length, ...]`` per sample.

        ``responses`` are ``[response_length, ...]`` per sample, such as loss masks or advantages; other
        lengths raise :class:`InvalidInputError`.
        """
        self._check_lengths_of("responses", responses, self.response_lengths)
        return self.split_responses(torch.cat(list(responses)).index_select(0, self.response_index))

    def to_zigzag(self, responses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tokens that this rank has under zigzag CP with the least padding, one tensor per sample.

        ``responses`` are those of :meth:`local_parts`. slime runs the model under all-gather CP and
        everything after it under zigzag CP: ``layout.to_zigzag(layout.gather_responses(log_probs,
        cp_group))``.
        """
        zigzag = self
        if self.allgather_cp:
            cp: dict[str, Any] = {"cp_rank": self.cp_rank, "cp_size": self.cp_size}
            device = self.response_index.device
            zigzag = SequenceLayout.build(self.total_lengths, self.response_lengths, device=device, **cp)
        return zigzag.local_parts(responses)

    def gather_responses(
        self, values: torch.Tensor | Sequence[torch.Tensor], cp_group: dist.ProcessGroup | None = None
    ) -> list[torch.Tensor]:
        """Return full responses, on every CP rank, from the values that each rank has for its own tokens.

        One all-reduce runs over ``cp_group``, and another one in backward if the values require grad. The
        gradient is that of the *sum* of all CP ranks' losses. The loss of every rank must depend on the
        result, be it on an empty slice, since the all-reduce in backward waits for all ranks.

        The result requires grad if and only if the values do; ranks with tokens must agree on that. A rank
        without tokens passes a placeholder, which need not require grad.

        Args:
            values: ``[n, ...]``, or one tensor per sample as :meth:`split_responses` returns them, of a
                floating or integer dtype.
            cp_group: the CP group; ``None`` if ``cp_size`` is 1.

        Returns:
            One tensor ``[response_length, ...]`` per sample, in the dtype of the values.

        Raises:
            InvalidInputError: the group or the values do not fit this layout; before the all-reduce.
        """
        self.check_group(cp_group)
        if not isinstance(values, torch.Tensor):
            self._check_lengths_of("values", values, self.local_lengths)
            values = torch.cat(list(values))
        parts = self.split_responses(values)
        length = sum(self.response_lengths)
        if self.cp_size == 1 or length == 0:
            return parts  # all ranks know this, so none of them waits in an all-reduce

        requires_grad = values.requires_grad and torch.is_grad_enabled()
        # The additional last row shows ranks without tokens whether the values of the others require grad.
        summed = values.new_zeros((length + 1, *values.shape[1:]))
        summed.index_copy_(0, self.response_index, values.detach())
        summed[length] = requires_grad and len(values) > 0
        dist.all_reduce(summed, group=cp_group)
        gathered = summed[:length]
        if not len(values):
            requires_grad = torch.is_grad_enabled() and bool(summed[length].any())
        if requires_grad:
            source = values if values.requires_grad else values.detach().requires_grad_()
            gathered = _Gathered.apply(source, gathered, self.response_index, cp_group)  # type: ignore[no-untyped-call]
        return list(torch.split(gathered, list(self.response_lengths)))

    def _check_lengths_of(self, name: str, tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
        values = check_list(name, tensors)
        sizes = [len(tensor) if tensor.dim() else 0 for tensor in values]
        if sizes != list(lengths):
            raise InvalidInputError(
                f"{name} have the lengths {sizes}, but {list(lengths)} in the layout of CP rank "
                f"{self.cp_rank} of {self.cp_size}; pass {name} and layout of the same microbatch"
            )

    def check_group(self, cp_group: dist.ProcessGroup | None) -> None:
        """Raise :class:`InvalidInputError` if this is not the group that the layout was built for."""
        if cp_group is None and self.cp_size > 1:
            raise InvalidInputError(f"the layout is for {self.cp_size} context-parallel ranks; pass cp_group")
        rank, size = (0, 1) if cp_group is None else (dist.get_rank(cp_group), dist.get_world_size(cp_group))
        if (rank, size) != (self.cp_rank, self.cp_size):
            raise InvalidInputError(
                f"in cp_group this is rank {rank} of {size}, but the layout was built for rank "
                f"{self.cp_rank} of {self.cp_size}; build it with the rank and size of the group"
            )


class _Gathered(torch.autograd.Function):
    """Connects gathered responses with the values of this rank for backward."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, gathered: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.group = group
        return gathered.view_as(gathered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_gathered: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad_gathered = grad_gathered.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad_gathered, group=ctx.group)
        return grad_gathered.index_select(0, index), None, None, None


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.cumsum(0) - lengths


def _locate(
    sample: torch.Tensor, position: torch.Tensor, padded: torch.Tensor, chunks: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each token, the CP rank that has it and its row in the logits of that rank.

    A token is known by its sample and its position there, each sample by its padded length. ``chunks`` is 1
    without zigzag CP, when each rank has the next ``num_rows`` rows of the stream.
    """
    start = _starts(padded)[sample]
    if chunks == 1:
        return (start + position) // num_rows, (start + position) % num_rows
    chunk_length = padded[sample] // chunks
    chunk = position // chunk_length
    mirrored = chunks - 1 - chunk
    row = start // (chunks // 2) + (chunk > mirrored) * chunk_length + position % chunk_length
    return torch.minimum(chunk, mirrored), row
