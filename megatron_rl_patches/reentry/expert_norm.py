"""Each gradient counts once in the norm, in clipping and among the zeros: on one of the ranks that hold it.

Up to megatron-core 0.18 a parameter without ``tensor_model_parallel`` counts on the first tensor-parallel
rank only. That is right for parameters which all ranks of the dense group hold. Experts are divided over
another group: with TP 2, EP 2 and expert TP 1 both tensor-parallel ranks have experts of their own, and those
of the second rank were left out. TransformerEngine marks the weights of grouped experts up to 2.12 only, and
biases of experts never. It also marks the weights that Megatron's ``TELinear`` duplicates over ranks, such as
the down-projections of latent attention, which then count once per rank. Since 0.17 Megatron unmarks these.

megatron-core 0.19 has it right (NVIDIA/Megatron-LM#5916).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..common.chunks import as_chunks, has_base

#: Attribute of a parameter: whether this rank counts it. Without it, Megatron's own rule decides.
_COUNTS = "_counts_in_gradient_norm"
#: Layers that divide parameters over tensor-parallel ranks, and how the names of these parameters begin.
_DIVIDED: dict[str, tuple[str, ...]] = {
    "ColumnParallelLinear": ("weight", "bias"),
    "TEColumnParallelLinear": ("weight", "bias"),
    "TEColumnParallelGroupedLinear": ("weight", "bias"),
    "RowParallelLinear": ("weight",),
    "TERowParallelLinear": ("weight",),
    "TERowParallelGroupedLinear": ("weight",),
    "GroupedMLP": ("weight",),
}


def note_parameters(model: Any) -> None:
    """Note on the parameters of the chunks whether this rank counts them, where Megatron may get it wrong.

    Call it before the optimizer is made, whose main parameters get the note by :func:`copy_note`. No
    collective runs. A parameter whose layer and attributes do not say how it is divided gets no note.
    """
    for chunk in as_chunks(model):
        for module in chunk.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if (counts := _counts(module, name, parameter)) is not None:
                    setattr(parameter, _COUNTS, counts)


def counts(parameter: Any, original: Callable[[], bool]) -> bool:
    """Return whether this rank counts the parameter; ``original`` decides where nothing is noted."""
    noted: bool | None = getattr(parameter, _COUNTS, None)
    return original() if noted is None else noted


def copy_note(destination: Any, source: Any) -> None:
    """Copy what is noted on a parameter to the main parameter, or the part of it, that stands for it."""
    if (noted := getattr(source, _COUNTS, None)) is not None:
        setattr(destination, _COUNTS, noted)


def _counts(module: Any, name: str, parameter: Any) -> bool | None:
    """Return whether this rank counts the parameter of a layer; ``None`` if Megatron's answer stands."""
    is_marked = bool(getattr(parameter, "tensor_model_parallel", False))
    divided = (_DIVIDED.get(base.__name__) for base in type(module).__mro__)
    is_divided = name.startswith(next(filter(None, divided), ()))
    if not getattr(parameter, "allreduce", True):
        # An expert, of a model with expert parallelism.
        group = _group_of(module, is_expert=True)
        return None if group is None else is_marked or is_divided or group.rank() == 0
    if getattr(module, "parallel_mode", "") is not None:
        # TransformerEngine itself marks the parameters of a layer with a parallel mode, and Megatron's own
        # layers have no such attribute.
        return None
    if is_marked and has_base(module, "TELinear") and hasattr(parameter, "sequence_parallel"):
        # Megatron sets this attribute on the parameters that it duplicates, and on no other of this class.
        group = _group_of(module, is_expert=False)
        return None if group is None else group.rank() == 0
    if is_divided and not is_marked:
        # An expert without expert parallelism, whose division Megatron hides from TransformerEngine.
        group = _group_of(module, is_expert=True)
        return None if group is None or group.size() == 1 else True
    return None


def _group_of(module: Any, is_expert: bool) -> Any:
    """Return the process group over which the layer is divided or duplicated; ``None`` if there is none."""
    for name in ("_tp_group", "tp_group"):
        if (group := getattr(module, name, None)) is not None:
            return group
    from megatron.core import parallel_state

    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
    return parallel_state.get_tensor_model_parallel_group(check_initialized=False)
