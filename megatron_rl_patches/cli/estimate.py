"""The command ``estimate``: from a description of model, groups and optimizer to a table of bytes."""

from __future__ import annotations

import json as jsonlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.text import one_line
from ..errors import InvalidInputError, MegatronRLPatchesError
from .screens import check_plot, output_file, show_json, show_table

#: Panels of the help, whose options are short enough to be shown in 80 columns.
_MODEL, _GROUPS, _TRAINING, _OUTPUT = "Model", "Parallel groups", "Training and teachers", "Output"

_MODEL_HELP = "ORGANIZATION/NAME of a model in the local Hugging Face cache, or its config.json."
_SET_HELP = (
    "A field of TransformerConfig, GPTArguments or OptimizerSettings: num_layers=2, "
    "gated_linear_unit=true, moe_layer_freq=[0,1]. Can be repeated; overrides the file."
)
_OPTIMIZER_HELP = "The distributed optimizer: its states are divided over the replicas."
_TEACHERS_HELP = "Models of this shape that wait in host memory to score, one at a time."
_HEADS_HELP = "Their output layers stay on the device, as exact distillation needs them."
_PLOT_HELP = "Draw stacked bars; needs matplotlib."


def _option(panel: str, names: str, help: str, metavar: str | None = None, **options: Any) -> Any:
    return typer.Option(*names.split(), help=help, metavar=metavar, rich_help_panel=panel, **options)


def _size(names: str, help: str) -> Any:
    """Return the option for the size of a group, which also has the name that it has in Megatron-LM."""
    return _option(_GROUPS, names, help, "N", min=1)


def estimate(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=_MODEL_HELP)] = None,
    hf_config: Annotated[str | None, _option(_MODEL, "--hf-config", "The same as MODEL.", "FILE")] = None,
    assignments: Annotated[list[str] | None, _option(_MODEL, "--set", _SET_HELP, "FIELD=VALUE")] = None,
    dtype: Annotated[str, _option(_MODEL, "--dtype", "bf16, fp16 or fp32.", "TYPE")] = "bf16",
    tensor_model_parallel_size: Annotated[
        int | None, _size("--tp --tensor-model-parallel-size", "Ranks that share each layer.")
    ] = None,
    pipeline_model_parallel_size: Annotated[
        int | None, _size("--pp --pipeline-model-parallel-size", "Ranks that share the layers.")
    ] = None,
    context_parallel_size: Annotated[
        int | None, _size("--cp --context-parallel-size", "Ranks that share each sequence.")
    ] = None,
    expert_model_parallel_size: Annotated[
        int | None, _size("--ep --expert-model-parallel-size", "Ranks that share the experts.")
    ] = None,
    data_parallel_size: Annotated[int | None, _size("--dp --data-parallel-size", "Replicas.")] = None,
    world_size: Annotated[int | None, _size("--world-size", "All ranks, in place of --dp.")] = None,
    use_distributed_optimizer: Annotated[
        bool, _option(_TRAINING, "--dist-opt --use-distributed-optimizer", _OPTIMIZER_HELP)
    ] = False,
    teachers: Annotated[int, _option(_TRAINING, "--teachers", _TEACHERS_HELP, "N", min=0)] = 1,
    teacher_heads: Annotated[bool, _option(_TRAINING, "--teacher-heads", _HEADS_HELP)] = False,
    plot: Annotated[Path | None, output_file("--plot", _PLOT_HELP, check_plot, _OUTPUT)] = None,
    json: Annotated[bool, _option(_OUTPUT, "--json", "Write JSON to stdout, all in bytes.")] = False,
) -> None:
    """Say how much memory a model takes on each rank: training, inference-only, and training with teachers.

    Parameters are counted in the real GPTModel, built without memory for each pipeline stage. Needs torch and
    megatron-core, but no GPU. Activations are not part of it.

    Exit codes:

    - 0: the table
    - 2: values that are missing or do not fit together
    """
    flags = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        "data_parallel_size": data_parallel_size,
        "use_distributed_optimizer": use_distributed_optimizer or None,
    }
    values = _assigned(assignments or []) | {n: value for n, value in flags.items() if value is not None}
    try:
        result = _estimated(model or hf_config, values, world_size, dtype, teachers, teacher_heads)
    except MegatronRLPatchesError:
        raise
    except Exception as error:
        raise InvalidInputError(f"no such model can be estimated: {one_line(error)}") from error

    from ..inference.memory import report

    if json:
        show_json(result.as_dict())
    else:
        show_table(report.rows(result))
        if len(result.stages) > 1:
            typer.echo()
            show_table(report.totals(result))
        typer.echo(f"\n{report.summary(result)}")
        if not use_distributed_optimizer:
            typer.echo(
                "--use-distributed-optimizer divides the states of the optimizer by the number of replicas"
            )
    if plot:
        report.plot(result, plot)


def _estimated(
    source: str | None,
    values: dict[str, Any],
    world_size: int | None,
    dtype: str,
    teachers: int,
    teacher_heads: bool,
) -> Any:
    from ..inference.memory.estimate import OptimizerSettings, estimate_memory
    from ..inference.memory.huggingface import fields_from_hf_config

    optimizer = {name: values.pop(name) for name in OptimizerSettings.__annotations__ if name in values}
    replicas = values.pop("data_parallel_size", None)
    if world_size is not None:
        replicas = _replicas(world_size, replicas, values)
    return estimate_memory(
        fields_from_hf_config(_read(source), **values) if source else {},
        data_parallel_size=replicas,
        dtype=dtype,
        optimizer=OptimizerSettings(**optimizer),
        teachers=teachers,
        teacher_heads=teacher_heads,
        **values,
    )


def _assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse ``FIELD=VALUE``; values are JSON, or else strings."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidInputError(f"--set {assignment}: expected FIELD=VALUE")
        values[name] = text
        with suppress(ValueError):
            values[name] = jsonlib.loads(text)
    return values


def _replicas(world_size: int, replicas: int | None, sizes: Mapping[str, Any]) -> int:
    if replicas is not None:
        raise InvalidInputError("pass --world-size or --data-parallel-size, not both")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    one_replica = prod(sizes.get(name, 1) for name in names)
    if world_size % one_replica:
        raise InvalidInputError(
            f"--world-size is {world_size}, no multiple of {one_replica} (tensor × pipeline × context)"
        )
    return world_size // one_replica


def _read(source: str) -> Any:
    """Return the content of the ``config.json`` that a file, a folder or a name of a model stands for."""
    file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if not file.exists():
        file = _in_cache(source)
    try:
        return jsonlib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{file} is not JSON: {error}") from None


def _in_cache(name: str) -> Path:
    """Return the newest ``config.json`` of a model in the local Hugging Face cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    snapshots = (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = max(snapshots, key=lambda file: file.stat().st_mtime, default=None)
    if newest is None:
        advice = ""
        if re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)", name):
            advice = (
                f", and no such model in {cache}: `hf download {name} config.json` brings its configuration"
            )
        raise InvalidInputError(f"there is no file or folder {name}{advice}")
    return newest
