"""Layers of the stand-in of TransformerEngine against Megatron's local layers with the same weights.

``--record-stand-in FILE`` notes how much losses and gradients differ, which a table of the pages shows.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.extensions import transformer_engine as extension
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, cuda_graphs

from megatron_rl_patches import applied
from megatron_rl_patches.testing import tiny_model
from tests.ranks import everywhere, on_ranks
from tests.recording import note_differences
from tests.worlds.model import RECOMPUTE

TE = "transformer_engine"
SWIGLU: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "mtp_num_layers": None,
}
_MOE: dict[str, Any] = {
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "gated_linear_unit": True,
}
_NORMS: dict[str, Any] = {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-2}
#: The kind of ``tiny_model()``, and further fields of its configuration. Without its layer of multi-token
#: prediction, that kind is a dense model with rotary positions.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "grouped queries": ("mtp", {"num_query_groups": 2, **SWIGLU}),
    "fused RoPE": ("mtp", {"num_query_groups": 2, **SWIGLU, "apply_rope_fusion": True}),
    "grouped experts": ("moe", _MOE),
    "grouped experts, fused permutation": ("moe", {**_MOE, "moe_permute_fusion": True}),
    "latent attention": ("mla", SWIGLU),
    "zero-centered norms": ("dense", {**_NORMS, "normalization": "RMSNorm"}),
    "zero-centered norms with means": ("dense", {**_NORMS, "qk_layernorm": True}),
    "latent attention, window": ("mla", {**SWIGLU, "window_size": (4, 0), "softmax_type": "off-by-one"}),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "1 rank": {},
    "TP 2": {"tp": 2},
    "EP 2": {"ep": 2},
    "CP 2": {"cp": 2},
    "TP 2, expert TP 1": {"tp": 2, "expert_tp": 1},
    "TP 2, EP 2": {"tp": 2, "ep": 2, "expert_tp": 1},
}


class Outcome(NamedTuple):
    """Losses of a pass, and gradients by the names that parameters have in local layers."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def build(case: str, layers: str, layout: str = "1 rank", initializes: bool = True, **fields: Any) -> Any:
    """Build a model of two layers, after its groups; the fields of its configuration win over the case's."""
    kind, of_case = CASES[case]
    sizes = LAYOUTS[layout]
    config = {"num_layers": 2, **of_case, **fields}
    more: dict[str, Any] = {"sequence_parallel": "tp" in sizes, "vocab_size": 64, "seq_length": 32, "seed": 3}
    tiny = tiny_model(kind, layers=layers, config=config, **more, **sizes)
    if initializes:
        tiny.initialize()
    model = tiny.provider()
    with torch.no_grad():
        for parameter in model.parameters():  # none of them is 0 or 1, and scores differ
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.ones_like(parameter).cumsum(0).sin())
            else:
                parameter.mul_(3)
    return model


def local_name(name: str) -> str:
    """Return the name that a parameter of the TransformerEngine spec has with the local one."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = re.sub(r"linear_(kv|q)_up_proj\.layer_norm_", r"\1_layernorm.", name)
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return re.sub(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)", r"experts.local_experts.\3.\1.\2", name)


def losses_of(model: Any) -> torch.Tensor:
    experts = parallel_state.get_expert_model_parallel_rank()  # their ranks have samples of their own
    generator = torch.Generator().manual_seed(7 + experts)
    tokens = torch.randint(0, 64, (2, 17), generator=generator)
    mask = torch.ones(16, 16).triu(1).bool()[None, None]
    losses = model(tokens[:, :-1], torch.arange(16)[None].expand(2, -1), mask, labels=tokens[:, 1:])
    (losses * torch.linspace(0.5, 1.5, 32).view_as(losses)).sum().backward()
    return losses.detach()


def outcome(model: Any, losses: torch.Tensor | None = None) -> Outcome:
    """Return losses, by default of one pass, and gradients, summed where sequence parallelism needs it."""
    losses = losses_of(model) if losses is None else losses
    by_name = {}
    for name, parameter in model.named_parameters():
        fused = getattr(parameter, "grad_added_to_main_grad", False)
        value = (parameter.main_grad if fused else parameter.grad).clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
        by_name[local_name(name)] = value
    return Outcome(losses, by_name)


def parts(values: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the values of an undivided model, which are as large as the model's own."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    by_name = {}
    for name, parameter in model.named_parameters():
        value = values[local_name(name)]
        sizes = zip(value.shape, parameter.shape, strict=True)
        dims = [dim for dim, (size, part) in enumerate(sizes) if size != part]
        for dim in dims:  # of the first projection, gates come first, and then what they multiply
            pieces = value.chunk(2 if "linear_fc1" in name else 1, dim)
            value = torch.cat([piece.chunk(2, dim)[rank] for piece in pieces], dim)
        by_name[local_name(name)] = value
    return by_name


def check(name: str, found: Outcome, expected: Outcome) -> None:
    """Assert that losses, and gradients in units of the largest one, differ by less than 1e-6; note it."""
    assert found.gradients.keys() == expected.gradients.keys()
    pairs = [(value, expected.gradients[key]) for key, value in found.gradients.items()]
    largest = max(float(value.abs().max()) for _, value in pairs)
    of_gradients = max(float((value - other).abs().max()) for value, other in pairs) / largest
    of_losses = float((found.losses - expected.losses).abs().max() / expected.losses.abs().max())
    differences = [max(values) for values in zip(*everywhere((of_losses, of_gradients)), strict=True)]
    assert max(differences) < 1e-6, (name, differences)
    note_differences(name, differences)


def compare_with_local_layers(layout: str, *cases: str, fused: bool = False) -> None:
    """Give the stand-in's layers the weights of local ones, by name. Fused gradients go to ``main_grad``."""
    for case in cases:
        # Latent attention is undivided: local layers divide the down-projections over ranks, and the
        # rotary part of keys then gets gradients from the heads of one rank only.
        of_local_layers = "1 rank" if "latent" in case else layout
        local = build(case, "local", of_local_layers, apply_rope_fusion=False, moe_permute_fusion=False)
        losses, of_local = outcome(local)
        model = build(case, TE, layout, gradient_accumulation_fusion=fused)
        weights = parts(dict(local.named_parameters()), model)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[local_name(name)])
            if fused:
                parameter.main_grad = torch.zeros_like(parameter)
                parameter.grad_added_to_main_grad = False
        name = f"{case}, {layout}" + ", gradients in main_grad" * fused
        check(name, outcome(model), Outcome(losses, parts(of_local, model)))
        if fused:
            assert sum(p.grad_added_to_main_grad for p in model.parameters()) >= 2 * 4


def compare_packed_with_one_by_one(layout: str, case: str) -> None:
    model = build(case, TE, layout)
    lengths = [6, 2, 10, 4]
    samples = [torch.arange(length + 1) * (3 + length) % 64 for length in lengths]
    places = [torch.arange(length)[None] for length in lengths]

    def losses_at(tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, **packing: Any) -> Any:
        losses = model(tokens[None], positions, None, labels=labels[None], **packing)
        losses.sum().backward()
        return losses.detach()[0]

    pairs = [(sample[:-1], sample[1:]) for sample in samples]
    alone = [losses_at(*pair, positions) for pair, positions in zip(pairs, places, strict=True)]
    expected = outcome(model, torch.cat(alone))
    model.zero_grad(set_to_none=True)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = PackedSeqParams("thd", edges, edges, max_seqlen_q=10, max_seqlen_kv=10)
    tokens, labels = map(torch.cat, zip(*pairs, strict=True))
    packed = losses_at(tokens, labels, torch.cat(places, 1), packed_seq_params=packing)
    check(f"{case}, {layout}, packed samples against each alone", outcome(model, packed), expected)


def compare_split_with_whole_sequences(packed: bool) -> None:
    """Cut sequences of 16 tokens, or packed ones with padding, over two ranks."""
    lengths, slots = ([6, 3, 2], [8, 4, 4]) if packed else ([16], [16])
    edges, padded = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in (lengths, slots))
    packing = {}
    if packed:
        values = PackedSeqParams("thd", edges, edges, padded, padded, max_seqlen_q=8, max_seqlen_kv=8)
        packing = {"packed_seq_params": values}
    starts = zip(padded.tolist(), lengths, strict=False)
    valid = torch.cat([torch.arange(start, start + length) for start, length in starts])
    tokens, labels = torch.arange(16)[None] * 5 % 64, torch.arange(16)[None] * 7 % 64

    def losses_at(model: Any, places: torch.Tensor) -> torch.Tensor:
        losses = model(tokens[:, places], places[None], None, labels=labels[:, places], **packing)
        (losses[0] * torch.isin(places, valid)).sum().backward()
        return losses.detach()[0]

    undivided = build("grouped queries", TE)
    expected = outcome(undivided, losses_at(undivided, torch.arange(16)))
    model = build("grouped queries", TE, "CP 2")
    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    model.load_state_dict(undivided.state_dict())
    pieces = [range(start, start + slot) for start, slot in zip(padded.tolist(), slots, strict=False)]
    quarters = [torch.tensor(piece).chunk(4) for piece in pieces]
    places = torch.cat([torch.cat([quarter[rank], quarter[3 - rank]]) for quarter in quarters])
    losses, is_valid = losses_at(model, places), torch.isin(places, valid)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    name = f"grouped queries, CP 2{', packed samples' * packed} against 1 rank"
    expected = expected._replace(losses=expected.losses[places][is_valid])
    check(name, outcome(model, losses[is_valid]), expected)


@on_ranks(2, transformer_engine=True)
def test_layers_on_two_ranks() -> None:
    """Several cases in one test, since fresh interpreters import Megatron for seconds."""
    compare_with_local_layers("TP 2", "grouped queries", "latent attention", "zero-centered norms")
    compare_packed_with_one_by_one("TP 2", "grouped queries")
    compare_with_local_layers("EP 2", "grouped experts, fused permutation", fused=True)
    compare_split_with_whole_sequences(packed=True)


@pytest.mark.slow
@on_ranks(2, transformer_engine=True)
def test_more_layouts_on_two_ranks() -> None:
    compare_with_local_layers("TP 2", "dense", "grouped experts", "zero-centered norms with means")
    compare_with_local_layers("TP 2", "grouped queries", "latent attention", fused=True)
    compare_with_local_layers("EP 2", "grouped experts")
    for layout in ("TP 2, expert TP 1", "TP 2, EP 2"):
        compare_with_local_layers(layout, "grouped experts", "grouped experts, fused permutation")
    compare_split_with_whole_sequences(packed=False)


@pytest.mark.slow
@on_ranks(1, transformer_engine=True)
def test_layers_on_one_rank() -> None:
    known = vars(MLATransformerConfig)["__dataclass_fields__"].keys()  # softmax_type from 0.15 on
    cases = [case for case in CASES if CASES[case][1].keys() <= known]
    compare_with_local_layers("1 rank", *cases)
    for case in ("grouped queries", "fused RoPE"):
        compare_packed_with_one_by_one("1 rank", case)
    # What Megatron knows to be missing.
    absent = ("te_parallel_cross_entropy", "te_general_gemm", "get_cpu_offload_context", "SplitAlongDim")
    assert [name for name in absent if getattr(extension, name) is not None] == []
    assert not cuda_graphs.HAVE_TE_GRAPHS
    assert extension.fused_permute_with_probs and extension.fused_apply_rotary_pos_emb_thd


@pytest.mark.slow
@on_ranks(2, transformer_engine=True)
def test_dropout_is_the_same_in_recomputations() -> None:
    tiny_model(**LAYOUTS["TP 2"]).initialize()
    rates = {"attention_dropout": 0.2, "hidden_dropout": 0.1}

    def run(**options: Any) -> list[Any]:
        tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
        block = build("dense", TE, "TP 2", initializes=False, **options).decoder
        x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(5), requires_grad=True)
        y = block(x, None)
        y.square().sum().backward()
        after = torch.rand(1) + sum(torch.cuda.get_rng_state().float())
        return [y.detach(), x.grad, *(p.grad for p in block.parameters()), after]

    expected = run(**rates)
    assert all(map(torch.equal, run(**rates, **RECOMPUTE), expected))
    assert not torch.equal(run()[0], expected[0])


@pytest.mark.slow
@on_ranks(2, transformer_engine="2.13.0")
def test_expert_norm_of_grouped_experts() -> None:
    local = build("grouped experts", "local", "TP 2", moe_permute_fusion=False)
    te, norms = build("grouped experts", TE, "TP 2"), []
    weights = parts({name: weight.detach().clone() for name, weight in local.named_parameters()}, te)
    for name, parameter in te.named_parameters():
        parameter.data.copy_(weights[local_name(name)])
    with applied("expert-norm"):
        for module in (local, te):
            tiny = tiny_model(tp=2, overlap_param_gather=False)
            (model,), optimizer = tiny.in_training(module.config, [module])
            losses_of(model)
            finalize_model_grads([model])
            norms.append(float(optimizer.step()[1]))
    assert norms[1] == pytest.approx(norms[0], rel=2e-5)
