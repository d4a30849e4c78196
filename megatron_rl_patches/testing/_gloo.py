"""``torch.distributed`` written for NCCL, running on gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from ._cuda_redirect import Replacements


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


def replacements() -> list[Replacements]:
    """Return everything of ``torch.distributed`` that is replaced while the redirect is on."""
    adapters = {
        "init_process_group": _on_gloo,
        "new_group": _on_gloo,
        "barrier": _without_device_ids,
        "isend": _sending_a_view,
    }
    adapted = {name: adapt(getattr(distributed_c10d, name)) for name, adapt in adapters.items()}
    # P2POp compares its operation with the defining module's by identity, so both modules get the same one.
    return [(torch.distributed, adapted), (distributed_c10d, adapted)]
