"""The stand-in takes and refuses what TransformerEngine does, as its sources say at v2.9, v2.13 and main."""

import ast
import os
import sys
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import MegatronRLPatchesError
from megatron_rl_patches.testing import cpu_backend
from megatron_rl_patches.testing.transformer_engine import base, refusals
from megatron_rl_patches.testing.transformer_engine.refusals import RefusedInput
from tests.worlds.files import git

#: Release that the stand-in stands for -> where it is in a checkout of TransformerEngine.
RELEASES = {"2.9.0": "v2.9", "2.13.0": "v2.13", "2.20.0.dev0": "HEAD"}
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "kv_channels": 8}
_TWO_RANKS = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
_S, _T = torch.ones(4, 1, 2, 8), torch.ones(4, 2, 8)  # positions, samples; packed tokens; heads, channels
_EDGES = torch.tensor([0, 4], dtype=torch.int32)
_PACKED: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
_PACKED |= {"cu_seqlens_q": _EDGES, "cu_seqlens_kv": _EDGES}


def heads(*qkv: torch.Tensor, call: Any = None, cut: str | None = None, **layer: Any) -> Any:
    """Return a call of attention, by default in two heads of 8 channels, and without context parallelism."""
    qkv = (*qkv, *qkv[-1:] * 2)[:3]
    layer = _HEADS | ({"cp_group": _TWO_RANKS, "cp_comm_type": cut} if cut else {}) | layer
    return lambda te: te.DotProductAttention(**layer)(*qkv, **(call or {}))


_ones, _angles = torch.ones(2, 4), torch.ones(4, 1, 1, 4)
#: What the real one refuses, and the first release that takes it -> a call.
REFUSED: dict[str, Any] = {
    "columns": lambda te: te.Linear(4, 5, parallel_mode="column", tp_size=2),
    "rows": lambda te: te.LayerNormLinear(5, 4, parallel_mode="row", tp_size=2),
    "mode": lambda te: te.Linear(4, 4, parallel_mode="colunm"),
    "kind of norm": lambda te: te.LayerNormLinear(4, 4, normalization="L2Norm"),
    "biases of groups": lambda te: te.GroupedLinear(1, 4, 4, tp_size=2),
    "no group of ranks": lambda te: te.Linear(4, 4, tp_size=2)(_ones),
    "type": lambda te: te.Linear(4, 4)(_ones.bfloat16()),
    "type of a residual": lambda te: te.LayerNormLinear(4, 4, params_dtype=torch.bfloat16)(_ones),
    "width": lambda te: te.Linear(5, 4)(_ones),
    "number of groups": lambda te: te.GroupedLinear(2, 4, 4)(_ones, [2]),
    "no size": lambda te: te.LayerNorm(),
    "two types": lambda te: te.RMSNorm(4, dtype=torch.half, params_dtype=torch.half),
    "width of a norm": lambda te: te.RMSNorm(1)(_ones),
    "heads in groups": heads(_S, num_attention_heads=3, num_gqa_groups=2),
    "kind of attention": heads(_S, attention_type="both"),
    "kind of mask": heads(_S, call={"attn_mask_type": "diagonal"}),
    "window of a causal mask": heads(_S, window_size=(-1, 2)),
    "window without a mask": heads(_S, attn_mask_type="no_mask", window_size=(2, -1)),
    "format": heads(_S, call={"qkv_format": "bhsd"}),
    "dimensions": heads(_T),
    "type of queries": heads(_S.bfloat16(), _S),
    "positions of values": heads(_S, _S, _S[:3]),
    "channels of queries": heads(_S[..., :4], _S),
    "channels of values": heads(_S, kv_channels=(8, 4)),
    "heads of keys": heads(_S, num_gqa_groups=1),
    "heads of biases": heads(_S, call={"core_attention_bias": torch.ones(1, 3, 4, 4)}),
    "packed without padding": heads(_T, call=_PACKED | {"attn_mask_type": "causal"}),
    "packed without edges": heads(_T, call=_PACKED | {"cu_seqlens_kv": None}),
    "packed int64": heads(_T, call=_PACKED | {"cu_seqlens_q": _EDGES.long()}),
    "packed beyond all tokens": heads(_T, call=_PACKED | {"cu_seqlens_kv": _EDGES + 6}),
    "packed offsets, until 2.12": heads(_T, call=_PACKED, softmax_type="off-by-one"),
    "cut by another kind": heads(_S, cut="ring"),
    "cut window": heads(_S, window_size=(2, 0), cut="p2p"),
    "cut a2a, packed, until 2.10": heads(_T, call=_PACKED, cut="a2a"),
    "cut all_gather, packed, until 2.18": heads(_T, call=_PACKED, cut="all_gather"),
    "cut a2a, heads": heads(torch.ones(4, 1, 3, 8), num_attention_heads=3, cut="a2a"),
    "cut offsets": heads(_S, softmax_type="off-by-one", cut="p2p"),
    "cut wide values, until 2.15": heads(_S, _S, torch.ones(4, 1, 2, 16), kv_channels=(8, 16), cut="a2a"),
    "cut all_gather, channels, until 2.15": heads(_S[..., :4], kv_channels=4, cut="all_gather"),
    "cut a2a, padding": heads(_S, call={"attn_mask_type": "padding"}, cut="a2a"),
    "cut at the end of keys": heads(_S, attn_mask_type="causal_bottom_right", cut="p2p"),
    "cut keys": heads(_S, torch.ones(8, 1, 2, 8), cut="p2p"),
    "cut into odd pieces": heads(_S[:3], cut="p2p"),
    "format of positions": lambda te: te.attention.apply_rotary_pos_emb(_S, _angles, "hsbd"),
    "packed positions": lambda te: te.attention.apply_rotary_pos_emb(_T, _angles, "thd"),
    "too few positions": lambda te: te.attention.apply_rotary_pos_emb(_S, _angles[:1]),
    "routes": lambda te: te.permutation.moe_permute(_ones, torch.ones(3, 2), 6),
    "order of chunks": lambda te: te.permutation.moe_sort_chunks_by_index(_ones, _EDGES, _EDGES[:1]),
}

#: Options of constructors besides sizes. ``!`` marks those of which the stand-in has one value alone, and
#: ``>`` the release that adds one. Megatron passes options of single groups if it sees them, hence at once.
_LINEAR = "sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker init_method bias"
_LINEAR += " return_bias params_dtype parallel_mode device ub_overlap_ag! ub_overlap_rs! ub_name"
_ONE = f"{_LINEAR} name parameters_split! ub_overlap_rs_dgrad! ub_bulk_dgrad! ub_bulk_wgrad!"
_ONE += " symmetric_ar_type! delay_wgrad_compute!"
_NORMED = "eps normalization zero_centered_gamma return_layernorm_output! return_layernorm_output_gathered!"
_GROUPED = "rng_tracker_name save_original_input name>2.11 single_grouped_weight! single_grouped_bias!"
_GROUPED += " use_grouped_tensor!>2.19 delay_wgrad_compute!"
_NORM = "eps sequence_parallel params_dtype zero_centered_gamma hidden_size"
_GQA = "num_gqa_groups attention_dropout qkv_format attn_mask_type window_size sequence_parallel tp_size"
_GQA += " tp_group get_rng_state_tracker layer_number attention_type cp_group cp_global_ranks cp_stream"
_GQA += " cp_comm_type softmax_scale softmax_type return_max_logit! bottom_right_diagonal!>2.12 name>2.16"
_ADAM = "lr betas eps weight_decay adam_w_mode amsgrad! bias_correction! capturable! master_weights!"
_ADAM += " exp_avg_dtype! exp_avg_sq_dtype! master_weight_dtype! use_decoupled_grad! store_param_remainders!"
_ADAM += " set_grad_none!"
_SIZES, _SIZE = {"in_features": 4, "out_features": 4}, {"normalized_shape": 4}
#: Where a class is in the sources, sizes to make one, and its other options.
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Linear": ("module/linear", _SIZES, f"{_ONE} rng_tracker_name save_original_input"),
    "LayerNormLinear": ("module/layernorm_linear", _SIZES, f"{_ONE} {_NORMED}"),
    "GroupedLinear": ("module/grouped_linear", {"num_gemms": 1, **_SIZES}, f"{_LINEAR} {_GROUPED}"),
    "LayerNorm": ("module/layernorm", _SIZE, _NORM),
    "RMSNorm": ("module/rmsnorm", _SIZE, _NORM),
    "DotProductAttention": ("attention/dot_product_attention/dot_product_attention", _HEADS, _GQA),
    "FusedAdam": ("optimizers/fused_adam", {"params": [torch.nn.Parameter(_ones)]}, _ADAM),
}
#: Values that are right where ``None`` is not, and wrong ones that look like "off".
_RIGHT = {"tp_size": 1, "normalization": "LayerNorm", "attn_mask_type": "causal", "attention_type": "self"}
_RIGHT |= {"softmax_type": "vanilla"}
_WRONG = dict.fromkeys(("bias_correction", "set_grad_none", "bottom_right_diagonal"), False)


@pytest.fixture(params=RELEASES)
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stand-in of a release."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)  # that other tests have imported
    monkeypatch.setattr(base, "enter", lambda x, group, is_split: torch.cat([x, x]))
    with cpu_backend(transformer_engine=request.param):
        yield import_module("transformer_engine.pytorch")


def _options(owner: str) -> dict[str, bool]:
    """Return options with their marks, and whether the release has them."""
    since = (option.partition(">") for option in CLASSES[owner][2].split())
    return {option: refusals.is_at_least(release or "0") for option, _, release in since}


@pytest.mark.parametrize("what", REFUSED)
def test_input_is_refused_as_by_the_real_one(te: Any, what: str) -> None:
    is_taken = refusals.is_at_least(what.partition(", until ")[2] or "99")
    with nullcontext() if is_taken else pytest.raises(RefusedInput):
        REFUSED[what](te)


@pytest.mark.parametrize("owner", CLASSES)
def test_constructors_have_the_options_of_the_real_ones(te: Any, owner: str) -> None:
    kind, sizes = getattr(te, owner, None) or te.optimizers.FusedAdam, CLASSES[owner][1]
    for option, is_there in {**_options(owner), "unknown": False}.items():
        name = option.rstrip("!")
        with nullcontext() if is_there else pytest.raises(TypeError, match=f"no argument '{name}' here"):
            kind(**sizes, **{name: _RIGHT.get(name)})
        if is_there and name != option:
            with pytest.raises(MegatronRLPatchesError, match=f"TransformerEngine has no .*{name}"):
                kind(**sizes, **{name: _WRONG.get(name, object())})


@pytest.mark.skipif("TRANSFORMER_ENGINE_DIR" not in os.environ, reason="compares with a tagged checkout")
@pytest.mark.parametrize("owner", CLASSES)
def test_options_are_those_in_the_sources(te: Any, owner: str) -> None:
    file, sizes, _ = CLASSES[owner]
    path = f"{RELEASES[refusals.current]}:transformer_engine/pytorch/{file}.py"
    tree = ast.parse(git(os.environ["TRANSFORMER_ENGINE_DIR"], "show", path))
    (definition,) = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == owner)
    (init,) = (x for x in definition.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
    names = {argument.arg for argument in (*init.args.args[1:], *init.args.kwonlyargs)}
    expected = {option.rstrip("!") for option, is_there in _options(owner).items() if is_there}
    single = set() if refusals.is_at_least("2.14") else {"single_grouped_weight", "single_grouped_bias"}
    assert names - sizes.keys() == expected - single
