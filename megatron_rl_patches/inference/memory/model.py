"""Descriptions of a GPT and of its parallel groups, which together decide the shapes of its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ...errors import InvalidInputError

# Fields of TransformerConfig that change the parameters, and that a description does not have.
_BEYOND_A_DESCRIPTION = (
    "heterogeneous_block_specs",
    "linear_attention_type",
    "moe_latent_size",
)
# Fields of a description that some releases of megatron-core do not have.
_OF_SOME_RELEASES = (
    "attention_output_gate",
    "experimental_attention_variant",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "softmax_type",
)
_NAMES_IN_CONFIG = {
    "num_experts": "num_moe_experts",
    "swiglu": "gated_linear_unit",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Fields of ParallelSizes that say which layers a pipeline stage has.
_SPLIT = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


@dataclass(frozen=True)
class GPTDescription:
    """A GPT by the names of Megatron-LM's arguments. Sizes are those of the whole model, not of a rank.

    Attributes:
        num_query_groups: None: as many as attention heads.
        ffn_hidden_size: None: four times ``hidden_size``, as in Megatron.
        kv_channels: size of one attention head. None: ``hidden_size`` over the number of heads.
        vocab_size: before padding to a multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel
            size.
        num_experts: None: no layer is a mixture of experts.
        moe_layer_freq: N: every N-th layer has experts; or a 1 (experts) or 0 (dense) for each layer.
        learned_absolute_position_embeddings: number of positions with a learned embedding; 0 with rotary
            embeddings, which have no parameters.
        q_lora_rank: this and the next four are for ``multi_latent_attention``.
        moe_router_enable_expert_bias: a router has a bias and a counter per expert, both buffers.
        softmax_type: ``"learnable"``: each attention head has a sink.
        experimental_attention_variant: ``"gated_delta_net"``: linear attention of sizes ``linear_*``.
        linear_attention_freq: N: every N-th layer has ordinary attention; or a 1 (linear) or 0 per layer.
        mtp_num_layers: layers of multi-token prediction, which a model has that trains.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    normalization: str = "LayerNorm"
    learned_absolute_position_embeddings: int = 0
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | Sequence[int] = 1
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    moe_router_enable_expert_bias: bool = False
    moe_shared_expert_gate: bool = False
    attention_output_gate: bool = False
    softmax_type: str = "vanilla"
    experimental_attention_variant: str | None = None
    linear_attention_freq: int | Sequence[int] | None = None
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    mtp_num_layers: int | None = None

    def __post_init__(self) -> None:
        if self.mtp_num_layers == 0:
            object.__setattr__(self, "mtp_num_layers", None)
        if (variant := self.experimental_attention_variant) not in (None, "gated_delta_net"):
            raise InvalidInputError(
                f"experimental_attention_variant is {variant!r}, of which only 'gated_delta_net' can be "
                "counted; build the model and pass its chunks"
            )
        _require_at_least_one(self, ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"))
        if not self.multi_latent_attention and self.num_attention_heads % (self.num_query_groups or 1):
            raise InvalidInputError(
                f"num_query_groups is {self.num_query_groups}; expected a divisor of num_attention_heads, "
                f"{self.num_attention_heads}"
            )
        if isinstance(self.moe_layer_freq, int):
            _require_at_least_one(self, ["moe_layer_freq"])

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Return the rows of the embedding over all ranks, padded as by Megatron-LM's tokenizer."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return math.ceil(self.vocab_size / multiple) * multiple

    @classmethod
    def from_config(cls, config: Any, **model: Any) -> GPTDescription:
        """Describe a ``TransformerConfig``; ``model`` adds what that does not hold, above all ``vocab_size``.

        Raises:
            InvalidInputError: the config has what a description lacks, or ``model`` lacks ``vocab_size``.
        """
        if beyond := [name for name in _BEYOND_A_DESCRIPTION if getattr(config, name, None)]:
            names = ", ".join(beyond)
            raise InvalidInputError(f"{names}: cannot be counted; build the model and pass its chunks")
        if "vocab_size" not in model:
            raise InvalidInputError("a TransformerConfig does not hold vocab_size; pass vocab_size=...")
        return cls(**{**_fields_in(config, cls), **model})

    def config_fields(self, config_class: Any) -> dict[str, Any]:
        """Return the fields that ``TransformerConfig``, or ``MLATransformerConfig``, has.

        Raises:
            InvalidInputError: this release does not have a field that changes the parameters.
        """
        known = {field.name for field in fields(config_class)}
        absent = [name for name in _OF_SOME_RELEASES if name not in known]
        if lacking := [name for name in absent if getattr(self, name) != getattr(type(self), name)]:
            raise InvalidInputError(
                f"this megatron-core's {config_class.__name__} has no {', '.join(lacking)}"
            )
        values = {_NAMES_IN_CONFIG.get(name, name): value for name, value in vars(self).items()}
        if self.moe_router_enable_expert_bias:
            values["moe_router_score_function"] = "sigmoid"  # Megatron has these biases with no other
        return {name: value for name, value in values.items() if name in known}


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups, by their names in Megatron.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks per pipeline stage; None: one.
        expert_tensor_parallel_size: None: the tensor-parallel size, as in Megatron.
        data_parallel_size: replicas, without context parallelism.
        decoder_first_pipeline_num_layers: layers of the first stage where it differs from the others.
        account_for_embedding_in_pipeline_split: the embedding takes the place of a layer of the first stage,
            as the output layer does with ``account_for_loss_in_pipeline_split`` in the last one.
        pipeline_model_parallel_layout: the layers of each stage, as text (``"Et*3|t*4,L"``) or lists.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    data_parallel_size: int = 1
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        _require_at_least_one(self, [name for name, value in vars(self).items() if type(value) is int])
        if self.virtual_pipeline_model_parallel_size == 1:
            object.__setattr__(self, "virtual_pipeline_model_parallel_size", None)
        if self._ranks_per_stage % (experts := _ranks_of_all_experts(self)):
            raise InvalidInputError(
                f"one pipeline stage has {self._ranks_per_stage} ranks (tensor × context × data parallel), "
                f"which is no multiple of {experts} (expert × expert tensor parallel); "
                f"data_parallel_size must be a multiple of {_fewest_replicas(self)}"
            )

    @classmethod
    def from_config(cls, config: Any) -> ParallelSizes:
        """Read the sizes from a ``TransformerConfig``, with the fewest replicas; else return one rank."""
        sizes = _fields_in(config, cls)
        return cls(**sizes, data_parallel_size=_fewest_replicas(config) if sizes else 1)

    def split_as(self, other: ParallelSizes) -> ParallelSizes:
        """Return these sizes; if they do not say how the layers are split, with the split of the other."""
        if any(getattr(self, name) for name in _SPLIT):
            return self
        return replace(self, **{name: getattr(other, name) for name in _SPLIT})

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that change the parameters of a rank."""
        values = {_NAMES_IN_CONFIG.get(name, name): value for name, value in vars(self).items() if value}
        del values["data_parallel_size"], values["context_parallel_size"]
        return values

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self._ranks_per_stage * self.pipeline_model_parallel_size

    @property
    def replicas(self) -> int:
        """Ranks that share the gradients of a dense parameter: the data- and context-parallel group."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Ranks that share the gradients of an expert's parameter: the expert-data-parallel group."""
        return self._ranks_per_stage // _ranks_of_all_experts(self)

    @property
    def _ranks_per_stage(self) -> int:
        return self.tensor_model_parallel_size * self.replicas


def _fields_in(config: Any, cls: Any) -> dict[str, Any]:
    """Return the fields of a class of this module that a ``TransformerConfig`` has, too."""
    names = {field.name: _NAMES_IN_CONFIG.get(field.name, field.name) for field in fields(cls)}
    return {ours: getattr(config, theirs) for ours, theirs in names.items() if hasattr(config, theirs)}


def _require_at_least_one(sizes: Any, names: Iterable[str]) -> None:
    for name in names:
        if (value := getattr(sizes, name)) is not None and value < 1:
            raise InvalidInputError(f"{name} is {value}; it must be at least 1")


def _ranks_of_all_experts(sizes: Any) -> int:
    """Return how many ranks hold one copy of all experts; ``sizes`` may be a ``TransformerConfig``."""
    tensor: int = sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    return tensor * int(sizes.expert_model_parallel_size)


def _fewest_replicas(sizes: Any) -> int:
    """Return the smallest data-parallel size with which a stage has enough ranks for all experts."""
    experts = _ranks_of_all_experts(sizes)
    return experts // math.gcd(experts, sizes.tensor_model_parallel_size * sizes.context_parallel_size)
