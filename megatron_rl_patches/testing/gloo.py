"""``torch.distributed`` written for NCCL, running on gloo."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .cuda_redirect import Replacements

Arguments = dict[str, Any]


def _adapted(function: Callable[..., Any], change: Callable[[Arguments], None]) -> Callable[..., Any]:
    """Return the function with arguments that are changed before each call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        change(call.arguments)
        return function(*call.args, **call.kwargs)

    return on_cpu


def _gloo_in_place_of_nccl(call: Arguments) -> None:
    if "nccl" in (call.get("backend") or ""):
        call["backend"] = "gloo"
    call.pop("pg_options", None)
    call.pop("device_id", None)


def _gloo_by_default(call: Arguments) -> None:
    # Without a name torch would make a group of NCCL's beside one of gloo's.
    call["backend"] = call.get("backend") or "gloo"
    _gloo_in_place_of_nccl(call)


def _without_device_ids(call: Arguments) -> None:
    call.pop("device_ids", None)


def _sending_a_view(call: Arguments) -> None:
    # Pipeline schedules free ``tensor.data`` right after an asynchronous send. NCCL's stream keeps the memory
    # alive until it is sent. Gloo would send what has replaced it (NaN in interleaved runs), unless it holds
    # a view of its own.
    call["tensor"] = call["tensor"].detach()


class _ScaledSum(NamedTuple):
    """Stands for NCCL's sum of tensors that are multiplied with a factor before."""

    factor: Any


def _scaling_first(call: Arguments) -> None:
    if isinstance(op := call.get("op"), _ScaledSum):
        call["op"] = torch.distributed.ReduceOp.SUM
        if "input" in call:
            call["input"] = call["input"] * op.factor
        else:
            call["tensor"].mul_(op.factor)


def _flat(call: Arguments) -> None:
    # NCCL counts elements, and gloo compares shapes.
    call["output_tensor"] = call["output_tensor"].view(-1)
    call["input_tensor"] = call["input_tensor"].reshape(-1)


def _with_listed_splits(call: Arguments) -> None:
    # Megatron makes lists of split sizes that are tensors on a GPU only.
    for name in ("output_split_sizes", "input_split_sizes"):
        if isinstance(sizes := call.get(name), torch.Tensor):
            call[name] = sizes.tolist()


def _mesh_on_cpu(call: Arguments) -> None:
    if call["device_type"] == "cuda":
        call["device_type"] = "cpu"


def replacements() -> list[Replacements]:
    """Return everything of ``torch.distributed`` that is replaced while the redirect is on."""
    changes = {
        "init_process_group": _gloo_by_default,
        "new_group": _gloo_in_place_of_nccl,
        "barrier": _without_device_ids,
        "isend": _sending_a_view,
        "all_reduce": _scaling_first,
        "reduce_scatter_tensor": _scaling_first,
        "all_gather_into_tensor": _flat,
        "all_to_all_single": _with_listed_splits,
    }
    adapted = {name: _adapted(getattr(distributed_c10d, name), change) for name, change in changes.items()}
    adapted["_make_nccl_premul_sum"] = _ScaledSum
    # P2POp compares its operation with the defining module's by identity, so all modules get the same one.
    modules = (torch.distributed, distributed_c10d, device_mesh)
    mesh = {"__init__": _adapted(DeviceMesh.__init__, _mesh_on_cpu)}
    return [*((module, adapted) for module in modules), (DeviceMesh, mesh)]
