"""Descriptions of models from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidInputError
from .model import GPTDescription

_Config = Mapping[str, Any]

_KINDS: tuple[str, ...] = ("deepseek_v3", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral")
_KINDS += ("qwen2", "qwen3", "qwen3_moe")
_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_GROUPED_ATTENTION = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
_NAMES_OF_KIND = {
    "mixtral": {"num_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"},
    "qwen3_moe": {"num_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size"},
    "deepseek_v3": {
        "num_experts": "n_routed_experts",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
}
# A field that config.json lacks has the default of Hugging Face's class for its kind. Megatron has the same
# default for these fields and kinds only. Any other missing field must be given.
_DEFAULTS_AGREE = {
    "num_query_groups": ("llama",),
    "kv_channels": ("llama", "mistral", "mixtral", "qwen2"),
}


def description_from_hf_config(config: _Config, **overrides: Any) -> GPTDescription:
    """Describe the language model of a Hugging Face configuration.

    Of a configuration for text and images only the text part counts. Gemma's post-norms are left out, since
    Megatron's ``GPTModel`` has none; they are a few thousandths of a percent of the parameters.

    Args:
        config: the content of ``config.json``.
        overrides: fields of :class:`GPTDescription`, in place of those of the file or where it has none.

    Raises:
        InvalidInputError: an architecture that is not known, parts that ``GPTModel`` does not have, or fields
            that neither the file nor ``overrides`` give.
    """
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"a configuration is a JSON object, not a {type(config).__name__}")
    text = config.get("text_config") or config
    if "num_layers" in overrides:  # which layers are dense or sparse depends on their number
        text = {**text, "num_hidden_layers": overrides["num_layers"]}
    kind = str(text.get("model_type", config.get("model_type")))
    if kind not in _KINDS:
        raise InvalidInputError(
            f"model_type is {kind!r}; known are {', '.join(_KINDS)}. "
            "Describe the model by Megatron's fields instead (--set)"
        )
    if beyond := _beyond_gpt_model(text, kind):
        raise InvalidInputError(f"{kind}: {', '.join(beyond)}: Megatron's GPTModel has no such thing")
    attention = {} if kind == "deepseek_v3" else _GROUPED_ATTENTION
    names = _NAMES | attention | _NAMES_OF_KIND.get(kind, {})
    fields = {ours: text[theirs] for ours, theirs in names.items() if text.get(theirs) is not None}
    # Where the file does not say it, only Gemma ties the embedding and the output layer.
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma")))
    # All kinds have a gated MLP, RMSNorm and rotary embeddings, and no biases except those of attention.
    fields |= {
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": not tied,
        "add_qkv_bias": kind == "qwen2" or bool(text.get("attention_bias")),
        "qk_layernorm": kind in ("deepseek_v3", "gemma3_text", "qwen3", "qwen3_moe"),
        "mtp_num_layers": text.get("num_nextn_predict_layers"),
    }
    if kind == "qwen3_moe":
        fields["moe_layer_freq"] = _sparse_layers(text)
    if kind == "deepseek_v3":
        fields |= _beside_latent_attention(text)
    fields |= overrides
    missing = [name for name in names if name not in fields and kind not in _DEFAULTS_AGREE.get(name, ())]
    if missing:
        listed = ", ".join(f"{names[name]} (--set {name}=...)" for name in missing)
        raise InvalidInputError(
            f"the configuration leaves {listed} to the defaults of {kind}; pass the numbers"
        )
    return GPTDescription(**fields)


def _beyond_gpt_model(text: _Config, kind: str) -> list[str]:
    beyond = ["mlp_bias"] if text.get("mlp_bias") else []
    if text.get("attention_bias") and not kind.startswith("qwen"):
        beyond.append("attention_bias")
    layers = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    return beyond + sorted(layers)


def _sparse_layers(text: _Config) -> list[int]:
    dense, step = set(text.get("mlp_only_layers") or ()), text.get("decoder_sparse_step", 1)
    layers = range(text.get("num_hidden_layers", 0))
    return [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]


def _beside_latent_attention(text: _Config) -> dict[str, Any]:
    layers = text.get("num_hidden_layers", 0)
    dense = min(text.get("first_k_dense_replace", 0), layers)
    shared_experts = (text.get("n_shared_experts") or 0) * text.get("moe_intermediate_size", 0)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": text.get("q_lora_rank"),
        "moe_shared_expert_intermediate_size": shared_experts or None,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
    }
