"""Replacements that let Megatron run on CPUs: in ``torch.distributed``, for gloo, and in megatron-core."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed
import wrapt
from packaging.version import Version
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from .cuda_redirect import Replacements, names_cuda
from .transformer_engine.functions import FusedAdam

Arguments = dict[str, Any]


def _adapted(function: Callable[..., Any], change: Callable[[Arguments], None]) -> Callable[..., Any]:
    """Return the function with arguments that are changed before each call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call_changed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        change(call.arguments)
        return function(*call.args, **call.kwargs)

    return call_changed


def _on_cpu(name: str) -> Callable[[Arguments], None]:
    """Return a change of one argument: the CPU in the place of a GPU."""
    return lambda call: call.update({name: "cpu"} if names_cuda(call[name]) else {})


def _autocast_on_cpu(call: Arguments) -> None:
    if names_cuda(call["device_type"]):
        call["device_type"], call["dtype"] = "cpu", call.get("dtype") or torch.float16  # a GPU's default


# --- torch.distributed written for NCCL, on gloo


def _gloo_in_place_of_nccl(call: Arguments) -> None:
    if "nccl" in (call.get("backend") or ""):
        call["backend"] = "gloo"
    call.pop("pg_options", None)
    call.pop("device_id", None)


def _gloo_by_default(call: Arguments) -> None:
    # Without a name torch would make a group of NCCL's beside one of gloo's.
    call["backend"] = call.get("backend") or "gloo"
    _gloo_in_place_of_nccl(call)


def _sending_a_view(call: Arguments) -> None:
    # Pipeline schedules free ``tensor.data`` right after an asynchronous send. NCCL's stream keeps the data;
    # gloo would send what has replaced it (NaN in interleaved runs), unless it holds a view of its own.
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


def replacements() -> list[Replacements]:
    """Return the functions that :mod:`.cuda_redirect` replaces, each with its adapted version."""
    changes: dict[str, Callable[[Arguments], Any]] = {
        "init_process_group": _gloo_by_default,
        "new_group": _gloo_in_place_of_nccl,
        "barrier": lambda call: call.pop("device_ids", None),
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
    # torch.load puts on a GPU what the file, or ``map_location``, says.
    restore = _adapted(torch.serialization.default_restore_location, _on_cpu("location"))
    return [
        *((module, adapted) for module in modules),
        (DeviceMesh, {"__init__": _adapted(DeviceMesh.__init__, _on_cpu("device_type"))}),
        (torch.autocast, {"__init__": _adapted(torch.autocast.__init__, _autocast_on_cpu)}),
        # torch adds a default device after the redirect.
        (torch, {"set_default_device": _adapted(torch.set_default_device, _on_cpu("device"))}),
        (torch.serialization, {"default_restore_location": restore}),
    ]


# --- what megatron-core lacks, or does wrong, where TransformerEngine is not installed


def _has_te() -> bool:
    return find_spec("transformer_engine") is not None


class _HostCopies(TorchFunctionMode):
    """Make ``tensor.is_cuda`` true, except for results of ``tensor.cpu()`` and of functions of these."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = bool(args) and hasattr(args[0], "_is_host_copy")
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_copy
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (is_copy or func is torch.Tensor.cpu):
            result._is_host_copy = True  # type: ignore[attr-defined]
        return result


def _knowing_host_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _HostCopies():
            return original(*args, **kwargs)

    return call


# Module -> attribute -> function that returns its new value. It gets the old one, or None if there is none.
_GAPS: dict[str, dict[str, Callable[[Any], Any]]] = {
    # Up to megatron-core 0.18, is_te_min_version compares _te_version with a version even if it is None.
    "megatron.core.utils": {
        "_te_version": lambda version: version if version or _has_te() else Version("0.0.0")
    },
    # The router compares te_general_gemm with None, but the failed import has left the name undefined.
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": lambda original: original},
    # In megatron-core 0.16 to 0.18 it is true without TransformerEngine, whose classes are mocks then.
    "megatron.core.transformer.multi_latent_attention": {
        "HAVE_TE": lambda have_te: bool(have_te) and _has_te()
    },
    # On a GPU, Adam is a fused one: its rate may be set late, and it counts the steps of a group.
    "megatron.core.optimizer": {
        "Adam": lambda original: FusedAdam,
        "USING_PYTORCH_OPTIMIZER": lambda original: False,
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "Adam": lambda original: FusedAdam,
        "HAVE_APEX_OR_TE": lambda original: True,
        "USING_TE_OPTIMIZER": lambda original: True,
    },
    # Adam of optimizer_cpu_offload divides parameters among copies in host memory and parameters of a GPU.
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": {
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups": _knowing_host_copies,
    },
}
_undo: ExitStack | None = None  # only while filled_gaps() runs


def _fill(module: ModuleType) -> None:
    if _undo is None:
        return
    for path, adapt in _GAPS[module.__name__].items():
        owner, _, name = path.rpartition(".")
        target = getattr(module, owner) if owner else module
        value = adapt(getattr(target, name, None))
        _undo.enter_context(mock.patch.object(target, name, value, create=True))


for _name in _GAPS:
    wrapt.register_post_import_hook(_fill, _name)


@contextmanager
def filled_gaps() -> Iterator[None]:
    """Set the attributes of ``_GAPS`` until the block ends, also in modules that are imported in it."""
    global _undo
    with ExitStack() as _undo:
        for name in _GAPS.keys() & sys.modules.keys():
            _fill(sys.modules[name])
        try:
            yield
        finally:
            _undo = None
