"""Which parameters a rank counts, from the facts of their layer."""

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


def counted(made: torch.nn.Module) -> list[Any]:
    """Return whether this rank counts weight and bias of a layer, or what Megatron says."""
    expert_norm.note_parameters(torch.nn.Sequential(made))
    answer: Any = lambda: MEGATRON  # noqa: E731
    return [expert_norm.counts(parameter, answer) for parameter in (made.weight, made.bias)]


MEGATRON = "as Megatron says"
EXPERT = {"allreduce": False}
MARKED = {"allreduce": True, "tensor_model_parallel": True}
DUPLICATED = {**MARKED, "sequence_parallel": False}
GROUPED = "TEGroupedLinear TERowParallelGroupedLinear"


@pytest.mark.parametrize(
    ("made", "counts"),
    [
        # An expert is divided as its layer divides it.
        (layer("TELinear TEColumnParallelLinear", **EXPERT), [True, True]),
        (layer("TELinear TERowParallelLinear", **EXPERT), [True, False]),
        (layer("TERowParallelLinear", FIRST, **EXPERT), [True, True]),
        (layer("TERowParallelLinear", ALONE, **EXPERT), [True, True]),
        # One of another layer counts where it is marked, or on the first rank.
        (layer("OwnLinear", **EXPERT), [False, False]),
        (layer("OwnLinear", **EXPERT, tensor_model_parallel=True), [True, True]),
        # Without expert parallelism, experts count where they are divided.
        (layer(GROUPED, SECOND, None, allreduce=True), [True, MEGATRON]),
        (layer(GROUPED, ALONE, None, allreduce=True), [MEGATRON] * 2),
        # Dense layers are left to Megatron.
        (layer("ColumnParallelLinear", allreduce=True), [MEGATRON] * 2),
        (layer("TELinear TEColumnParallelLinear", parallel_mode="column", **MARKED), [MEGATRON] * 2),
        (layer("TELinear TERowParallelLinear", parallel_mode="row", sequence_parallel=True), [MEGATRON] * 2),
        (layer("LayerNorm"), [MEGATRON] * 2),
        # Nothing says that this one is duplicated.
        (layer("TELinear", parallel_mode=None, **MARKED), [MEGATRON] * 2),
        (layer("OtherLinear", parallel_mode=None, **DUPLICATED), [MEGATRON] * 2),
        # What Megatron duplicates counts on the first rank.
        (layer("TELinear", FIRST, None, **DUPLICATED), [True, True]),
        (layer("TELinear", SECOND, None, **DUPLICATED), [False, False]),
    ],
)
def test_which_rank_counts_a_parameter(made: torch.nn.Module, counts: list[Any]) -> None:
    assert counted(made) == counts
