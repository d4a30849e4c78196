"""Configurations of published models, cut down to what counts, in Megatron's terms."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference.memory.huggingface import fields_from_hf_config

from .published import DEEPSEEK_V3, LLAMA, QWEN3_MOE, dense


def fields(model: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(model.get(name) for name in names)


def test_attention() -> None:
    llama = fields_from_hf_config(LLAMA)
    assert fields(llama, "num_layers", "hidden_size", "ffn_hidden_size") == (32, 4096, 14336)
    assert fields(llama, "num_attention_heads", "num_query_groups", "kv_channels") == (32, 8, None)
    assert fields(llama, "gated_linear_unit", "normalization") == (True, "RMSNorm")
    assert not any(fields(llama, "share_embeddings_and_output_weights", "add_bias_linear", "add_qkv_bias"))
    qwen2 = fields_from_hf_config({**LLAMA, "model_type": "qwen2"})
    assert qwen2["add_qkv_bias"] and not {"qk_layernorm"} & (llama.keys() | qwen2.keys())
    qwen3 = fields_from_hf_config({**LLAMA, "model_type": "qwen3", "head_dim": 128})
    assert fields(qwen3, "qk_layernorm", "add_qkv_bias", "kv_channels") == (True, False, 128)
    latent = fields_from_hf_config(DEEPSEEK_V3)
    assert latent["multi_latent_attention"]
    assert fields(latent, "q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim") == (1536, 512, 64)


def test_experts() -> None:
    names = "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq"
    assert fields(fields_from_hf_config(QWEN3_MOE), *names) == (128, 768, [1] * 48)
    sparse = {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert fields_from_hf_config(sparse)["moe_layer_freq"] == [0, 1, 0, 0]
    mixtral = fields_from_hf_config({**LLAMA, "model_type": "mixtral", "num_local_experts": 8})
    assert fields(mixtral, *names) == (8, 14336, None)
    deepseek = fields_from_hf_config(DEEPSEEK_V3)
    assert deepseek["moe_shared_expert_intermediate_size"] == 2048
    assert deepseek["moe_layer_freq"] == [0] * 3 + [1] * 58


def test_layers_for_multi_token_prediction_are_counted_unless_set_to_0() -> None:
    published = DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}
    assert fields_from_hf_config(published)["mtp_num_layers"] == 1
    assert fields_from_hf_config(published, mtp_num_layers=0)["mtp_num_layers"] == 0
    without = fields_from_hf_config(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0})
    assert without == fields_from_hf_config(DEEPSEEK_V3)


def test_the_text_part_counts_and_flags_fill_in() -> None:
    # As published: sizes that are the library's defaults are left out.
    text = dense("gemma3_text", 62, 5376, 21504, 32, 16, 0, head_dim=128)
    del text["vocab_size"], text["tie_word_embeddings"]
    gemma = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    message = r"vocab_size \(--set vocab_size=...\) to the defaults of gemma3_text"
    with pytest.raises(InvalidInputError, match=message):
        fields_from_hf_config(gemma)
    model = fields_from_hf_config(gemma, vocab_size=262208)
    assert (model["hidden_size"], model["vocab_size"], model["kv_channels"]) == (5376, 262208, 128)
    assert model["qk_layernorm"] and model["share_embeddings_and_output_weights"]


def test_flags_come_first() -> None:
    assert fields_from_hf_config(LLAMA, num_layers=2)["num_layers"] == 2
    assert len(fields_from_hf_config(QWEN3_MOE, num_layers=2)["moe_layer_freq"]) == 2
    assert fields_from_hf_config({**LLAMA, "text_config": None}) == fields_from_hf_config(LLAMA)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "model_type": "bert"}, "model_type is 'bert'; known are deepseek_v2"),
        ({}, "model_type is 'None'"),
        ([LLAMA], "a JSON object, not a list"),
        ({**LLAMA, "hidden_size": "large"}, "hidden_size is large in the configuration; expected a whole"),
        ({**LLAMA, "hidden_size": [1]}, "hidden_size is "),
        ({**LLAMA, "hidden_size": math.inf}, "hidden_size is inf"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"text_config": [LLAMA]}, "another type"),
        ({**QWEN3_MOE, "mlp_only_layers": 1}, "another type"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
        ({**LLAMA, "attention_bias": True}, "attention_bias"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["linear_attention"] * 32},
            "linear_attention: Megatron's GPTModel has no such thing",
        ),
        ({**LLAMA, "model_type": "qwen3"}, r"head_dim \(--set kv_channels=...\)"),
        ({name: value for name, value in LLAMA.items() if name != "hidden_size"}, "hidden_size"),
        ({name: value for name, value in QWEN3_MOE.items() if name != "num_experts"}, "num_experts"),
    ],
)
def test_what_cannot_be_described(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        fields_from_hf_config(config)


def test_bad_values_of_any_field_are_refused_by_name() -> None:
    """Fields are made or refused; nothing else is raised, whatever a field holds."""
    for config in (LLAMA, QWEN3_MOE, DEEPSEEK_V3, {**QWEN3_MOE, "model_type": "qwen3_next"}):
        for name in [*config, "full_attention_interval", "layer_types", "num_nextn_predict_layers"]:
            for value in (0, -1, 2**70, math.nan, math.inf, 1.5, "x", [], {}, [None], True, None):
                with suppress(InvalidInputError):
                    fields_from_hf_config({**config, name: value})


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_megatron_bridge_translates_the_models_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in in the shape of Megatron-Bridge, whose configs are a TransformerConfig and more."""
    from megatron.core.transformer import TransformerConfig

    class Bridge:
        @classmethod
        def from_hf_config(cls, config: dict[str, Any]) -> Bridge:
            if config["model_type"] != "llama":
                raise ValueError("not supported")
            return cls()

        def to_megatron_provider(self, load_weights: bool) -> Any:
            assert not load_weights
            config = TransformerConfig(num_layers=3, hidden_size=64, num_attention_heads=4)
            config.vocab_size, config.share_embeddings_and_output_weights = 100, False
            return config

    config_class = SimpleNamespace(for_model=lambda **text: text)
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(AutoBridge=Bridge))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoConfig=config_class))
    model = fields_from_hf_config(LLAMA, vocab_size=200)
    assert (model["num_layers"], model["ffn_hidden_size"], model["vocab_size"]) == (3, 256, 200)
    assert not model["share_embeddings_and_output_weights"]
    assert fields_from_hf_config(QWEN3_MOE)["num_layers"] == 48
