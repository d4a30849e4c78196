"""A Hugging Face ``config.json`` as fields of Megatron's ``TransformerConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...common.text import one_line
from ...errors import InvalidInputError
from .estimate import fields_of

_Config = Mapping[str, Any]

#: Megatron's field -> Hugging Face's. A file may lack those with a question mark: the defaults are equal.
_NAMES = {name: name for name in ("hidden_size", "num_attention_heads", "vocab_size")}
_NAMES |= {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}
_GROUPS = {"num_query_groups": "num_key_value_heads"}
_GROUPED_ATTENTION = _GROUPS | {"kv_channels": "head_dim"}
_HEADS_OF_HIDDEN_SIZE = _GROUPS | {"kv_channels": "head_dim?"}
_LATENT_ATTENTION = {name: name for name in ("kv_lora_rank", "v_head_dim")}
_LATENT_ATTENTION |= {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"}
_EXPERTS = {"num_moe_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size"}
_LOCAL_EXPERTS = {"num_moe_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"}
_ROUTED_EXPERTS = _EXPERTS | {"num_moe_experts": "n_routed_experts"}
_SHARED_EXPERT = _EXPERTS | {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_DELTA_NET = {
    f"linear_{name}": f"linear_{name}?"
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
}
_QK_NORM = {"qk_layernorm": True}
_EXPERT_BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def _number(text: _Config, name: str, default: int | None = None, least: int = 1) -> Any:
    """Return a field that must be absent, null, or a whole number that is large enough."""
    if (value := text.get(name)) is None:
        return default
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or not least <= value <= 2**31:  # no dimension and no count of a model is larger
        expected = f"a whole number of at least {least}"
        raise InvalidInputError(f"{name} is {value!r:.40} in the configuration; expected {expected}")
    return int(value)


def _flag(text: _Config, name: str, default: bool = False) -> bool:
    value = default if text.get(name) is None else text[name]
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name} is {value!r:.40} in the configuration; expected true or false")
    return value


class _Family(NamedTuple):
    """What is peculiar to models of a ``model_type``: all have a gated MLP, RMSNorm and rotary embeddings."""

    names: Mapping[str, str] = _GROUPED_ATTENTION  # as ``_NAMES``, in addition to them
    fixed: Mapping[str, Any] = {}  # fields that have the same value in all of these models
    tied: bool = False  # whether embedding and output layer are tied if the file does not say it


_DEEPSEEK = _Family(_ROUTED_EXPERTS | _LATENT_ATTENTION, _QK_NORM | {"multi_latent_attention": True})
_LLAMA = _Family({"num_query_groups": "num_key_value_heads?", "kv_channels": "head_dim?"})
_MISTRAL = _Family(_HEADS_OF_HIDDEN_SIZE)
_QWEN2 = {"add_qkv_bias": True}
_SHARED_GATE = {"moe_shared_expert_gate": True}
_GATED_DELTA_NET = {"attention_output_gate": True, "experimental_attention_variant": "gated_delta_net"}
_FAMILIES = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK._replace(fixed={**_DEEPSEEK.fixed, **_EXPERT_BIAS}),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True),
    "gemma3_text": _Family(fixed=_QK_NORM, tied=True),
    "glm4": _Family(),
    "glm4_moe": _Family(_GROUPED_ATTENTION | _ROUTED_EXPERTS, _EXPERT_BIAS),
    "gpt_oss": _Family(
        _GROUPED_ATTENTION | _LOCAL_EXPERTS, {"add_bias_linear": True, "softmax_type": "learnable"}
    ),
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "mistral3": _MISTRAL,
    "mixtral": _Family(_HEADS_OF_HIDDEN_SIZE | _LOCAL_EXPERTS),
    "phi3": _LLAMA,
    "qwen2": _Family(_HEADS_OF_HIDDEN_SIZE, _QWEN2),
    "qwen2_moe": _Family(_HEADS_OF_HIDDEN_SIZE | _SHARED_EXPERT, _QWEN2 | _SHARED_GATE),
    "qwen3": _Family(fixed=_QK_NORM),
    "qwen3_moe": _Family(_GROUPED_ATTENTION | _EXPERTS, _QK_NORM),
    "qwen3_next": _Family(
        _GROUPED_ATTENTION | _SHARED_EXPERT | _DELTA_NET, _QK_NORM | _SHARED_GATE | _GATED_DELTA_NET
    ),
}


def _derived(text: _Config, names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields that follow from several of the file, as far as the family has these ``names``."""
    fields: dict[str, Any] = {}
    layers = range(1, _number(text, "num_hidden_layers", 0) + 1)
    if "num_moe_experts" in names:
        first = _number(text, "first_k_dense_replace", 0, least=0)
        dense, step = set(text.get("mlp_only_layers") or ()), _number(text, "decoder_sparse_step", 1)
        sparse = [n > first and n - 1 not in dense and n % step == 0 for n in layers]
        fields["moe_layer_freq"] = [*map(int, sparse)]
        if shared := _number(text, "n_shared_experts", 0, 0) * _number(text, "moe_intermediate_size", 0, 0):
            fields["moe_shared_expert_intermediate_size"] = shared
    if "kv_lora_rank" in names:
        fields["q_lora_rank"] = _number(text, "q_lora_rank")
    if "linear_conv_kernel_dim" in names:
        every, kinds = _number(text, "full_attention_interval", 4), text.get("layer_types")
        are_linear = [kind == "linear_attention" for kind in kinds or ()] or [n % every != 0 for n in layers]
        fields["linear_attention_freq"] = [*map(int, are_linear[: len(layers)])]
    return fields | (_QK_NORM if _flag(text, "use_qk_norm") else {})


def fields_from_hf_config(config: _Config, **overrides: Any) -> dict[str, Any]:
    """Return Megatron's fields for the language model of a Hugging Face configuration.

    Megatron-Bridge, if installed, translates the models that it knows; the table of this module the others.
    Of a configuration for text and images only the text part counts. The post-norms of Gemma and GLM-4,
    thousandths of a percent of the parameters, are left out: Megatron's ``GPTModel`` has none.

    Args:
        config: the content of ``config.json``.
        overrides: Megatron's fields, in place of those of the file or where it has none.

    Raises:
        InvalidInputError: an architecture that is not known, parts that ``GPTModel`` does not have, or fields
            that neither the file nor ``overrides`` give.
    """
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"a configuration is a JSON object, not a {type(config).__name__}")
    text, ties = config.get("text_config") or config, "tie_word_embeddings"
    try:
        if text.get(ties) is None and ties in config:  # null inside hides nothing
            text = {**text, ties: config[ties]}
        if "num_layers" in overrides:  # which layers are dense or sparse depends on their number
            text = {**text, "num_hidden_layers": overrides["num_layers"]}
        return {**(_by_bridge(text) or _by_table(config, text, overrides)), **overrides}
    except InvalidInputError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        reason = f"a field of the configuration has a value of another type: {one_line(error)}"
        raise InvalidInputError(reason) from None


def _by_bridge(text: _Config) -> dict[str, Any] | None:
    """Return the fields that Megatron-Bridge makes of it; ``None`` without it, or if it cannot."""
    try:
        from megatron.bridge import AutoBridge
        from transformers import AutoConfig  # type: ignore[import-not-found, unused-ignore]

        bridge = AutoBridge.from_hf_config(AutoConfig.for_model(**text))
        return fields_of(bridge.to_megatron_provider(load_weights=False))
    except Exception:  # of many kinds; the table translates the model, or says what is wrong
        return None


def _by_table(config: _Config, text: _Config, overrides: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(text.get("model_type") or config.get("model_type"))
    if kind not in _FAMILIES:
        raise InvalidInputError(
            f"model_type is {kind!r}; known are {', '.join(_FAMILIES)}. "
            "Describe the model by Megatron's fields instead (--set)"
        )
    beyond = ["mlp_bias"] if _flag(text, "mlp_bias") else []
    if _flag(text, "attention_bias") and not kind.startswith(("qwen", "glm4", "gpt_oss")):
        beyond.append("attention_bias")
    layers = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    layers -= {"linear_attention"} if kind == "qwen3_next" else set()
    if beyond := beyond + sorted(layers):
        raise InvalidInputError(f"{kind}: {', '.join(beyond)}: Megatron's GPTModel has no such thing")
    family = _FAMILIES[kind]
    names = {**_NAMES, **family.names}
    numbers = {ours: _number(text, theirs.rstrip("?")) for ours, theirs in names.items()}
    if missing := [n for n in names if numbers[n] is None and n not in overrides and names[n][-1] != "?"]:
        listed = ", ".join(f"{names[name]} (--set {name}=...)" for name in missing)
        raise InvalidInputError(f"the configuration leaves {listed} to the defaults of {kind}; pass them")
    mtp_layers = _number(text, "num_nextn_predict_layers", least=0)
    return {
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "share_embeddings_and_output_weights": _flag(text, "tie_word_embeddings", family.tied),
        "add_qkv_bias": _flag(text, "attention_bias"),
        **({"mtp_num_layers": mtp_layers} if mtp_layers else {}),
        **{ours: number for ours, number in numbers.items() if number is not None},
        **family.fixed,
        **_derived(text, names),
    }
