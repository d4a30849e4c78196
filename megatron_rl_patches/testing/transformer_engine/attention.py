"""``DotProductAttention`` of ``sbhd``, ``bshd`` and packed ``thd`` batches, with scores in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import base
from .base import TransformerEngineBaseModule, positions_of
from .refusals import check_options, is_at_least, refuse, require

_CAUSAL = ("causal", "causal_bottom_right")
_MASKS = ("no_mask", "arbitrary", "padding", *_CAUSAL, *(f"padding_{name}" for name in _CAUSAL))
_QKV = tuple[Tensor, Tensor, Tensor]


def _mask_and_window(name: str, window: tuple[int, int] | None) -> tuple[str, tuple[int, int]]:
    """Return a mask's name, and how far back and ahead a query sees, -1 for all, as the real one does."""
    is_causal, (left, right) = "causal" in name, window or (-1, -1)
    if (left, right) == (-1, 0):  # the window of a causal mask
        right = -1
    is_window = (left, right) == (-1, -1) or (left >= 0 and (is_causal or right >= 0))
    require(
        (name in _MASKS, f"attn_mask_type is {name!r}"),
        (is_window, f"window_size is {window} with attn_mask_type {name!r}"),
    )
    return name, (left, 0 if is_causal else right)


@dataclass(frozen=True)
class _Batch:
    """Arguments of a call besides queries, keys and values."""

    attn_mask_type: str
    window_size: tuple[int, int]
    qkv_format: str
    attention_mask: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None

    def mask_of(self, index: int) -> Tensor | None:
        """Return what a sample may not attend to, ``[1 or heads, 1 or queries, keys]``; or ``None``."""
        if self.attn_mask_type in ("no_mask", *_CAUSAL):
            return None
        if self.attention_mask is None:
            refuse(f"attn_mask_type {self.attn_mask_type!r} without an attention_mask")
        masks = self.attention_mask  # of keys, or a pair: of queries and of keys
        mask: Tensor = masks[-1] if isinstance(masks, tuple) else masks
        return mask[min(index, len(mask) - 1)]


_FIELDS = {field.name for field in fields(_Batch)}


def _without_extra_state(module: Any, keys: Any) -> None:
    """Let checkpoints do without the extra state of attention, as the real layer does."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if "core_attention._extra_state" not in key]


class DotProductAttention(TransformerEngineBaseModule):
    """Attention, in which groups of queries may share keys."""

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
        attention_type: str = "self",
        tp_size: int = 1,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        **others: Any,
    ) -> None:
        super().__init__(tp_size, tp_group)
        check_options("DotProductAttention", others)
        self.attn_mask_type, self.window_size = _mask_and_window(attn_mask_type, window_size)
        self.qkv_format, self._dropout = qkv_format, attention_dropout
        # Ranks that have different tokens draw from states that differ anyway.
        self._tracker = None if sequence_parallel else get_rng_state_tracker
        self._channels = (kv_channels,) * 2 if isinstance(kv_channels, int) else (*kv_channels,)
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        heads = f"{num_attention_heads} heads are not divisible into {self.num_gqa_groups} groups"
        require(
            (num_attention_heads % self.num_gqa_groups == 0, heads),
            (attention_type in ("self", "cross"), f"attention_type is {attention_type!r}"),
        )
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        zeros = torch.zeros(num_attention_heads // self.tp_size, device="cuda")
        offsets = {"vanilla": None, "off-by-one": zeros, "learnable": torch.nn.Parameter(zeros)}
        self.softmax_offset = offsets[softmax_type]
        self.softmax_scale = softmax_scale or 1 / math.sqrt(self._channels[0])
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
        self, query_layer: Any, key_layer: Any, value_layer: Any, attention_mask: Any = None, **arguments: Any
    ) -> Tensor:
        """Return ``[..., heads * channels]`` of queries, keys and values ``[..., heads, channels]``."""
        own = {name: getattr(self, name) for name in ("qkv_format", "attn_mask_type", "window_size")}
        passed = {name: arguments.pop(name) for name in arguments.keys() & _FIELDS}
        check_options("DotProductAttention.forward", arguments)
        values = own | {name: x for name, x in passed.items() if x is not None}
        mask_and_window = _mask_and_window(values.pop("attn_mask_type"), values.pop("window_size"))
        batch = _Batch(*mask_and_window, attention_mask=attention_mask, **values)
        qkv = query_layer, key_layer, value_layer
        self._check(qkv, batch)
        if batch.qkv_format == "thd":
            out = self._packed(qkv, batch)
        else:
            dim = batch.qkv_format.index("b")
            samples = enumerate(zip(*(x.unbind(dim) for x in qkv), strict=True))
            out = torch.stack([self._attend(sample, batch, index) for index, sample in samples], dim)
        return out.flatten(-2)

    def _check(self, qkv: _QKV, batch: _Batch) -> None:
        self._check_group()
        if batch.core_attention_bias_type not in ("no_bias", "post_scale_bias"):
            refuse(f"core_attention_bias_type {batch.core_attention_bias_type!r}")
        (q, k, v), shapes, layout = qkv, [tuple(x.shape) for x in qkv], batch.qkv_format
        groups, bias = self.num_gqa_groups_per_partition, batch.core_attention_bias
        has_offset, mask_type = self.softmax_offset is not None, batch.attn_mask_type
        widths = k.shape[-1], v.shape[-1]
        require(
            (layout in ("sbhd", "bshd", "thd"), f"qkv_format is {layout!r}"),
            (all(x.dim() == len(layout) for x in qkv), f"{layout} batches have {shapes}"),
            (q.dtype == k.dtype == v.dtype, f"queries, keys and values are {q.dtype}, {k.dtype}, {v.dtype}"),
            (k.shape[:-1] == v.shape[:-1], f"keys and values differ in their shapes: {shapes[1:]}"),
            (q.shape[-1] == k.shape[-1], f"queries and keys differ in their channels: {shapes[:2]}"),
            (widths == self._channels, f"keys and values have {widths} channels, and not {self._channels}"),
            (k.shape[-2] == groups, f"keys have {k.shape[-2]} heads, which is not num_gqa_groups"),
            (bias is None or bias.shape[1] in (1, q.shape[-2]), "core_attention_bias has other heads"),
        )
        if is_packed := layout == "thd":
            types = [getattr(edge, "dtype", None) for edge in (batch.cu_seqlens_q, batch.cu_seqlens_kv)]
            require(
                ("padding" in mask_type, f"a packed batch has attn_mask_type {mask_type!r}"),
                ({*types} == {torch.int32}, f"cu_seqlens_q and cu_seqlens_kv of a packed batch are {types}"),
                (not has_offset or is_at_least("2.12"), "packed softmax offsets"),
            )
        if self.cp_size == 1:
            return
        kind, ranks = self.cp_comm_type, self.cp_size
        is_ring, is_new, cut = kind == "p2p", is_at_least("2.15"), f"cp_comm_type {kind!r} with"
        takes_packed = is_ring or is_at_least("2.10" if kind == "a2a" else "2.18")
        is_even = kind != "a2a" or not (q.shape[-2] % ranks or groups % ranks)
        is_square = is_packed or shapes[0][:2] == shapes[1][:2]
        require(
            (kind in ("p2p", "a2a", "all_gather"), f"cp_comm_type is {kind!r}"),
            (not is_ring or batch.window_size in ((-1, 0), (-1, -1)), f"{cut} a window"),
            (takes_packed or not is_packed, f"{cut} packed samples"),
            (is_ring or is_packed or "padding" not in mask_type, f"{cut} padding"),
            (is_ring or is_new or q.shape[-1] == v.shape[-1], f"{cut} values of another width"),
            (is_ring or is_new or q.shape[-1] % 8 == 0, f"{cut} {q.shape[-1]} channels, no multiple of 8"),
            (kind == "a2a" or not has_offset, f"{cut} softmax offsets"),
            (is_even, f"{cut} {q.shape[-2]} heads in {groups} groups on {ranks} ranks"),
            ("bottom_right" not in mask_type and mask_type != "arbitrary", f"{cut} {mask_type!r}"),
            ("causal" not in mask_type or is_square, f"{cut} queries and keys of other numbers"),
        )

    def _packed(self, qkv: _QKV, batch: _Batch) -> Tensor:
        """Attend in each sample. Padding may follow a sample, and ranks of context parallelism share both."""
        q, k, v = qkv
        edges = batch.cu_seqlens_q, batch.cu_seqlens_kv
        padded = batch.cu_seqlens_q_padded, batch.cu_seqlens_kv_padded
        lengths = zip(*(edge.diff().tolist() for edge in edges), strict=True)
        slots = []
        for edge, pad, x in zip(edges, padded, (q, k), strict=True):
            starts, parts = edge if pad is None else pad, 1 if self.cp_size == 1 else 2 * self.cp_size
            fits = starts[-1] <= len(x) * self.cp_size and not (starts % parts).any()
            require((fits, f"cu_seqlens {starts.tolist()} do not fit {len(x)} tokens on each rank"))
            slots.append([slice(*ends) for ends in pairwise((starts // self.cp_size).tolist())])
        out = v.new_zeros(len(q), q.shape[1], v.shape[-1])
        for of_both, of_q, of_k in zip(lengths, *slots, strict=True):
            out[of_q] = self._attend((q[of_q], k[of_k], v[of_k]), batch, None, of_both)
        return out

    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def _attend(self, qkv: _QKV, batch: _Batch, index: int | None, lengths: Any = None) -> Tensor:
        """Return the attention of one sample of a batch, ``[queries, heads, channels]``.

        ``index`` is ``None`` for packed samples; ``lengths`` are queries and keys of all ranks, unpadded.
        """
        q, k, v = qkv
        hidden = self._hidden(len(q), len(k), lengths, batch).to(q.device)
        if self.cp_size > 1:
            k, v = (base.enter(x, self.cp_group, True) for x in (k, v))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores_hst = torch.einsum("shd,thd->hst", q.float(), k.float()) * self.softmax_scale
        if index is not None:
            mask, bias = batch.mask_of(index), batch.core_attention_bias
            bias = bias if batch.core_attention_bias_type == "post_scale_bias" else None
            if self.cp_size > 1 and (mask is not None or bias is not None):
                refuse("masks and biases with context parallelism")
            hidden = hidden if mask is None else hidden | mask
            scores_hst = scores_hst if bias is None else scores_hst + bias[min(index, len(bias) - 1)]
        scores_hst = scores_hst.masked_fill(hidden, -math.inf)
        if self.softmax_offset is not None:  # one more key, whose value is zero
            offset_hs1 = self.softmax_offset.float()[:, None, None].expand(-1, len(q), 1)
            scores_hst = torch.cat([scores_hst, offset_hs1], -1)
        # A query that sees no key is padding, and gets zeros. NaN in the scores remains.
        weights_hst = scores_hst.softmax(-1)[..., : len(k)].masked_fill(hidden.all(-1, keepdim=True), 0.0)
        if self.training and self._dropout:
            with nullcontext() if self._tracker is None else self._tracker().fork():
                weights_hst = torch.nn.functional.dropout(weights_hst, self._dropout)
        return torch.einsum("hst,thd->shd", weights_hst.to(v.dtype), v)

    def _hidden(self, queries: int, keys: int, lengths: Any, batch: _Batch) -> Tensor:
        """Return which keys of all ranks a query of this rank does not see, ``[queries, all keys]``.

        They are padding, later than the query, or outside of its window, in which -1 is no limit.
        """
        rank = 0 if self.cp_group is None else self.cp_group.rank()
        q_s = positions_of(rank, self.cp_size, queries)
        k_t = torch.cat([positions_of(other, self.cp_size, keys) for other in range(self.cp_size)])
        q_length, k_length = lengths or (queries * self.cp_size, keys * self.cp_size)
        left, right = (math.inf if limit < 0 else limit for limit in batch.window_size)
        ahead_st = k_t[None] - q_s[:, None]
        if batch.attn_mask_type not in ("causal", "padding_causal"):
            ahead_st = ahead_st - (k_length - q_length)
        is_padding_st = (k_t >= k_length)[None] | (q_s >= q_length)[:, None]
        return is_padding_st | (ahead_st > right) | (ahead_st < -left)
