"""Layers of the stand-in of TransformerEngine against Megatron's local layers with the same weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches.testing import cpu_backend
from tests.ranks import on_ranks

#: Megatron must not be imported before the stand-in is in place, and forked ranks have imported it.
FRESH = {"PYTHONWARNINGS": "ignore"}
DENSE: dict[str, Any] = {"add_bias_linear": True}
LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """As the package's norm with mean and bias, since Megatron's own one refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def initialize(**sizes: Any) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(3)


def build(options: dict[str, Any], transformer_engine: bool) -> Any:
    """Build a model of two layers in the groups that are initialized."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        **options,
    )
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm as norm

        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        from megatron_rl_patches.testing.tiny_layers import SequenceParallelNorm

        norm = SequenceParallelNorm if config.normalization == "LayerNorm" else SequenceParallelRMSNorm
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=norm),
        vocab_size=64,
        max_sequence_length=32,
        position_embedding_type="learned_absolute" if config.add_bias_linear else "rope",
        share_embeddings_and_output_weights=False,
    )
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
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return re.sub(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)", r"experts.local_experts.\3.\1.\2", name)


def losses_of(model: Any) -> torch.Tensor:
    from megatron.core import parallel_state

    generator = torch.Generator()
    generator.manual_seed(7 + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, 64, (2, 17), generator=generator)
    mask = torch.ones(16, 16).triu(1).bool()[None, None]
    losses = model(tokens[:, :-1], torch.arange(16)[None].expand(2, -1), mask, labels=tokens[:, 1:])
    (losses * torch.linspace(0.5, 1.5, 32).view_as(losses)).sum().backward()
    return losses.detach()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return gradients by local names, summed where the parameter is marked for sequence parallelism."""
    from megatron.core import parallel_state

    found = {}
    for name, parameter in model.named_parameters():
        fused = getattr(parameter, "grad_added_to_main_grad", False)
        value = (parameter.main_grad if fused else parameter.grad).clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(value, group=parallel_state.get_tensor_model_parallel_group())
        found[local_name(name)] = value
    return found


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that gradients differ by less than 1e-6 of the largest one."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    differences = {name: float((value - expected[name]).abs().max()) for name, value in found.items()}
    print(f"gradients differ by {max(differences.values()):.1e}; the largest is {largest:.2f}")
    assert max(differences.values()) < 1e-6 * largest


def assert_equal_to_local_layers(options: dict[str, Any], fused: bool = False) -> None:
    plain = {"moe_grouped_gemm": False, "apply_rope_fusion": False}
    local = build({**options, **plain}, transformer_engine=False)
    model = build({**options, "gradient_accumulation_fusion": fused}, transformer_engine=True)
    weights = dict(local.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[local_name(name)])
            if fused:
                parameter.main_grad = torch.zeros_like(parameter)
                parameter.grad_added_to_main_grad = False
    expected, losses = losses_of(local), losses_of(model)
    print(f"losses differ by {float((losses - expected).abs().max()):.1e}")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert_close(gradients(model), gradients(local))
    if fused:
        products = [name for name, p in model.named_parameters() if p.grad_added_to_main_grad]
        assert len(products) >= 2 * 4, products


def assert_packed_equals_one_by_one(**options: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    model = build({**LLAMA, **options}, transformer_engine=True)
    lengths = [6, 2, 10, 4]
    samples = [torch.arange(length + 1) * (3 + length) % 64 for length in lengths]
    expected = []
    for sample in samples:
        positions = torch.arange(len(sample) - 1)[None]
        losses = model(sample[None, :-1], positions, None, labels=sample[None, 1:])
        losses.sum().backward()
        expected.append(losses.detach()[0])
    one_by_one = gradients(model)
    model.zero_grad(set_to_none=True)
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    packing = PackedSeqParams("thd", edges, edges, max_seqlen_q=10, max_seqlen_kv=10)
    tokens, labels = (torch.cat([s[part] for s in samples])[None] for part in (slice(-1), slice(1, None)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=packing)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach()[0], torch.cat(expected), rtol=1e-6, atol=1e-6)
    assert_close(gradients(model), one_by_one)


def assert_split_sequences_equal_whole_ones(packed: bool) -> None:
    """Cut sequences of 16 tokens, or packed ones with padding, over two ranks."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

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

    initialize()
    whole = build(LLAMA, transformer_engine=True)
    expected = losses_at(whole, torch.arange(16))
    initialize(context_parallel_size=2)
    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    model = build(LLAMA, transformer_engine=True)
    model.load_state_dict(whole.state_dict())
    pieces = [range(start, start + slot) for start, slot in zip(padded.tolist(), slots, strict=False)]
    quarters = [torch.tensor(piece).chunk(4) for piece in pieces]
    places = torch.cat([torch.cat([quarter[rank], quarter[3 - rank]]) for quarter in quarters])
    losses, kept = losses_at(model, places), torch.isin(places, valid)
    torch.testing.assert_close(losses[kept], expected[places][kept], rtol=1e-6, atol=1e-6)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    assert_close(gradients(model), gradients(whole))


@on_ranks(2, megatron=False, env=FRESH)
def test_layers_on_two_ranks() -> None:
    """Several cases in one test, since fresh interpreters import Megatron for seconds."""
    with cpu_backend(transformer_engine=True):
        initialize(tensor_model_parallel_size=2)
        assert_equal_to_local_layers(LLAMA)
        assert_packed_equals_one_by_one()
        initialize(expert_model_parallel_size=2)
        assert_equal_to_local_layers(MOE, fused=True)
        assert_split_sequences_equal_whole_ones(packed=True)


@pytest.mark.slow
@on_ranks(2, megatron=False, env=FRESH)
def test_more_layouts_on_two_ranks() -> None:
    with cpu_backend(transformer_engine=True):
        initialize(tensor_model_parallel_size=2)
        assert_equal_to_local_layers(DENSE)
        assert_equal_to_local_layers(LLAMA, fused=True)
        assert_split_sequences_equal_whole_ones(packed=False)
        for experts in (1, 2):
            initialize(tensor_model_parallel_size=2, expert_tensor_parallel_size=experts)
            assert_equal_to_local_layers(MOE)
        initialize(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
        assert_equal_to_local_layers(MOE)


@pytest.mark.slow
@on_ranks(1, megatron=False, env=FRESH)
def test_layers_on_one_rank() -> None:
    with cpu_backend(transformer_engine=True):
        initialize()
        for options in (DENSE, LLAMA, MOE):
            assert_equal_to_local_layers(options)
        assert_equal_to_local_layers({**LLAMA, "apply_rope_fusion": True})
        assert_packed_equals_one_by_one(apply_rope_fusion=True)
        assert_packed_equals_one_by_one()


@pytest.mark.slow
@on_ranks(2, megatron=False, env=FRESH)
def test_steps_of_the_distributed_optimizer() -> None:
    """The norm of gradients depends on the marks of parameters, and DDP on gradients in ``main_grad``."""
    with cpu_backend(transformer_engine=True):
        for options, sizes in ((LLAMA, {}), (MOE, {"expert_tensor_parallel_size": 2})):
            initialize(tensor_model_parallel_size=2, **sizes)
            local = build({**options, "moe_grouped_gemm": False}, transformer_engine=False)
            model = build({**options, "gradient_accumulation_fusion": True}, transformer_engine=True)
            weights = dict(local.named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[local_name(name)])
            torch.testing.assert_close(steps(model), steps(local), rtol=2e-5, atol=0)


def steps(module: Any) -> list[list[float]]:
    """Train for three steps; return the loss and the norm of gradients of each."""
    from megatron.core.distributed import finalize_model_grads

    from megatron_rl_patches.testing import tiny_model

    (model,), optimizer = tiny_model(tp=2, overlap_param_gather=False).in_training(module.config, [module])
    found = []
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = losses_of(model)
        finalize_model_grads([model])
        found.append([float(losses.mean()), float(optimizer.step()[1])])
    return found
