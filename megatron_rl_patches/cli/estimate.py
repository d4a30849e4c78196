"""The command ``estimate``: from a description of model, groups and optimizer to a table of bytes."""

from __future__ import annotations

import json as jsonlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from ..common.text import one_line
from ..errors import InvalidInputError, MegatronRLPatchesError
from .screens import Screen, show_json


def check_writable(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Refuse, before the work, a file that cannot be written."""
    if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise InvalidInputError(f"{option.opts[0]} is {file}, which cannot be written")
    return file


def _check_plot(option: typer.CallbackParam, file: Path | None) -> Path | None:
    """Refuse a file that matplotlib cannot draw, too."""
    if file and find_spec("matplotlib") is None:
        raise InvalidInputError("--plot needs matplotlib: pip install matplotlib")
    if file and file.suffix not in (".png", ".pdf", ".svg"):
        raise InvalidInputError(f"--plot is {file}; expected a name that ends in .png, .pdf or .svg")
    return check_writable(option, file)


def _option(names: str, help: str, metavar: str | None = None, **options: Any) -> Any:
    return typer.Option(*names.split(), help=help, metavar=metavar, **options)


#: The size of a group of ranks. Its option also has the name that it has in Megatron-LM.
Size = int | None
_size = partial(_option, metavar="N", min=1)

_MODEL_HELP = "ORGANIZATION/NAME of a model in the local Hugging Face cache, or its config.json."
_SET_HELP = (
    "A field of TransformerConfig, GPTArguments or OptimizerSettings: num_layers=2, "
    "gated_linear_unit=true, moe_layer_freq=[0,1]. Can be repeated; overrides the file."
)
_OPTIMIZER_HELP = "The distributed optimizer: its states are divided over the replicas."
_TEACHERS_HELP = "Models of this shape that wait in host memory to score, one at a time."
_HEADS_HELP = "Their output layers stay on the device, as exact distillation needs them."
_TOKENS_HELP = "Also estimate logits and loss of a microbatch of N tokens, in training."
_SHARE_HELP = "The share of these tokens that belong to responses, between 0 and 1."
_PLOT_HELP = "Draw stacked bars; needs matplotlib."


def estimate(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)] = None,
    hf_config: Annotated[str | None, _option("--hf-config", "The same as MODEL.", "FILE")] = None,
    assignments: Annotated[list[str] | None, _option("--set", _SET_HELP, "FIELD=VALUE")] = None,
    dtype: Annotated[str, _option("--dtype", "bf16, fp16 or fp32.", "TYPE")] = "bf16",
    tp: Annotated[Size, _size("--tp --tensor-model-parallel-size", "Ranks that share each layer.")] = None,
    pp: Annotated[Size, _size("--pp --pipeline-model-parallel-size", "Ranks that share the layers.")] = None,
    cp: Annotated[Size, _size("--cp --context-parallel-size", "Ranks that share each sequence.")] = None,
    ep: Annotated[Size, _size("--ep --expert-model-parallel-size", "Ranks that share the experts.")] = None,
    dp: Annotated[Size, _size("--dp --data-parallel-size", "Replicas.")] = None,
    world_size: Annotated[Size, _size("--world-size", "All ranks, in place of --dp.")] = None,
    dist_opt: Annotated[bool, _option("--dist-opt --use-distributed-optimizer", _OPTIMIZER_HELP)] = False,
    teachers: Annotated[int, _option("--teachers", _TEACHERS_HELP, "N", min=0)] = 1,
    teacher_heads: Annotated[bool, _option("--teacher-heads", _HEADS_HELP)] = False,
    tokens: Annotated[Size, _size("--tokens", _TOKENS_HELP)] = None,
    response_share: Annotated[float, _option("--response-share", _SHARE_HELP, "SHARE")] = 1.0,
    plot: Annotated[Path | None, _option("--plot", _PLOT_HELP, "FILE", callback=_check_plot)] = None,
    json: Annotated[bool, _option("--json", "Write JSON to stdout, all in bytes.")] = False,
) -> None:
    """Say how much memory a model takes on each rank.

    For training, inference-only, and training with teachers. Parameters are counted in the real GPTModel,
    built without memory for each pipeline stage. Needs torch and megatron-core, but no GPU. Activations are
    not part of it; with --tokens, logits and loss are.

    Exit code 0: the table. Exit code 2: values that are missing or do not fit together.
    """
    flags = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "data_parallel_size": dp,
        "use_distributed_optimizer": dist_opt or None,
    }
    values = _assigned(assignments or []) | {n: value for n, value in flags.items() if value is not None}
    from ..inference.memory import report
    from ..inference.memory.estimate import OptimizerSettings, estimate_memory
    from ..inference.memory.huggingface import fields_from_hf_config

    optimizer = {name: values.pop(name) for name in OptimizerSettings.__annotations__ if name in values}
    replicas = values.pop("data_parallel_size", None)
    if tokens is None and response_share != 1:
        raise InvalidInputError("--response-share needs --tokens")
    source = model or hf_config
    try:
        result = estimate_memory(
            fields_from_hf_config(_read(source), **values) if source else {},
            data_parallel_size=replicas if world_size is None else _replicas(world_size, replicas, values),
            dtype=dtype,
            optimizer=OptimizerSettings(**optimizer),
            teachers=teachers,
            teacher_heads=teacher_heads,
            tokens=tokens,
            response_share=response_share,
            **values,
        )
    except MegatronRLPatchesError:
        raise
    except Exception as error:
        raise InvalidInputError(f"no such model can be estimated: {one_line(error)}") from error
    if json:
        show_json(result.as_dict())
    else:
        _show(result, dist_opt)
    if plot:
        report.plot(result, plot)


def _show(estimate: Any, dist_opt: bool) -> None:
    """Print the tables, and a sentence on the stage that takes most."""
    from ..inference.memory import report

    screen = Screen()
    for rows in (report.rows(estimate), *([report.totals(estimate)] if len(estimate.stages) > 1 else [])):
        screen.table(rows)
        screen.line()
    if estimate.loss:
        sizes = (f"{size / 1e9:.2f}" for size in estimate.loss.values())
        screen.table([("GB", *estimate.loss), ("logits and loss", *sizes)])
        screen.line()
    screen.line(report.summary(estimate))
    if not dist_opt:
        screen.line("--use-distributed-optimizer divides the states of the optimizer over the replicas")


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
    kinds = ("tensor_model", "pipeline_model", "context")
    one_replica = prod(sizes.get(f"{kind}_parallel_size", 1) for kind in kinds)
    if world_size % one_replica:
        groups = "tensor × pipeline × context"
        raise InvalidInputError(f"--world-size is {world_size}, no multiple of {one_replica} ({groups})")
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
    if newest is not None:
        return newest
    is_a_name = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)", name)
    advice = f", and no such model in {cache}: `hf download {name} config.json` brings its configuration"
    raise InvalidInputError(f"there is no file or folder {name}{advice if is_a_name else ''}")
