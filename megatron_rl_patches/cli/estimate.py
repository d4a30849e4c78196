"""The command ``estimate``: from a description of model, groups and optimizer to a table of bytes."""

from __future__ import annotations

import json as jsonlib
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidInputError
from .screens import check_plot, output_file, show_json, show_table

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


def _size(group: str, *short: str, help: str | None = None) -> Any:
    names = f"--{group}-size", *short
    panel = "Parallel groups"
    return typer.Option(*names, metavar="N", min=1, show_default=False, rich_help_panel=panel, help=help)


def estimate(
    hf_config: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face config.json.", exists=True, dir_okay=False, show_default=False),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            show_default=False,
            help="A field of GPTDescription, ParallelSizes or OptimizerSettings, named as in Megatron-LM: "
            "num_layers=2, swiglu=true, moe_layer_freq=[0,1]. Can be repeated; overrides the file.",
        ),
    ] = None,
    tensor_model_parallel_size: Annotated[int | None, _size("tensor-model-parallel", "--tp")] = None,
    pipeline_model_parallel_size: Annotated[int | None, _size("pipeline-model-parallel", "--pp")] = None,
    context_parallel_size: Annotated[int | None, _size("context-parallel", "--cp")] = None,
    expert_model_parallel_size: Annotated[int | None, _size("expert-model-parallel", "--ep")] = None,
    data_parallel_size: Annotated[int | None, _size("data-parallel", "--dp")] = None,
    world_size: Annotated[
        int | None, _size("world", help="All ranks, in place of --data-parallel-size.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters: bf16, fp16 or fp32.")] = "bf16",
    use_distributed_optimizer: Annotated[bool, typer.Option("--use-distributed-optimizer")] = False,
    teachers: Annotated[
        int,
        typer.Option(min=0, help="Models of this shape that wait in host memory to score, one at a time."),
    ] = 1,
    teacher_heads: Annotated[
        bool,
        typer.Option(
            "--teacher-heads",
            help="Their output layers stay on the device, as exact distillation needs them.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, output_file("--plot", "Draw stacked bars; needs the extra `demo`.", check_plot)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout, all in bytes.")] = False,
) -> None:
    """Say how much memory a model takes on each rank: training, inference-only, and training beside teachers.

    Parameters are counted in the real GPTModel, built without memory for each pipeline stage. Needs torch and
    megatron-core, but no GPU. Activations are not part of it.

    Exit codes:

    - 0: the table
    - 2: values that are missing or do not fit together
    """
    from ..inference.memory import estimate as memory
    from ..inference.memory import report
    from ..inference.memory.huggingface import description_from_hf_config

    flags = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
        "expert_model_parallel_size": expert_model_parallel_size,
        "data_parallel_size": data_parallel_size,
        "use_distributed_optimizer": use_distributed_optimizer or None,
    }
    owners = (memory.GPTDescription, memory.ParallelSizes, memory.OptimizerSettings)
    values = _assigned(assignments or [], owners)
    values |= {name: value for name, value in flags.items() if value is not None}
    if world_size is not None:
        values["data_parallel_size"] = _replicas(world_size, values)
    model, sizes, optimizer = (
        {field.name: values[field.name] for field in fields(owner) if field.name in values}
        for owner in owners
    )
    if not hf_config and (missing := [name for name in _REQUIRED if name not in model]):
        raise InvalidInputError(f"missing: {', '.join(missing)}; pass each with --set, or pass --hf-config")
    result = memory.estimate_memory(
        description_from_hf_config(_read(hf_config), **model) if hf_config else owners[0](**model),
        parallel=owners[1](**sizes),
        dtype=dtype,
        optimizer=owners[2](**optimizer),
        teachers=teachers,
        teacher_heads=teacher_heads,
    )
    if json:
        show_json(result.as_dict())
    else:
        header, *rows = report.rows(result)
        show_table(header, rows)
        typer.echo(report.summary(result))
    if plot:
        report.plot(result, plot)


def _assigned(assignments: Sequence[str], owners: Sequence[type]) -> dict[str, Any]:
    """Parse ``FIELD=VALUE``, fields of the ``owners``; values are JSON, or else strings."""
    types = {name: kind for owner in owners for name, kind in typing.get_type_hints(owner).items()}
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, _, text = assignment.partition("=")
        if name not in types:
            raise InvalidInputError(f"--set {assignment}: the fields are {', '.join(sorted(types))}")
        values[name] = text
        with suppress(ValueError):
            values[name] = jsonlib.loads(text)
        if not _is_a(values[name], types[name]):
            expected = str(getattr(types[name], "__name__", types[name])).replace("collections.abc.", "")
            raise InvalidInputError(f"--set {assignment}: expected {expected}")
    return values


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether the value is of a type such as ``int``, ``int | None`` or ``Sequence[int]``."""
    if isinstance(value, list):
        return "Sequence" in str(kind) and all(type(item) is int for item in value)
    return type(value) in (typing.get_args(kind) or (kind,))


def _replicas(world_size: int, sizes: Mapping[str, Any]) -> int:
    if "data_parallel_size" in sizes:
        raise InvalidInputError("pass --world-size or --data-parallel-size, not both")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    one_replica = prod(sizes.get(name, 1) for name in names)
    if world_size % one_replica:
        raise InvalidInputError(
            f"--world-size is {world_size}, no multiple of {one_replica} (tensor × pipeline × context)"
        )
    return world_size // one_replica


def _read(hf_config: Path) -> Any:
    try:
        return jsonlib.loads(hf_config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{hf_config} is not JSON: {error}") from None
