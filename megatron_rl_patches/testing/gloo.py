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


def _on_gloo(create: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a function that creates process groups, so that it creates gloo groups in place of NCCL's."""

    @functools.wraps(create)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        # Both creators take the backend positionally as well: first, or third after ranks and timeout.
        args = tuple("gloo" if isinstance(arg, str) and "nccl" in arg else arg for arg in args)
        if "nccl" in (kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        on_cpu = {name: value for name, value in kwargs.items() if name not in ("pg_options", "device_id")}
        return create(*args, **on_cpu)

    return with_gloo


def _gloo_by_default(init: Callable[..., None]) -> Callable[..., None]:
    """Adapt ``init_process_group``, which would make a group of NCCL's beside one of gloo's."""
    with_gloo = _on_gloo(init)

    @functools.wraps(init)
    def on_cpu(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        with_gloo(backend or "gloo", *args, **kwargs)

    return on_cpu


def _without_device_ids(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def on_cpu(group: Any = None, async_op: bool = False, device_ids: object = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return on_cpu


def _sending_a_view(isend: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt ``isend`` to pipeline schedules, which free ``tensor.data`` right after an asynchronous send.

    NCCL's stream keeps the memory alive until it is sent. Gloo would send what has replaced it (NaN in
    interleaved runs), unless it holds a view of its own.
    """

    @functools.wraps(isend)
    def on_cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach(), *args, **kwargs)

    return on_cpu


class _ScaledSum(NamedTuple):
    """Stands for NCCL's sum of tensors that are multiplied with a factor before."""

    factor: Any


def _scaling_first(reduce: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(reduce)

    @functools.wraps(reduce)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        if isinstance(op := call.get("op"), _ScaledSum):
            call["op"] = torch.distributed.ReduceOp.SUM
            if "input" in call:
                call["input"] = call["input"] * op.factor
            else:
                call["tensor"].mul_(op.factor)
        return reduce(**call)

    return on_cpu


def _flat(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a gather into one tensor: NCCL counts elements, and gloo compares shapes."""

    @functools.wraps(gather)
    def on_cpu(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return gather(output_tensor.view(-1), input_tensor.reshape(-1), *args, **kwargs)

    return on_cpu


def _with_listed_splits(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt an exchange to split sizes that are tensors; Megatron makes lists of those on a GPU only."""

    @functools.wraps(exchange)
    def on_cpu(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(_listed(arg) for arg in args)
        return exchange(output, input, *args, **{name: _listed(value) for name, value in kwargs.items()})

    return on_cpu


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _mesh_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return on_cpu


def replacements() -> list[Replacements]:
    """Return everything of ``torch.distributed`` that is replaced while the redirect is on."""
    adapters = {
        "init_process_group": _gloo_by_default,
        "new_group": _on_gloo,
        "barrier": _without_device_ids,
        "isend": _sending_a_view,
        "all_reduce": _scaling_first,
        "reduce_scatter_tensor": _scaling_first,
        "all_gather_into_tensor": _flat,
        "all_to_all_single": _with_listed_splits,
    }
    adapted = {name: adapt(getattr(distributed_c10d, name)) for name, adapt in adapters.items()}
    adapted["_make_nccl_premul_sum"] = _ScaledSum
    # P2POp compares its operation with the defining module's by identity, so all modules get the same one.
    modules = (torch.distributed, distributed_c10d, device_mesh)
    mesh = {"__init__": _mesh_on_cpu(DeviceMesh.__init__)}
    return [*((module, adapted) for module in modules), (DeviceMesh, mesh)]
