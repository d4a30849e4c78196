"""What decides the shapes of a GPT's parameters: the model, and how it is split over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidInputError

# Fields of TransformerConfig that change the parameters in ways that a description does not tell.
_BEYOND_A_DESCRIPTION = (
    "attention_output_gate",
    "experimental_attention_variant",
    "heterogeneous_block_specs",
    "linear_attention_type",
    "moe_latent_size",
    "moe_shared_expert_gate",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
)
_NAMES_IN_CONFIG = {"num_experts": "num_moe_experts", "swiglu": "gated_linear_unit"}


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
        moe_layer_freq: every how many layers one has experts, or a 1 (experts) or 0 (dense) per layer.
        learned_absolute_position_embeddings: how many positions have a learned embedding; with rotary
            embeddings 0, as those have no parameters.
        q_lora_rank: this and the next four are for ``multi_latent_attention``.
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

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise InvalidInputError(
                f"normalization is {self.normalization!r}; it can be LayerNorm or RMSNorm"
            )
        frequency = self.moe_layer_freq
        if not isinstance(frequency, int):
            frequency = tuple(frequency)
            object.__setattr__(self, "moe_layer_freq", frequency)  # hashable
        if frequency < 1 if isinstance(frequency, int) else not {*frequency} <= {0, 1}:
            raise InvalidInputError(
                f"moe_layer_freq is {frequency!r}; expected a number from 1 on, or a 0 or 1 for each layer"
            )

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding over all ranks, padded as Megatron-LM's tokenizer does."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return math.ceil(self.vocab_size / multiple) * multiple

    @classmethod
    def from_config(cls, config: Any, **model: Any) -> GPTDescription:
        """From a ``TransformerConfig``; ``model`` adds what that does not hold, above all ``vocab_size``.

        Raises:
            InvalidInputError: the config asks for parameters that a description cannot tell, or ``model``
                lacks ``vocab_size``.
        """
        if beyond := [name for name in _BEYOND_A_DESCRIPTION if getattr(config, name, None)]:
            raise InvalidInputError(
                f"{', '.join(beyond)}: not covered by a description of the model; "
                "build the model and pass its chunks instead"
            )
        if "vocab_size" not in model:
            raise InvalidInputError("a TransformerConfig does not hold vocab_size; pass vocab_size=...")
        known = {
            field.name: getattr(config, name)
            for field in fields(cls)
            if hasattr(config, name := _NAMES_IN_CONFIG.get(field.name, field.name))
        }
        return cls(**{**known, **model})

    def config_fields(self) -> dict[str, Any]:
        """The part of ``TransformerConfig``, or of ``MLATransformerConfig``, that this describes."""
        beside = {"vocab_size", "make_vocab_size_divisible_by", "untie_embeddings_and_output_weights"}
        beside |= {"learned_absolute_position_embeddings"}
        if not self.multi_latent_attention:
            beside |= {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
        known = {
            _NAMES_IN_CONFIG.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if field.name not in beside
        }
        if not isinstance(self.moe_layer_freq, int):
            known["moe_layer_freq"] = list(self.moe_layer_freq)  # Megatron takes no other sequence
        return known


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups, by their names in Megatron.

    Attributes:
        virtual_pipeline_model_parallel_size: model chunks per pipeline stage; None: one.
        expert_tensor_parallel_size: None: the tensor-parallel size, as in Megatron.
        data_parallel_size: replicas, without context parallelism.
        decoder_first_pipeline_num_layers: layers of the first stage where it differs from the others.
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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise InvalidInputError(f"{field.name} is {value}; it must be at least 1")
        if self.virtual_pipeline_model_parallel_size == 1:
            object.__setattr__(self, "virtual_pipeline_model_parallel_size", None)
        if self._ranks_per_stage % self._expert_ranks:
            raise InvalidInputError(
                f"one pipeline stage has {self._ranks_per_stage} ranks (tensor × context × data parallel), "
                f"which is no multiple of {self._expert_ranks} (expert × expert tensor parallel); "
                f"data_parallel_size must be a multiple of {_fewest_replicas(self)}"
            )

    @classmethod
    def from_config(cls, config: Any) -> ParallelSizes:
        """What a ``TransformerConfig`` says, with the fewest replicas; one rank for anything else."""
        sizes = {
            field.name: getattr(config, field.name) for field in fields(cls) if hasattr(config, field.name)
        }
        return cls(**sizes, data_parallel_size=_fewest_replicas(config) if sizes else 1)

    @property
    def world_size(self) -> int:
        return self._ranks_per_stage * self.pipeline_model_parallel_size

    @property
    def replicas(self) -> int:
        """Ranks that share the gradients of a dense parameter: the data- and context-parallel group."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Ranks that share the gradients of an expert's parameter: the expert-data-parallel group."""
        return self._ranks_per_stage // self._expert_ranks

    @property
    def _ranks_per_stage(self) -> int:
        return self.tensor_model_parallel_size * self.replicas

    @property
    def _expert_ranks(self) -> int:
        tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return self.expert_model_parallel_size * tensor


def _fewest_replicas(sizes: Any) -> int:
    """The smallest data-parallel size with which the experts can be split over a stage as they are to be."""
    experts = sizes.expert_model_parallel_size * (
        sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    )
    return experts // math.gcd(experts, sizes.tensor_model_parallel_size * sizes.context_parallel_size)
