"""Configurations of published models, cut down to what counts, and how many parameters each has.

docs/memory.md has the same table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Config = dict[str, Any]


def dense(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def routed(experts: int, ffn: int, shared: int, first_dense: int) -> Config:
    """Return what DeepSeek and GLM say of their experts."""
    sizes = {"n_routed_experts": experts, "n_shared_experts": shared, "moe_intermediate_size": ffn}
    return sizes | {"first_k_dense_replace": first_dense}


def sparse(experts: int, ffn: int, **more: Any) -> Config:
    """Return what Qwen says of its experts."""
    return {"num_experts": experts, "moe_intermediate_size": ffn, "decoder_sparse_step": 1, **more}


def latent(q_lora_rank: int | None) -> Config:
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return {"q_lora_rank": q_lora_rank, "kv_lora_rank": 512, **heads}


def gpt_oss(layers: int, experts: int) -> Config:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    more = {"head_dim": 64, "attention_bias": True, "num_local_experts": experts, "layer_types": kinds}
    return dense("gpt_oss", layers, 2880, 2880, 64, 8, 201088, **more)


LLAMA = dense("llama", 32, 4096, 14336, 32, 8, 128256, attention_bias=False)  # Llama-3.1-8B
QWEN3_MOE = dense("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, head_dim=128, attention_bias=False)
QWEN3_MOE |= sparse(128, 768, mlp_only_layers=[])  # Qwen3-30B-A3B
DEEPSEEK_V3 = dense("deepseek_v3", 61, 7168, 18432, 128, 128, 129280) | latent(1536) | routed(256, 2048, 1, 3)
QWEN3_NEXT = dense("qwen3_next", 48, 2048, 5120, 16, 2, 151936, head_dim=256, attention_bias=False)
QWEN3_NEXT |= sparse(512, 512, shared_expert_intermediate_size=512, full_attention_interval=4)
QWEN3_NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN3_NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
GLM_AIR = dense("glm4_moe", 46, 4096, 10944, 96, 8, 151552, head_dim=128, attention_bias=True)
GLM_AIR |= routed(128, 1408, 1, 1) | {"use_qk_norm": False}
QWEN_MOE = dense("qwen2_moe", 24, 2048, 5632, 16, 16, 151936)
QWEN_MOE |= sparse(60, 1408, shared_expert_intermediate_size=5632)
DEEPSEEK_LITE = dense("deepseek_v2", 27, 2048, 10944, 16, 16, 102400) | latent(None) | routed(64, 1408, 2, 1)
MISTRAL = dense("mistral", 40, 5120, 32768, 32, 8, 131072, head_dim=128)
GLM = dense("glm4", 40, 4096, 13696, 32, 2, 151552, head_dim=128, attention_bias=True)
PHI = dense("phi3", 32, 3072, 8192, 32, 32, 32064, pad_token_id=32000)


class Published(NamedTuple):
    """What is said of a model.

    Attributes:
        published: what the publisher states, in billions, rounded as there.
        transformers: the count of the reference implementation of transformers 5.24, on the meta device.
        rounding: half of the last digit of ``published``, in billions, if that is more than 0.1%.
        beyond_megatron: what of it Megatron's ``GPTModel`` does not have.
    """

    config: Config
    published: float
    transformers: int
    rounding: float = 0.0
    beyond_megatron: int = 0


MODELS = {
    "GLM-4-9B-0414": Published(GLM, 9, 9_400_279_040, 0.5, 40 * 2 * 4096),  # two post-norms per layer
    "GLM-4.5-Air": Published(GLM_AIR, 106, 106_852_245_504, 1.0),  # cut, not rounded
    "gpt-oss-120b": Published(gpt_oss(36, 128), 116.83, 116_829_156_672),
    "gpt-oss-20b": Published(gpt_oss(24, 32), 20.91, 20_914_757_184),
    "Qwen1.5-MoE-A2.7B": Published(QWEN_MOE, 14.3, 14_315_784_192, 0.05),
    "DeepSeek-V2-Lite": Published(DEEPSEEK_LITE, 15.7, 15_706_484_224),
    "Phi-3-mini-4k": Published(PHI, 3.8, 3_821_079_552, 0.05),
    "Qwen3-Next-80B-A3B": Published(QWEN3_NEXT, 80, 79_674_391_296, 0.5),
    "Mistral-Small-3.1-24B": Published(
        {"model_type": "mistral3", "text_config": MISTRAL}, 24, 23_572_403_200, 0.5
    ),
}
