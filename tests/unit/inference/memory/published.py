"""Configurations of published models, cut down to what counts, and how many parameters each has.

``published`` is what the publisher states, in billions, rounded as there. ``transformers`` is the count of
the reference implementation of transformers 5.24, built on the meta device. ``beyond_megatron`` is what of it
Megatron's ``GPTModel`` does not have. docs/memory.md has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Published(NamedTuple):
    config: Mapping[str, Any]
    published: float
    transformers: int
    beyond_megatron: int = 0
    #: Half of the last digit of ``published``, in billions, if that is more than 0.1%.
    rounding: float = 0.0


_QWEN_VOCABULARY = 151936
_GLM_VOCABULARY = 151552

MODELS = {
    "GLM-4-9B-0414": Published(
        {
            "model_type": "glm4",
            "num_hidden_layers": 40,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": _GLM_VOCABULARY,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        9,
        9_400_279_040,
        40 * 2 * 4096,  # two post-norms per layer
        rounding=0.5,
    ),
    "GLM-4.5-Air": Published(
        {
            "model_type": "glm4_moe",
            "num_hidden_layers": 46,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": _GLM_VOCABULARY,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        106,
        106_852_245_504,
        rounding=1.0,  # cut, not rounded
    ),
    "gpt-oss-120b": Published(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "num_local_experts": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        116.83,
        116_829_156_672,
    ),
    "gpt-oss-20b": Published({}, 20.91, 20_914_757_184),
    "Qwen1.5-MoE-A2.7B": Published(
        {
            "model_type": "qwen2_moe",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": _QWEN_VOCABULARY,
            "tie_word_embeddings": False,
            "num_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
        },
        14.3,
        14_315_784_192,
        rounding=0.05,
    ),
    "DeepSeek-V2-Lite": Published(
        {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 102400,
            "tie_word_embeddings": False,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        15.7,
        15_706_484_224,
    ),
    "Phi-3-mini-4k": Published(
        {
            "model_type": "phi3",
            "num_hidden_layers": 32,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
            "pad_token_id": 32000,
        },
        3.8,
        3_821_079_552,
        rounding=0.05,
    ),
    "Qwen3-Next-80B-A3B": Published(
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": _QWEN_VOCABULARY,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        80,
        79_674_391_296,
        rounding=0.5,
    ),
    "Mistral-Small-3.1-24B": Published(
        {
            "model_type": "mistral3",
            "text_config": {
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 131072,
                "tie_word_embeddings": False,
            },
        },
        24,
        23_572_403_200,
        rounding=0.5,
    ),
}
MODELS["gpt-oss-20b"] = MODELS["gpt-oss-20b"]._replace(
    config={
        **MODELS["gpt-oss-120b"].config,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
)
