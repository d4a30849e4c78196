"""``DotProductAttention`` of ``sbhd``, ``bshd`` and packed ``thd`` batches, with scores in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import TransformerEngineBaseModule
from .refusals import refuse

_CAUSAL = ("causal", "causal_bottom_right")
_MASKS = {"no_mask", "arbitrary", "padding", *_CAUSAL, *(f"padding_{name}" for name in _CAUSAL)}


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of ``DotProductAttention``, named as in TransformerEngine."""

    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    sequence_parallel: bool = False
    tp_size: int = 1
    tp_group: Any = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    layer_number: int | None = None
    attention_type: str = "self"
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
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
    max_seqlen_q: Any = None  # kernels want it
    max_seqlen_kv: Any = None
    pad_between_seqs: Any = None
    num_splits: int | None = 1
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

    def samples(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of queries and of keys that each packed sample has; padding lies between them."""
        q_starts = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        kv_starts = self.cu_seqlens_kv if self.cu_seqlens_kv_padded is None else self.cu_seqlens_kv_padded
        lengths = zip(self.cu_seqlens_q.diff().tolist(), self.cu_seqlens_kv.diff().tolist(), strict=True)
        for (m, n), s, t in zip(lengths, q_starts.tolist(), kv_starts.tolist(), strict=False):
            yield slice(s, s + m), slice(t, t + n)

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


class DotProductAttention(TransformerEngineBaseModule):
    """Attention, in which groups of queries may share keys."""

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int], **options: Any) -> None:
        super().__init__()
        self._options = made = AttentionOptions(**options)
        if made.softmax_type != "vanilla":
            refuse(f"softmax_type {made.softmax_type!r}")
        if made.return_max_logit:
            refuse("return_max_logit (qk_clip, log_max_attention_logit)")
        self.tp_size = made.tp_size if made.tp_group is None else made.tp_group.size()
        self.set_tensor_parallel_group(made.tp_group)
        self.qkv_format, self.attn_mask_type, self.window_size = (
            made.qkv_format,
            made.attn_mask_type,
            made.window_size,
        )
        self.layer_number, self.attention_type = made.layer_number, made.attention_type
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.hidden_size_per_attention_head_k = channels
        self.num_gqa_groups = made.num_gqa_groups or num_attention_heads
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        self.softmax_scale = made.softmax_scale or 1 / math.sqrt(channels)
        self.set_context_parallel_group(
            made.cp_group, made.cp_global_ranks, made.cp_stream, made.cp_comm_type
        )

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any, cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        """Refuse context parallelism over more than one rank."""
        groups = cp_group if isinstance(cp_group, list) else [cp_group]
        if any(group is not None and group.size() > 1 for group in groups):
            refuse("context parallelism (context_parallel_size)")
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        **arguments: Any,
    ) -> Tensor:
        """Return ``[..., heads * channels]`` of queries, keys and values ``[..., heads, channels]``."""
        own = {name: getattr(self, name) for name in ("qkv_format", "attn_mask_type", "window_size")}
        given = {name: value for name, value in arguments.items() if value is not None}
        batch = _Batch(attention_mask=attention_mask, **{**own, **given})
        qkv = query_layer, key_layer, value_layer
        if key_layer.shape[-2] != self.num_gqa_groups_per_partition:
            raise AssertionError(
                f"keys have {key_layer.shape[-2]} heads; expected {self.num_gqa_groups_per_partition}"
            )
        if batch.qkv_format == "thd":
            out = self._packed(qkv, batch)
        else:
            dim = batch.qkv_format.index("b")
            by_sample = [
                self._attend((q, k, v), batch, batch.mask_of(index), index)
                for index, (q, k, v) in enumerate(zip(*(x.unbind(dim) for x in qkv), strict=True))
            ]
            out = torch.stack(by_sample, dim)
        return out.flatten(-2)

    def _packed(self, qkv: tuple[Tensor, Tensor, Tensor], batch: _Batch) -> Tensor:
        q, k, v = qkv
        parts, end = [], 0
        for rows, keys in batch.samples():
            parts += [
                v.new_zeros(rows.start - end, q.shape[1], v.shape[-1]),  # padding
                self._attend((q[rows], k[keys], v[keys]), batch, None, 0),
            ]
            end = rows.stop
        parts.append(v.new_zeros(len(q) - end, q.shape[1], v.shape[-1]))
        return torch.cat(parts)

    def _attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], batch: _Batch, mask: Tensor | None, index: int
    ) -> Tensor:
        """Return the attention of one sample: ``[queries, heads, channels]``."""
        q, k, v = qkv
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores_hst = torch.einsum("shd,thd->hst", q.float(), k.float()) * self.softmax_scale
        if batch.core_attention_bias is not None:
            bias = batch.core_attention_bias
            scores_hst = scores_hst + bias[min(index, len(bias) - 1)]
        hidden_st = _hidden(len(q), len(k), batch.attn_mask_type, batch.window_size)
        scores_hst = scores_hst.masked_fill(hidden_st if mask is None else hidden_st | mask, -math.inf)
        # A query that sees no key is padding, and gets zeros.
        weights_hst = scores_hst.softmax(-1).nan_to_num(0.0)
        if self.training and self._options.attention_dropout:
            tracker = self._options.get_rng_state_tracker
            with nullcontext() if tracker is None else tracker().fork():
                weights_hst = torch.nn.functional.dropout(weights_hst, self._options.attention_dropout)
        return torch.einsum("hst,thd->shd", weights_hst.to(v.dtype), v)


def _hidden(queries: int, keys: int, mask_type: str, window: tuple[int, int] | None) -> Tensor:
    """Return which keys lie after a query, or outside of its window, ``[queries, keys]``; -1 is no limit."""
    left, right = window or (-1, -1)
    if "causal" in mask_type:
        right = 0
    ahead_st = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    if "bottom_right" in mask_type:
        ahead_st = ahead_st - (keys - queries)
    hidden_st = torch.zeros_like(ahead_st, dtype=torch.bool)
    if right >= 0:
        hidden_st |= ahead_st > right
    if left >= 0:
        hidden_st |= ahead_st < -left
    return hidden_st
