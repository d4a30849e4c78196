"""``DotProductAttention`` of ``sbhd``, ``bshd`` and packed ``thd`` batches, with scores in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import communication
from .base import TransformerEngineBaseModule
from .refusals import refuse
from .rope import positions_of

_CAUSAL = ("causal", "causal_bottom_right")
_MASKS = {"no_mask", "arbitrary", "padding", *_CAUSAL, *(f"padding_{name}" for name in _CAUSAL)}

#: Arguments that matter to kernels alone.
_OF_KERNELS = {
    *("sequence_parallel", "layer_number", "attention_type", "cp_global_ranks", "cp_stream"),
    *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs", "num_splits"),
}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of ``DotProductAttention``, named as in TransformerEngine."""

    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    tp_size: int = 1
    tp_group: Any = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    cp_group: Any = None
    cp_comm_type: str = "p2p"
    softmax_scale: float | None = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Arguments of a call besides queries, keys and values."""

    attention_mask: Any = None
    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Any = None
    inference_params: Any = None
    checkpoint_core_attention: bool = False
    fp8_output: bool = False

    def __post_init__(self) -> None:
        if self.attn_mask_type not in _MASKS:
            raise AssertionError(
                f"attn_mask_type is {self.attn_mask_type!r}; expected one of {sorted(_MASKS)}"
            )
        if self.qkv_format not in ("sbhd", "bshd", "thd"):
            raise AssertionError(f"qkv_format is {self.qkv_format!r}; expected sbhd, bshd or thd")
        if self.qkv_format == "thd" and "padding" not in self.attn_mask_type:
            raise AssertionError(
                f"attn_mask_type is {self.attn_mask_type!r}; packed batches need a padding one"
            )
        for name in ("alibi_slopes", "inference_params", "fp8_output", "checkpoint_core_attention"):
            if getattr(self, name):
                refuse(name)
        if self.core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            refuse(f"core_attention_bias_type {self.core_attention_bias_type!r}")

    def samples(self) -> Iterator[tuple[_Sample, _Sample]]:
        """Yield where queries and keys of each packed sample lie; padding follows a sample."""
        return zip(
            _samples(self.cu_seqlens_q, self.cu_seqlens_q_padded),
            _samples(self.cu_seqlens_kv, self.cu_seqlens_kv_padded),
            strict=True,
        )

    def mask_of(self, index: int) -> Tensor | None:
        """Return what a sample may not attend to, ``[1 or heads, 1 or queries, keys]``; ``None`` for all.

        Masks of padding are of keys, or a pair: of queries and of keys.
        """
        if self.attn_mask_type in ("no_mask", *_CAUSAL):
            return None
        if self.attention_mask is None:
            raise AssertionError(f"attn_mask_type {self.attn_mask_type!r} needs an attention_mask")
        mask: Tensor = (
            self.attention_mask[-1] if isinstance(self.attention_mask, tuple) else self.attention_mask
        )
        return mask[min(index, len(mask) - 1)]


def _without_kernels(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _OF_KERNELS}


def _without_extra_state(module: Any, keys: Any) -> None:
    """Let checkpoints do without the extra state of attention, as the real layer does."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if "core_attention._extra_state" not in key]


def _offset(softmax_type: str, heads: int) -> Tensor | None:
    zeros = torch.zeros(heads, device="cuda")
    if softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise AssertionError(f"softmax_type is {softmax_type!r}; expected vanilla, off-by-one or learnable")
    return {"vanilla": None, "off-by-one": zeros, "learnable": torch.nn.Parameter(zeros)}[softmax_type]


class _Sample(NamedTuple):
    start: int
    length: int
    slot: int  # length with padding


def _samples(edges: Tensor, padded: Tensor | None) -> Iterator[_Sample]:
    padded = edges if padded is None else padded
    lists = padded[:-1].tolist(), edges.diff().tolist(), padded.diff().tolist()
    yield from map(_Sample, *lists)


class DotProductAttention(TransformerEngineBaseModule):
    """Attention, in which groups of queries may share keys."""

    _peaks: list[Tensor]  # the largest scores of each head, by sample

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int], **options: Any) -> None:
        super().__init__()
        self._options = made = AttentionOptions(**_without_kernels(options))
        self.tp_size = made.tp_size if made.tp_group is None else made.tp_group.size()
        self.set_tensor_parallel_group(made.tp_group)
        self.qkv_format, self.attn_mask_type = made.qkv_format, made.attn_mask_type
        self.window_size = made.window_size
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.hidden_size_per_attention_head_k = channels
        self.num_gqa_groups = made.num_gqa_groups or num_attention_heads
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        self.softmax_offset = _offset(made.softmax_type, num_attention_heads // self.tp_size)
        self.softmax_scale = made.softmax_scale or 1 / math.sqrt(channels)
        self.set_context_parallel_group(made.cp_group, None, None, made.cp_comm_type)
        self.register_load_state_dict_post_hook(_without_extra_state)  # type: ignore[no-untyped-call]

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group over which sequences are cut; keys and values are gathered, whatever the type."""
        if isinstance(cp_group, list):
            refuse("hierarchical context parallelism (cp_comm_type 'a2a+p2p')")
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.cp_size = 1 if cp_group is None else cp_group.size()

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        **arguments: Any,
    ) -> Any:
        """Return ``[..., heads * channels]`` of queries, keys and values ``[..., heads, channels]``.

        With ``return_max_logit`` the largest score of each head is the second result.
        """
        own = {name: getattr(self, name) for name in ("qkv_format", "attn_mask_type", "window_size")}
        passed = {name: value for name, value in arguments.items() if value is not None}
        batch = _Batch(attention_mask=attention_mask, **own | _without_kernels(passed))
        qkv = query_layer, key_layer, value_layer
        if key_layer.shape[-2] != self.num_gqa_groups_per_partition:
            raise AssertionError(
                f"keys have {key_layer.shape[-2]} heads; expected {self.num_gqa_groups_per_partition}"
            )
        self._peaks = []
        if batch.qkv_format == "thd":
            out = self._packed(qkv, batch)
        else:
            dim = batch.qkv_format.index("b")
            by_sample = [
                self._attend(sample, self._places(*map(len, sample[:2])), batch, index)
                for index, sample in enumerate(zip(*(x.unbind(dim) for x in qkv), strict=True))
            ]
            out = torch.stack(by_sample, dim)
        if not self._options.return_max_logit:
            return out.flatten(-2)
        largest_h = torch.stack(self._peaks).amax(0)
        if self.cp_size > 1:
            dist.all_reduce(largest_h, dist.ReduceOp.MAX, group=self.cp_group)
        return out.flatten(-2), largest_h

    def _packed(self, qkv: tuple[Tensor, Tensor, Tensor], batch: _Batch) -> Tensor:
        """Attend in each sample. Every rank of the context parallel group has two pieces of each slot."""
        q, k, v = qkv
        parts, end = [], 0
        for of_q, of_k in batch.samples():
            start, rows = of_q.start // self.cp_size, of_q.slot // self.cp_size
            first, keys = of_k.start // self.cp_size, of_k.slot // self.cp_size
            sample = q[start : start + rows], k[first : first + keys], v[first : first + keys]
            places = self._places(rows, keys, of_q.length, of_k.length)
            parts += [v.new_zeros(start - end, q.shape[1], v.shape[-1])]
            parts += [self._attend(sample, places, batch, None)]
            end = start + rows
        parts.append(v.new_zeros(len(q) - end, q.shape[1], v.shape[-1]))
        return torch.cat(parts)

    def _places(
        self, queries: int, keys: int, q_length: int | None = None, k_length: int | None = None
    ) -> _Places:
        """Return where the queries of this rank and the keys of all ranks lie in a sample."""
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        pieces = torch.cat([positions_of(other, self.cp_size, keys) for other in range(self.cp_size)])
        q_length = queries * self.cp_size if q_length is None else q_length
        k_length = keys * self.cp_size if k_length is None else k_length
        return _Places(positions_of(rank, self.cp_size, queries), pieces, q_length, k_length)

    def _attend(
        self, sample: tuple[Tensor, Tensor, Tensor], places: _Places, batch: _Batch, index: int | None
    ) -> Tensor:
        """Return the attention of one sample of a batch, ``[queries, heads, channels]``."""
        q, k, v = sample
        if self.cp_size > 1:
            k, v = (communication.enter_column(x, self.cp_group, True) for x in (k, v))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores_hst = torch.einsum("shd,thd->hst", q.float(), k.float()) * self.softmax_scale
        hidden = places.hidden(batch.attn_mask_type, batch.window_size).to(q.device)
        if index is not None:
            mask, bias = batch.mask_of(index), batch.core_attention_bias
            if self.cp_size > 1 and (mask is not None or bias is not None):
                refuse("masks and biases with context parallelism")
            hidden = hidden if mask is None else hidden | mask
            scores_hst = scores_hst if bias is None else scores_hst + bias[min(index, len(bias) - 1)]
        scores_hst = scores_hst.masked_fill(hidden, -math.inf)
        if self._options.return_max_logit:
            self._peaks.append(scores_hst.detach().amax((1, 2)))
        if self.softmax_offset is not None:  # one more key, whose value is zero
            offset_hs1 = self.softmax_offset.float()[:, None, None].expand(-1, len(q), 1)
            scores_hst = torch.cat([scores_hst, offset_hs1], -1)
        # A query that sees no key is padding, and gets zeros.
        weights_hst = scores_hst.softmax(-1).nan_to_num(0.0)[..., : len(k)]
        if self.training and self._options.attention_dropout:
            tracker = self._options.get_rng_state_tracker
            with nullcontext() if tracker is None else tracker().fork():
                weights_hst = torch.nn.functional.dropout(weights_hst, self._options.attention_dropout)
        return torch.einsum("hst,thd->shd", weights_hst.to(v.dtype), v)


class _Places(NamedTuple):
    """Positions in a sample of the queries and keys of a product, and how many of each are no padding."""

    q_s: Tensor
    k_t: Tensor
    q_length: int
    k_length: int

    def hidden(self, mask_type: str, window: tuple[int, int] | None) -> Tensor:
        """Return which keys are padding, later than a query, or outside of its window; -1 is no limit."""
        left, right = window or (-1, -1)
        if "causal" in mask_type:
            right = 0
        ahead_st = self.k_t[None] - self.q_s[:, None]
        if "bottom_right" in mask_type:
            ahead_st = ahead_st - (self.k_length - self.q_length)
        hidden_st = (self.k_t >= self.k_length)[None] | (self.q_s >= self.q_length)[:, None]
        if right >= 0:
            hidden_st = hidden_st | (ahead_st > right)
        if left >= 0:
            hidden_st = hidden_st | (ahead_st < -left)
        return hidden_st
