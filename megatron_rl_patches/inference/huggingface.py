"""From a Hugging Face ``config.json`` to the description of the same model in Megatron's terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInputError
from .gpt import GPTDescription

Fields = dict[str, Any]
Config = Mapping[str, Any]

# What all of these have in common: gated MLP, RMSNorm, rotary embeddings, no biases but where said.
_COMMON: Fields = {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"}
_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
}
# Where a file is silent, its library's default counts, which is what Megatron's is for these only.
_DEFAULTS_AGREE = {
    "num_query_groups": ("llama", "deepseek_v3"),
    "kv_channels": ("llama", "mistral", "mixtral", "qwen2", "deepseek_v3"),
}


def description_from_hf_config(config: Config, **overrides: Any) -> GPTDescription:
    """Describe the language model of a Hugging Face configuration.

    The text part of a configuration for text and images is taken. Post-norms of Gemma, a few thousandths of a
    percent of its parameters, are left out, as Megatron's ``GPTModel`` has none.

    Args:
        config: the content of ``config.json``.
        overrides: fields of :class:`GPTDescription`; they also stand in for what the file lacks.

    Raises:
        InvalidInputError: an architecture that is not known, parts that ``GPTModel`` does not have, or fields
            that neither the file nor ``overrides`` give.
    """
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"a configuration is a JSON object, not a {type(config).__name__}")
    text = config.get("text_config") or config
    if "num_layers" in overrides:  # on which patterns of layers depend
        text = {**text, "num_hidden_layers": overrides["num_layers"]}
    kind = str(text.get("model_type", config.get("model_type")))
    if kind not in _ARCHITECTURES:
        raise InvalidInputError(
            f"model_type is {kind!r}; known are {', '.join(sorted(_ARCHITECTURES))}. "
            "Describe the model by the flags or fields of Megatron instead"
        )
    if strange := _beyond_gpt_model(text, kind):
        raise InvalidInputError(f"{kind}: {', '.join(strange)}: Megatron's GPTModel has no such thing")
    fields = _COMMON | {ours: text[theirs] for ours, theirs in _NAMES.items() if text.get(theirs) is not None}
    # Only Gemma ties them where the file is silent.
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma")))
    fields["untie_embeddings_and_output_weights"] = not tied
    fields |= _ARCHITECTURES[kind](text)
    fields |= overrides
    if missing := [
        name for name in _NAMES if name not in fields and kind not in _DEFAULTS_AGREE.get(name, ())
    ]:
        names = ", ".join(f"{_NAMES[name]} (--{name.replace('_', '-')})" for name in missing)
        raise InvalidInputError(
            f"the configuration leaves {names} to the defaults of {kind}; give the numbers"
        )
    return GPTDescription(**fields)


def _beyond_gpt_model(text: Config, kind: str) -> list[str]:
    strange = [name for name in ("mlp_bias",) if text.get(name)]
    if text.get("attention_bias") and not kind.startswith("qwen"):
        strange.append("attention_bias")
    layers = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    return strange + sorted(layers)


def _dense(text: Config) -> Fields:
    return {}


def _qwen2(text: Config) -> Fields:
    return {"add_qkv_bias": True}


def _qwen3(text: Config) -> Fields:
    return {"qk_layernorm": True, "add_qkv_bias": bool(text.get("attention_bias"))}


def _qwen3_moe(text: Config) -> Fields:
    dense, step = set(text.get("mlp_only_layers") or ()), text.get("decoder_sparse_step", 1)
    layers = range(text.get("num_hidden_layers", 0))
    return {
        **_qwen3(text),
        "num_experts": _required(text, "num_experts"),
        "moe_ffn_hidden_size": _required(text, "moe_intermediate_size"),
        "moe_layer_freq": [int(layer not in dense and (layer + 1) % step == 0) for layer in layers],
    }


def _mixtral(text: Config) -> Fields:
    return {
        "num_experts": _required(text, "num_local_experts"),
        "moe_ffn_hidden_size": _required(text, "intermediate_size"),
    }


def _deepseek_v3(text: Config) -> Fields:
    layers = text.get("num_hidden_layers", 0)
    dense = min(text.get("first_k_dense_replace", 0), layers)
    shared, width = text.get("n_shared_experts") or 0, _required(text, "moe_intermediate_size")
    return {
        "num_query_groups": None,
        "kv_channels": None,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": text.get("q_lora_rank"),
        "kv_lora_rank": _required(text, "kv_lora_rank"),
        "qk_head_dim": _required(text, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": _required(text, "qk_rope_head_dim"),
        "v_head_dim": _required(text, "v_head_dim"),
        "num_experts": _required(text, "n_routed_experts"),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared * width or None,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
    }


def _required(text: Config, name: str) -> Any:
    if name not in text:
        raise InvalidInputError(f"the configuration does not say {name}")
    return text[name]


_ARCHITECTURES: dict[str, Callable[[Config], Fields]] = {
    "llama": _dense,
    "mistral": _dense,
    "mixtral": _mixtral,
    "gemma": _dense,
    "gemma2": _dense,
    "gemma3_text": _qwen3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
