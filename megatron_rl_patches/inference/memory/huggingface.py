"""Descriptions of models from a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...errors import InvalidInputError, one_line
from .model import GPTDescription

_Config = Mapping[str, Any]

_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_GROUPED_ATTENTION = {"num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"}
_LATENT_ATTENTION = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


#: No model has a dimension or a count above this.
_LARGEST = 2**31
#: Numbers that the file may have besides those of ``_Family.names`` -> the least that each can be.
_OTHER_NUMBERS = {
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "full_attention_interval": 1,
    "moe_intermediate_size": 0,
    "n_shared_experts": 0,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1,
}


class _Family(NamedTuple):
    """What is peculiar to the models of one ``model_type``.

    All have a gated MLP, RMSNorm and rotary embeddings. Only GPT-OSS has other biases than those of
    queries, keys and values.
    """

    #: Field of the description -> field of the file, beside ``_NAMES``.
    names: Mapping[str, str] = _GROUPED_ATTENTION
    #: Fields that have the same value in all of these models.
    fixed: Mapping[str, Any] = {}
    #: Fields that the file may lack, because Megatron has the same default as Hugging Face's class.
    defaults: tuple[str, ...] = ()
    #: Whether embedding and output layer are tied if the file does not say it.
    tied: bool = False
    #: Returns fields that follow from others of the file.
    derived: Callable[[_Config], Mapping[str, Any]] = lambda text: {}


def _qwen_moe(text: _Config) -> Mapping[str, Any]:
    dense, step = set(text.get("mlp_only_layers") or ()), text.get("decoder_sparse_step", 1)
    layers = range(text.get("num_hidden_layers", 0))
    return {"moe_layer_freq": [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]}


def _qwen3_next(text: _Config) -> Mapping[str, Any]:
    layers = text.get("num_hidden_layers", 0)
    every = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)
    ]
    linear = [int(kind == "linear_attention") for kind in kinds[:layers]]
    return {**_qwen_moe(text), "linear_attention_freq": linear}


def _deepseek(text: _Config) -> Mapping[str, Any]:
    layers = text.get("num_hidden_layers", 0)
    dense = min(text.get("first_k_dense_replace", 0), layers)
    shared_experts = (text.get("n_shared_experts") or 0) * text.get("moe_intermediate_size", 0)
    return {
        "moe_shared_expert_intermediate_size": shared_experts or None,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
    }


_EXPERTS = {"num_experts": "num_experts", "moe_ffn_hidden_size": "moe_intermediate_size"}
_MIXTRAL = {"num_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"}
_QK_NORM = {"qk_layernorm": True}
_EXPERT_BIAS = {"moe_router_enable_expert_bias": True}
_ROUTED = _EXPERTS | {"num_experts": "n_routed_experts"}
_SHARED = _EXPERTS | {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_DELTA_NET = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_DEEPSEEK = _Family(
    names=_ROUTED | _LATENT_ATTENTION,
    fixed=_QK_NORM | {"multi_latent_attention": True},
    derived=lambda text: {"q_lora_rank": text.get("q_lora_rank"), **_deepseek(text)},
)
_MISTRAL = _Family(defaults=("kv_channels",))
_FAMILIES = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK._replace(fixed={**_DEEPSEEK.fixed, **_EXPERT_BIAS}),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True),
    "gemma3_text": _Family(tied=True, fixed=_QK_NORM),
    "glm4": _Family(),
    "glm4_moe": _Family(
        names=_GROUPED_ATTENTION | _ROUTED,
        fixed=_EXPERT_BIAS,
        derived=lambda text: {"qk_layernorm": bool(text.get("use_qk_norm")), **_deepseek(text)},
    ),
    "gpt_oss": _Family(
        names=_GROUPED_ATTENTION | _MIXTRAL,
        fixed={"add_bias_linear": True, "softmax_type": "learnable"},
    ),
    "llama": _Family(defaults=("num_query_groups", "kv_channels")),
    "mistral": _MISTRAL,
    "mistral3": _MISTRAL,
    "mixtral": _Family(names=_GROUPED_ATTENTION | _MIXTRAL, defaults=("kv_channels",)),
    "phi3": _Family(defaults=("num_query_groups", "kv_channels")),
    "qwen2": _Family(fixed={"add_qkv_bias": True}, defaults=("kv_channels",)),
    "qwen2_moe": _Family(
        names=_GROUPED_ATTENTION | _SHARED,
        fixed={"add_qkv_bias": True, "moe_shared_expert_gate": True},
        defaults=("kv_channels",),
        derived=_qwen_moe,
    ),
    "qwen3": _Family(fixed=_QK_NORM),
    "qwen3_moe": _Family(names=_GROUPED_ATTENTION | _EXPERTS, fixed=_QK_NORM, derived=_qwen_moe),
    "qwen3_next": _Family(
        names=_GROUPED_ATTENTION | _SHARED | {name: name for name in _DELTA_NET},
        fixed=_QK_NORM
        | {
            "moe_shared_expert_gate": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
        },
        defaults=_DELTA_NET,
        derived=_qwen3_next,
    ),
}


def description_from_hf_config(config: _Config, **overrides: Any) -> GPTDescription:
    """Describe the language model of a Hugging Face configuration.

    Of a configuration for text and images only the text part counts. The post-norms of Gemma and GLM-4 are
    left out, since Megatron's ``GPTModel`` has none; they are a few thousandths of a percent of the
    parameters.

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
    try:
        return _described(config, text, overrides)
    except InvalidInputError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"a field of the configuration has a value of another type: {one_line(error)}"
        ) from None


def _described(config: _Config, text: _Config, overrides: Mapping[str, Any]) -> GPTDescription:
    if "num_layers" in overrides:  # which layers are dense or sparse depends on their number
        text = {**text, "num_hidden_layers": overrides["num_layers"]}
    kind = str(text.get("model_type", config.get("model_type")))
    if kind not in _FAMILIES:
        raise InvalidInputError(
            f"model_type is {kind!r}; known are {', '.join(_FAMILIES)}. "
            "Describe the model by Megatron's fields instead (--set)"
        )
    if beyond := _beyond_gpt_model(text, kind):
        raise InvalidInputError(f"{kind}: {', '.join(beyond)}: Megatron's GPTModel has no such thing")
    family = _FAMILIES[kind]
    names = {**_NAMES, **family.names}
    _check_numbers(text, dict.fromkeys(names.values(), 1) | _OTHER_NUMBERS)
    fields = {
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": not text.get(
            "tie_word_embeddings", config.get("tie_word_embeddings", family.tied)
        ),
        "add_qkv_bias": bool(text.get("attention_bias")),
        "mtp_num_layers": text.get("num_nextn_predict_layers"),
        **{ours: int(text[theirs]) for ours, theirs in names.items() if text.get(theirs) is not None},
        **family.fixed,
        **family.derived(text),
        **overrides,
    }
    if missing := [name for name in names if name not in fields and name not in family.defaults]:
        listed = ", ".join(f"{names[name]} (--set {name}=...)" for name in missing)
        raise InvalidInputError(
            f"the configuration leaves {listed} to the defaults of {kind}; pass the numbers"
        )
    return GPTDescription(**fields)


def _check_numbers(text: _Config, least: Mapping[str, int]) -> None:
    """Raise unless each of these fields is absent, null, or a whole number that is large enough."""
    for name, smallest in least.items():
        value = text.get(name)
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if value is not None and (not is_whole or not smallest <= value <= _LARGEST):
            raise InvalidInputError(
                f"{name} is {str(value)[:40]} in the configuration; "
                f"expected a whole number of at least {smallest}"
            )


def _beyond_gpt_model(text: _Config, kind: str) -> list[str]:
    beyond = ["mlp_bias"] if text.get("mlp_bias") else []
    if text.get("attention_bias") and not kind.startswith(("qwen", "glm4", "gpt_oss")):
        beyond.append("attention_bias")
    layers = set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kind == "qwen3_next":
        layers -= {"linear_attention"}
    return beyond + sorted(layers)
