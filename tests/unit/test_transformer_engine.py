"""The stand-in of TransformerEngine: when it is in place, what parameters carry, what layers compute."""

import math
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from megatron_rl_patches.errors import MegatronRLPatchesError
from megatron_rl_patches.testing import cpu_backend
from megatron_rl_patches.testing.transformer_engine import refusals
from tests.gpu import parameter_marks


@pytest.fixture(autouse=True)
def _no_megatron(monkeypatch: MonkeyPatch) -> None:
    """Hide that other tests of this process have imported Megatron."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)


@pytest.fixture
def te() -> Iterator[Any]:
    """Return the package of the stand-in, which is in place."""
    with cpu_backend(transformer_engine=True):
        yield import_module("transformer_engine.pytorch")


def _marks(parameter: torch.nn.Parameter) -> tuple[object, ...]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return tuple(getattr(parameter, name, None) for name in names)


def test_it_is_in_place_inside_of_the_block_alone(monkeypatch: MonkeyPatch) -> None:
    with cpu_backend(transformer_engine="2.8.0"):
        assert find_spec("transformer_engine") and find_spec("transformer_engine.pytorch.ops")
        te = import_module("transformer_engine")
        assert te.__version__ == "2.8.0" and te.pytorch.module.Linear is te.pytorch.Linear
        with pytest.raises(ModuleNotFoundError):
            import_module("transformer_engine.pytorch.cross_entropy")
        with cpu_backend(), cpu_backend(transformer_engine=True), cpu_backend(transformer_engine="2.8"):
            assert import_module("transformer_engine") is te
        for other, message in (("2.9.0", r"stands for 2\.8\.0"), ("newest", "'newest'; expected a version")):
            with pytest.raises(MegatronRLPatchesError, match=message), cpu_backend(transformer_engine=other):
                pass
    assert find_spec("transformer_engine") is None
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    with cpu_backend(transformer_engine=True):
        assert import_module("transformer_engine").__version__ == refusals.DEFAULT
        monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    assert find_spec("transformer_engine")  # it stays if Megatron was imported with it
    with cpu_backend(transformer_engine=True):
        monkeypatch.delitem(sys.modules, "megatron.core")


def test_it_comes_neither_after_a_real_one_nor_megatron(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
        with pytest.raises(MegatronRLPatchesError, match="before"), cpu_backend(transformer_engine=True):
            pass
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MegatronRLPatchesError, match="is installed"), cpu_backend(transformer_engine=True):
        pass
    assert "transformer_engine" not in sys.modules


def test_what_it_does_not_have_is_refused_by_name(te: Any) -> None:
    with te.fp8_autocast(enabled=False), te.fp8_model_init(enabled=False):
        pass
    attention, q = te.DotProductAttention(2, 4), torch.ones(3, 1, 2, 4)
    adapted = te.LayerNormLinear(2, 2)
    adapted.return_layernorm_output = True
    refused: dict[str, Callable[[], Any]] = {
        "FP8": lambda: te.fp8_autocast(enabled=True),
        "fp8_model_init": lambda: te.fp8_model_init(enabled=True),
        "use_transformer_engine_op_fuser": lambda: te.ops.Sequential(named=True),
        "use_te_activation_func": lambda: te.ops.SwiGLU(cache_quantized_input=False),
        "qk_clip and log_max_attention_logit": lambda: te.DotProductAttention(2, 4, return_max_logit=True),
        "te_rng_tracker": te.CudaRNGStatesTracker,
        "checkpoint": lambda: te.checkpoint(len, [0], use_reentrant=False),
        "moe_router_fusion": te.router.fused_moe_aux_loss,
        "return_layernorm_output": lambda: adapted(torch.ones(1, 2)),
        "padding for FP8": lambda: te.Fp8Padding(num_gemms=2),
        "without an attention_mask": lambda: attention(q, q, q, attn_mask_type="padding"),
    }
    for message, call in refused.items():
        with pytest.raises(MegatronRLPatchesError, match=message):
            call()
    assert attention.window_size == (-1, 0)
    assert not te.fp8.check_fp8_support()[0] and not te.fp8.FP8GlobalStateManager.is_mxfp8_available()[0]


@pytest.mark.parametrize(("release", "marked"), [("2.12.0", True), ("2.13.0", False)])
def test_what_parameters_carry(release: str, marked: bool) -> None:
    with cpu_backend(transformer_engine=release):
        te = import_module("transformer_engine.pytorch")
        row, column = (te.Linear(4, 6, parallel_mode=mode) for mode in ("row", "column"))
        assert _marks(row.weight) == (True, 1, 1, None) and _marks(row.bias) == (None, None, None, False)
        assert _marks(column.weight) == _marks(column.bias) == (True, 0, 1, None)
        assert _marks(te.Linear(4, 6).weight) == (True, 0, 1, None)  # also if it is whole on each rank
        fused = te.LayerNormLinear(4, 6, parallel_mode="column", sequence_parallel=True)
        assert _marks(fused.layer_norm_weight) == (None, None, None, False)  # on one rank
        assert _marks(te.RMSNorm(4, sequence_parallel=True).weight) == (None, None, None, True)
        for name in ("dtype", "params_dtype"):
            assert te.RMSNorm(4, **{name: torch.bfloat16})(torch.ones(2, 4)).dtype == torch.bfloat16
        grouped = te.GroupedLinear(2, 4, 6, bias=False)
        expected = (True, 0, 1, None) if marked else (None,) * 4
        assert _marks(grouped.weight0) == _marks(grouped.weight1) == expected


def test_marks_are_compared_with_those_of_an_installation(monkeypatch: MonkeyPatch, capsys: Any) -> None:
    layers = SimpleNamespace(**vars(parameter_marks.STAND_IN))
    package = SimpleNamespace(__version__="2.14.1+7a3e6f2")
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", layers)
    assert parameter_marks.main() == 0
    layers.RMSNorm = layers.LayerNorm
    assert parameter_marks.main() == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("RMSNorm(") and last.endswith("; the stand-in None")


def test_layers_on_the_device_meta_get_values_and_marks_later(te: Any) -> None:
    for name, sizes in {"Linear": (4, 6), "LayerNormLinear": (4, 6), "GroupedLinear": (2, 4, 6)}.items():
        options = {"parallel_mode": "row", "tp_size": 2, "sequence_parallel": True}
        options["bias"] = name != "GroupedLinear"
        later, now = (getattr(te, name)(*sizes, **options, device=d) for d in ("meta", "cuda"))
        assert all(p.is_meta and not vars(p) for p in later.parameters())
        later.reset_parameters()
        carried = [{key: vars(p) for key, p in layer.named_parameters()} for layer in (later, now)]
        assert carried[0] == carried[1] and not any(p.is_meta for p in later.parameters())
    norm = te.LayerNorm(4, sequence_parallel=True, device="meta")
    assert not vars(norm.weight)
    norm.reset_parameters()
    assert norm.weight.eq(1).all() and norm.bias.eq(0).all() and vars(norm.bias)


@pytest.mark.parametrize(
    ("mask_type", "window"),
    [
        *product(["causal", "no_mask", "causal_bottom_right", "padding", "arbitrary"], [None]),
        *product(["causal", "no_mask"], [(1, 0)]),
    ],
)
def test_attention_is_that_of_torch(te: Any, mask_type: str, window: tuple[int, int] | None) -> None:
    """Windows lie at the end of the keys, but for a causal mask."""
    q, k, v = (torch.randn(size, 2, 4, 8) for size in (5, 7, 7))
    ahead = torch.arange(7)[None] - torch.arange(5)[:, None]
    seen = {"causal": ahead <= 0, "causal_bottom_right": ahead <= 2}.get(mask_type, ahead < 9)
    mask = None
    if window:
        start = ahead if mask_type == "causal" else ahead - 2
        seen = (start <= 0) & (start >= -1)
    if mask_type in ("padding", "arbitrary"):
        seen = (torch.arange(7) < 6).expand(5, 7)
        mask = ~(seen[:1] if mask_type == "padding" else seen)[None, None].expand(2, -1, -1, -1)
    found = te.DotProductAttention(4, 8)(q, k, v, mask, attn_mask_type=mask_type, window_size=window)
    by_head = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=seen)
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))


def test_permutation_with_probabilities(te: Any) -> None:
    x, probs = torch.randn(4, 3), torch.rand(4, 2)
    routes = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]])
    rows, of_rows, row_map = te.permutation.moe_permute_with_probs(x, probs, routes, num_out_tokens=4)
    assert torch.equal(rows, x[[0, 2, 0, 1]]) and torch.equal(of_rows, probs.t()[routes.t().bool()])
    back = te.permutation.moe_unpermute(rows, row_map, probs, restore_shape=x.shape)
    torch.testing.assert_close(back, x * (probs * routes).sum(1, keepdim=True))


def test_softmax_with_an_offset(te: Any) -> None:
    q, k, v = (torch.randn(5, 1, 2, 4) for _ in range(3))
    attention = te.DotProductAttention(2, 4, softmax_type="learnable", attn_mask_type="no_mask")
    attention.softmax_offset.data += torch.tensor([0.3, -1.0])
    found = attention(q, k, v)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / 2
    offsets = attention.softmax_offset.exp()[:, None, None]
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + offsets)
    torch.testing.assert_close(found, torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2))
    q[1, 0, 0] = math.nan
    assert attention(q, k, v).isnan().any((1, 2)).tolist() == [False, True, False, False, False]


def test_gradients_of_weights_are_added_or_overwrite(te: Any) -> None:
    for overwrites, is_first in product((False, True), (None, False, True)):
        layer = te.Linear(2, 2, bias=False, fuse_wgrad_accumulation=True)
        layer.weight.main_grad, layer.weight.overwrite_main_grad = torch.ones(2, 2), overwrites
        layer(torch.ones(3, 2), is_first_microbatch=is_first).sum().backward()
        assert layer.weight.main_grad.eq(3 if overwrites or is_first else 4).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_a_gpu_decides_the_precision_of_products(dtype: torch.dtype) -> None:
    x = torch.ones(3, 2, requires_grad=True)
    with cpu_backend(transformer_engine=True):
        te = import_module("transformer_engine.pytorch")
        modules = te.Linear(2, 2), te.LayerNormLinear(2, 2), te.RMSNorm(2), te.GroupedLinear(1, 2, 2)
        with torch.autocast("cuda", None if dtype == torch.float16 else dtype):  # the default on a GPU
            assert torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() == dtype
            results = [x @ x.t(), *(layer(x) for layer in modules[:3]), modules[3](x, [3])]
            assert {y.dtype for y in results} == {dtype}
            assert te.DotProductAttention(1, 2)(*(x[:, None, None],) * 3).dtype == torch.float32
        torch.cat(results, 1).sum().backward()
    assert not torch.is_autocast_enabled() and modules[0].weight.grad.dtype == x.grad.dtype == torch.float32


def test_checkpoints_of_local_layers_load(te: Any) -> None:
    """They lack the extra state of attention."""
    layer = torch.nn.ModuleDict({"core_attention": te.DotProductAttention(2, 4), "proj": te.Linear(2, 2)})
    state = {name: value for name, value in layer.state_dict().items() if "attention" not in name}
    assert "proj._extra_state" in state and not layer.load_state_dict(state).missing_keys


@pytest.mark.parametrize("adam_w", [True, False])
def test_fused_adam_counts_its_steps_in_the_group(te: Any, adam_w: bool) -> None:
    parameter, expected = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    # Megatron sets the rate later, and may save and load moments before the first step.
    options = {"lr": None, "weight_decay": 0.1, "adam_w_mode": adam_w, "bias_correction": True}
    fused = te.optimizers.FusedAdam([parameter], **options)
    fused.state[parameter].update(exp_avg=torch.zeros(3), exp_avg_sq=torch.zeros(3))
    fused.param_groups[0]["lr"] = 1e-3
    reference = (torch.optim.AdamW if adam_w else torch.optim.Adam)([expected], weight_decay=0.1)
    for _ in range(3):
        fused.load_state_dict(fused.state_dict())
        parameter.grad, expected.grad = (torch.tensor([1.0, -2.0, 0.5]) for _ in range(2))
        assert fused.step(lambda: 0.5) == 0.5
        reference.step()
    assert torch.equal(parameter, expected) and parameter[0] != 1
    moments = {name: x for name, x in reference.state[expected].items() if name != "step"}
    torch.testing.assert_close(fused.state[parameter], moments, rtol=0, atol=0)
    assert fused.param_groups[0]["step"] == 3
    with pytest.raises(MegatronRLPatchesError, match=r"no FusedAdam of parameters in torch\.float16"):
        te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(3).half())]).step()
