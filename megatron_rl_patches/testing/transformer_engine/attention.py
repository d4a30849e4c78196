"""``DotProductAttention`` of ``sbhd``, ``bshd`` and packed ``thd`` batches, with scores in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import communication
from .base import TransformerEngineBaseModule
from .refusals import refuse
from .rope import positions_of

_CAUSAL = ("causal", "causal_bottom_right")

#: Arguments that matter to kernels alone.
_OF_KERNELS = {
    *("layer_number", "attention_type", "cp_global_ranks", "cp_stream"),
    *("max_seqlen_q", "max_seqlen_kv", "pad_between_seqs", "num_splits"),
}


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

    def __post_init__(self) -> None:
        if self.qkv_format == "thd" and "padding" not in self.attn_mask_type:
            raise AssertionError(f"attn_mask_type is {self.attn_mask_type!r}; packed batches need padding")
        if self.core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            refuse(f"core_attention_bias_type {self.core_attention_bias_type!r}")

    def mask_of(self, index: int) -> Tensor | None:
        """Return what a sample may not attend to, ``[1 or heads, 1 or queries, keys]``; ``None`` for all.

        Masks of padding are of keys, or a pair: of queries and of keys.
        """
        if self.attn_mask_type in ("no_mask", *_CAUSAL):
            return None
        if self.attention_mask is None:
            refuse(f"attn_mask_type {self.attn_mask_type!r} without an attention_mask")
        masks = self.attention_mask
        mask: Tensor = masks[-1] if isinstance(masks, tuple) else masks
        return mask[min(index, len(mask) - 1)]


def _without_extra_state(module: Any, keys: Any) -> None:
    """Let checkpoints do without the extra state of attention, as the real layer does."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if "core_attention._extra_state" not in key]


class DotProductAttention(TransformerEngineBaseModule):
    """Attention, in which groups of queries may share keys."""

    _peaks: list[Tensor]  # the largest scores of each head, by sample

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        **of_kernels: Any,
    ) -> None:
        super().__init__()
        if unknown := of_kernels.keys() - _OF_KERNELS:
            raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
        self.window_size = (*window_size,) if window_size else (-1, 0 if "causal" in attn_mask_type else -1)
        self.attn_mask_type, self._return_max_logit = attn_mask_type, return_max_logit
        self.qkv_format, self._dropout = qkv_format, attention_dropout
        # Ranks that have different tokens draw from states that differ anyway.
        self._tracker = None if sequence_parallel else get_rng_state_tracker
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        zeros = torch.zeros(num_attention_heads // self.tp_size, device="cuda")
        offsets = {"vanilla": None, "off-by-one": zeros, "learnable": torch.nn.Parameter(zeros)}
        self.softmax_offset = offsets[softmax_type]
        self.softmax_scale = softmax_scale or 1 / math.sqrt(channels)
        self.set_context_parallel_group(cp_group, None, None, cp_comm_type)
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
        passed = {name: x for name, x in arguments.items() if x is not None and name not in _OF_KERNELS}
        batch = _Batch(attention_mask=attention_mask, **own | passed)
        qkv = query_layer, key_layer, value_layer
        if key_layer.shape[-2] != self.num_gqa_groups_per_partition:
            raise AssertionError(f"keys have {key_layer.shape[-2]} heads, which is not num_gqa_groups")
        self._peaks = []
        if batch.qkv_format == "thd":
            out = self._packed(qkv, batch)
        else:
            dim = batch.qkv_format.index("b")
            by_sample = [
                self._attend(sample, batch, index)
                for index, sample in enumerate(zip(*(x.unbind(dim) for x in qkv), strict=True))
            ]
            out = torch.stack(by_sample, dim)
        if not self._return_max_logit:
            return out.flatten(-2)
        largest_h = torch.stack(self._peaks).amax(0)
        if self.cp_size > 1:
            dist.all_reduce(largest_h, dist.ReduceOp.MAX, group=self.cp_group)
        return out.flatten(-2), largest_h

    def _packed(self, qkv: tuple[Tensor, Tensor, Tensor], batch: _Batch) -> Tensor:
        """Attend in each sample. Padding may follow a sample, and ranks of context parallelism share both."""
        q, k, v = qkv
        edges = batch.cu_seqlens_q, batch.cu_seqlens_kv
        padded = batch.cu_seqlens_q_padded, batch.cu_seqlens_kv_padded
        if any(edge is None for edge in edges):
            raise AssertionError("packed batches need cu_seqlens_q and cu_seqlens_kv")
        lengths = zip(*(edge.diff().tolist() for edge in edges), strict=True)
        slots = []
        for edge, pad, x in zip(edges, padded, (q, k), strict=True):
            starts, parts = edge if pad is None else pad, 1 if self.cp_size == 1 else 2 * self.cp_size
            if starts[-1] > len(x) * self.cp_size or (starts % parts).any():
                raise AssertionError(f"cu_seqlens {starts.tolist()} do not fit {len(x)} tokens on each rank")
            slots.append([slice(*ends) for ends in pairwise((starts // self.cp_size).tolist())])
        out = v.new_zeros(len(q), q.shape[1], v.shape[-1])
        for of_both, of_q, of_k in zip(lengths, *slots, strict=True):
            out[of_q] = self._attend((q[of_q], k[of_k], v[of_k]), batch, None, of_both)
        return out

    def _attend(
        self,
        sample: tuple[Tensor, Tensor, Tensor],
        batch: _Batch,
        index: int | None,
        lengths: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the attention of one sample of a batch, ``[queries, heads, channels]``.

        Args:
            index: of the sample, unless it is a packed one.
            lengths: how many queries and keys all ranks have of it without padding; all by default.
        """
        q, k, v = sample
        hidden = self._hidden(len(q), len(k), lengths, batch).to(q.device)
        if self.cp_size > 1:
            k, v = (communication.enter(x, self.cp_group, True) for x in (k, v))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores_hst = torch.einsum("shd,thd->hst", q.float(), k.float()) * self.softmax_scale
        if index is not None:
            mask, bias = batch.mask_of(index), batch.core_attention_bias
            if self.cp_size > 1 and (mask is not None or bias is not None):
                refuse("masks and biases with context parallelism")
            hidden = hidden if mask is None else hidden | mask
            scores_hst = scores_hst if bias is None else scores_hst + bias[min(index, len(bias) - 1)]
        scores_hst = scores_hst.masked_fill(hidden, -math.inf)
        if self._return_max_logit:
            self._peaks.append(scores_hst.detach().amax((1, 2)))
        if self.softmax_offset is not None:  # one more key, whose value is zero
            offset_hs1 = self.softmax_offset.float()[:, None, None].expand(-1, len(q), 1)
            scores_hst = torch.cat([scores_hst, offset_hs1], -1)
        # A query that sees no key is padding, and gets zeros. NaN in the scores remains.
        weights_hst = scores_hst.softmax(-1)[..., : len(k)].masked_fill(hidden.all(-1, keepdim=True), 0.0)
        if self.training and self._dropout:
            with nullcontext() if self._tracker is None else self._tracker().fork():
                weights_hst = torch.nn.functional.dropout(weights_hst, self._dropout)
        return torch.einsum("hst,thd->shd", weights_hst.to(v.dtype), v)

    def _hidden(self, queries: int, keys: int, lengths: tuple[int, int] | None, batch: _Batch) -> Tensor:
        """Return which keys of all ranks a query of this rank does not see, ``[queries, all keys]``.

        They are padding, later than the query, or outside of its window, in which -1 is no limit.
        """
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        q_s = positions_of(rank, self.cp_size, queries)
        k_t = torch.cat([positions_of(other, self.cp_size, keys) for other in range(self.cp_size)])
        q_length, k_length = lengths or (queries * self.cp_size, keys * self.cp_size)
        left, right = (math.inf if limit < 0 else limit for limit in batch.window_size or (-1, -1))
        if "causal" in batch.attn_mask_type:
            right = 0
        elif (left, right) == (math.inf, 0):  # the window of a causal mask
            right = math.inf
        ahead_st = k_t[None] - q_s[:, None]
        if batch.attn_mask_type not in ("causal", "padding_causal"):
            ahead_st = ahead_st - (k_length - q_length)
        is_padding_st = (k_t >= k_length)[None] | (q_s >= q_length)[:, None]
        return is_padding_st | (ahead_st > right) | (ahead_st < -left)
