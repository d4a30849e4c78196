"""The command ``estimate``: flags to a description of model, groups and optimizer, and bytes to a table."""

from __future__ import annotations

import json as jsonlib
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInputError
from .output import show_json, show_table

if TYPE_CHECKING:
    from ..inference.gpt import GPTDescription, ParallelSizes

_MODEL, _GROUPS, _PRECISION = "Model", "Parallel groups", "Precision and optimizer"


def _option(panel: str, text: str = "", *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **settings)


ModelSize = Annotated[int | None, _option(_MODEL, metavar="N", min=1)]
GroupSize = Annotated[int | None, _option(_GROUPS, metavar="N", min=1)]
Moments = Annotated[str | None, _option(_PRECISION, "fp32 (the default), bf16, fp16 or fp8.")]


def estimate(
    context: typer.Context,
    hf_config: Annotated[
        Path | None,
        _option(_MODEL, "A Hugging Face config.json; flags come before it.", exists=True, dir_okay=False),
    ] = None,
    num_layers: ModelSize = None,
    hidden_size: ModelSize = None,
    ffn_hidden_size: ModelSize = None,
    num_attention_heads: ModelSize = None,
    num_query_groups: ModelSize = None,
    kv_channels: ModelSize = None,
    vocab_size: ModelSize = None,
    make_vocab_size_divisible_by: ModelSize = None,
    learned_absolute_position_embeddings: Annotated[
        int | None,
        _option(_MODEL, "Learned positions; without it rotary ones.", "--max-position-embeddings", min=1),
    ] = None,
    untie_embeddings_and_output_weights: Annotated[
        bool | None, _option(_MODEL, "", "--untie-embeddings-and-output-weights")
    ] = None,
    swiglu: Annotated[bool | None, _option(_MODEL, "", "--swiglu")] = None,
    add_bias_linear: Annotated[bool | None, _option(_MODEL, "", " /--disable-bias-linear")] = None,
    add_qkv_bias: Annotated[bool | None, _option(_MODEL, "", "--add-qkv-bias")] = None,
    qk_layernorm: Annotated[bool | None, _option(_MODEL, "", "--qk-layernorm")] = None,
    normalization: Annotated[str | None, _option(_MODEL, "LayerNorm (the default) or RMSNorm.")] = None,
    num_experts: ModelSize = None,
    moe_ffn_hidden_size: ModelSize = None,
    moe_shared_expert_intermediate_size: ModelSize = None,
    moe_layer_freq: Annotated[str | None, _option(_MODEL, "N, or a list such as '[0]*3+[1]*58'.")] = None,
    multi_latent_attention: Annotated[bool | None, _option(_MODEL, "", "--multi-latent-attention")] = None,
    q_lora_rank: ModelSize = None,
    kv_lora_rank: ModelSize = None,
    qk_head_dim: ModelSize = None,
    qk_pos_emb_head_dim: ModelSize = None,
    v_head_dim: ModelSize = None,
    tensor_model_parallel_size: GroupSize = None,
    pipeline_model_parallel_size: GroupSize = None,
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, _option(_GROUPS, "Model chunks.", "--num-virtual-stages-per-pipeline-rank", min=1)
    ] = None,
    decoder_first_pipeline_num_layers: GroupSize = None,
    decoder_last_pipeline_num_layers: GroupSize = None,
    context_parallel_size: GroupSize = None,
    expert_model_parallel_size: GroupSize = None,
    expert_tensor_parallel_size: GroupSize = None,
    data_parallel_size: GroupSize = None,
    world_size: Annotated[
        int | None, _option(_GROUPS, "All ranks, in place of --data-parallel-size.", min=1)
    ] = None,
    bf16: Annotated[bool, _option(_PRECISION, "The default.", "--bf16")] = False,
    fp16: Annotated[bool, _option(_PRECISION, "", "--fp16")] = False,
    fp32: Annotated[bool, _option(_PRECISION, "What Megatron-LM takes without a flag.", "--fp32")] = False,
    use_distributed_optimizer: Annotated[
        bool | None, _option(_PRECISION, "", "--use-distributed-optimizer")
    ] = None,
    accumulate_allreduce_grads_in_fp32: Annotated[
        bool | None,
        _option(
            _PRECISION,
            "Of the gradient buffers; without either, as in Megatron-LM, fp32 for bf16 models.",
            "--accumulate-allreduce-grads-in-fp32/--grad-reduce-in-bf16",
        ),
    ] = None,
    use_precision_aware_optimizer: Annotated[
        bool | None, _option(_PRECISION, "", "--use-precision-aware-optimizer")
    ] = None,
    main_grads_dtype: Annotated[str | None, _option(_PRECISION, "fp32 (the default) or bf16.")] = None,
    main_params_dtype: Annotated[str | None, _option(_PRECISION, "fp32 (the default) or fp16.")] = None,
    exp_avg_dtype: Moments = None,
    exp_avg_sq_dtype: Moments = None,
    optimizer_cpu_offload: Annotated[bool | None, _option(_PRECISION, "", "--optimizer-cpu-offload")] = None,
    optimizer_offload_fraction: Annotated[float | None, _option(_PRECISION, min=0, max=1)] = None,
    teachers: Annotated[
        int,
        typer.Option(min=0, help="Models of this shape that wait in host memory to score, one at a time."),
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw stacked bars; needs the extra `demo`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout, all in bytes.")] = False,
) -> None:
    """Say how much memory a model takes on each rank: training, inference-only, and training beside teachers.

    Flags are named as in Megatron-LM. Parameters are counted in the real GPTModel, built without memory for
    each pipeline stage. Needs torch and megatron-core, but no GPU. Activations are not part of it.

    Exit codes:

    - 0: the table
    - 2: values that are missing or do not fit together
    """
    if plot:
        _require_plot(plot)
    from ..inference import tables
    from ..inference.estimate import OptimizerSettings, estimate_memory

    given = {name: value for name, value in context.params.items() if value is not None}
    result = estimate_memory(
        _description(given, hf_config),
        parallel=_parallel(given, world_size),
        dtype=_dtype(bf16=bf16, fp16=fp16, fp32=fp32),
        optimizer=OptimizerSettings(**_fields_of(OptimizerSettings, given)),
        teachers=teachers,
    )
    if json:
        show_json(result.as_dict())
    else:
        header, *rows = tables.rows(result)
        show_table(header, rows)
        typer.echo(tables.summary(result))
    if plot:
        tables.plot(result, plot)


def _require_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise InvalidInputError("--plot needs matplotlib, which the extra `demo` brings")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InvalidInputError(f"--plot is {path}; expected a name that ends in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise InvalidInputError(f"--plot is {path}, and there is no folder {path.parent}")


def _fields_of(dataclass: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that have the name of a field."""
    return {field.name: given[field.name] for field in fields(dataclass) if field.name in given}


def _description(given: Mapping[str, Any], hf_config: Path | None) -> GPTDescription:
    from ..inference.gpt import GPTDescription
    from ..inference.huggingface import description_from_hf_config

    flags = _fields_of(GPTDescription, given)
    if "moe_layer_freq" in flags:
        flags["moe_layer_freq"] = _layer_pattern(flags["moe_layer_freq"])
    if hf_config:
        try:
            config = jsonlib.loads(hf_config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInputError(f"{hf_config} is not JSON: {error}") from None
        return description_from_hf_config(config, **flags)
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [f"--{name.replace('_', '-')}" for name in needed if name not in flags]:
        raise InvalidInputError(f"missing: {', '.join(missing)}; or give --hf-config")
    return GPTDescription(**flags)


def _dtype(**wanted: bool) -> str:
    names = [name for name, is_wanted in wanted.items() if is_wanted] or ["bf16"]
    if len(names) > 1:
        raise InvalidInputError(f"--{' and --'.join(names)} exclude each other")
    return names[0]


def _layer_pattern(text: str) -> int | list[int]:
    if not re.fullmatch(r"[\d\s,+*()\[\]]+", text) or "**" in text:
        raise InvalidInputError(f"--moe-layer-freq is {text!r}; expected a number or a list of 0 and 1")
    try:
        # Numbers, brackets, sums and products, as in Megatron-LM: nothing that could name or call anything.
        value: int | list[int] = eval(text)
    except Exception as error:  # such as the TypeError of a number that is added to a list
        raise InvalidInputError(f"--moe-layer-freq is {text!r}: {error}") from None
    if not isinstance(value, int) and any(not isinstance(layer, int) for layer in value):
        raise InvalidInputError(f"--moe-layer-freq is {text!r}; expected a number or a list of 0 and 1")
    return value


def _parallel(given: Mapping[str, Any], world_size: int | None) -> ParallelSizes:
    from ..inference.gpt import ParallelSizes

    sizes = _fields_of(ParallelSizes, given)
    if world_size is None:
        return ParallelSizes(**sizes)
    if "data_parallel_size" in sizes:
        raise InvalidInputError("give --world-size or --data-parallel-size, not both")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    one_replica = 1
    for name in names:
        one_replica *= sizes.get(name, 1)
    if world_size % one_replica:
        raise InvalidInputError(
            f"--world-size is {world_size}, no multiple of {one_replica} (tensor × pipeline × context)"
        )
    return ParallelSizes(**sizes, data_parallel_size=world_size // one_replica)
