"""Which parameters a rank counts, from the facts of their layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches.reentry import expert_norm

FIRST, SECOND = (SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2) for rank in (0, 1))
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def layer(classes: str, group: Any = SECOND, parallel_mode: Any = "unset", **marks: Any) -> torch.nn.Module:
    """Return a layer whose classes have these names, with marks on its weight and its bias."""
    kind: type[torch.nn.Module] = torch.nn.Linear
    for name in classes.split():
        kind = type(name, (kind,), {})
    made = kind(2, 2)
    vars(made)["_tp_group"] = group
    if parallel_mode != "unset":
        vars(made)["parallel_mode"] = parallel_mode
    for parameter in made.parameters():
        vars(parameter).update(marks)
    return made


def counted(*layers: torch.nn.Module) -> list[tuple[str, str]]:
    """Return who counts weight and bias of each layer: this rank, another one, or as Megatron says."""
    expert_norm.note_parameters(torch.nn.Sequential(*layers))
    answers = {"Megatron": "Megatron", True: "this", False: "other"}
    ask: Any = expert_norm.counts
    return [
        tuple(answers[ask(parameter, lambda: "Megatron")] for parameter in (made.weight, made.bias))
        for made in layers
    ]


@pytest.mark.parametrize("prefix", ["", "TE"])
def test_an_expert_is_divided_as_its_layer_divides_it(prefix: str) -> None:
    column = layer(f"TELinear {prefix}ColumnParallelLinear", allreduce=False)
    row = layer(f"TELinear {prefix}RowParallelLinear", allreduce=False)
    assert counted(column, row) == [("this", "this"), ("this", "other")]
    first = layer(f"{prefix}RowParallelLinear", FIRST, allreduce=False)
    alone = layer(f"{prefix}RowParallelLinear", ALONE, allreduce=False)
    assert counted(first, alone) == [("this", "this")] * 2


def test_an_expert_of_another_layer_counts_where_it_is_marked_or_on_the_first_rank() -> None:
    unmarked = layer("OwnLinear", allreduce=False)
    marked = layer("OwnLinear", allreduce=False, tensor_model_parallel=True)
    assert counted(unmarked, marked) == [("other", "other"), ("this", "this")]


def test_dense_layers_are_left_to_megatron() -> None:
    marked = {"allreduce": True, "tensor_model_parallel": True}
    layers = [
        layer("ColumnParallelLinear", allreduce=True),
        layer("TELinear TEColumnParallelLinear", parallel_mode="column", **marked),
        layer("TELinear TERowParallelLinear", parallel_mode="row", sequence_parallel=True),
        layer("LayerNorm"),
        # Nothing says that it is duplicated.
        layer("TELinear", parallel_mode=None, **marked),
        layer("OtherLinear", parallel_mode=None, **marked, sequence_parallel=False),
    ]
    assert counted(*layers) == [("Megatron", "Megatron")] * len(layers)


@pytest.mark.parametrize("group", [FIRST, SECOND])
def test_what_megatron_duplicates_counts_on_the_first_rank(group: Any) -> None:
    marks = {"allreduce": True, "tensor_model_parallel": True, "sequence_parallel": False}
    answer = "this" if group is FIRST else "other"
    assert counted(layer("TELinear", group, None, **marks)) == [(answer, answer)]


def test_experts_without_expert_parallelism_count_where_they_are_divided() -> None:
    classes = "TEGroupedLinear TERowParallelGroupedLinear"
    divided = layer(classes, SECOND, None, allreduce=True)
    whole = layer(classes, ALONE, None, allreduce=True)
    assert counted(divided, whole) == [("this", "Megatron"), ("Megatron", "Megatron")]


def test_main_parameters_get_the_note() -> None:
    made = layer("RowParallelLinear", allreduce=False)
    counted(made)
    main, other = torch.zeros(2), torch.zeros(2)
    expert_norm.copy_note(main, made.bias)
    expert_norm.copy_note(other, torch.zeros(2))
    assert expert_norm.counts(main, lambda: True) is False
    assert expert_norm.counts(other, lambda: True) is True
