"""``torch.cuda`` and ``torch.accelerator`` without a GPU: tensors and calls that name it go to the CPU.

Neither reaches everything: :class:`CudaToCpu` rewrites arguments of factory calls and of ``.to``, and
:func:`replacements` lists attributes that are replaced while the redirect is on.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ContextDecorator
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import wrapt
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import DefaultDeviceType

#: An object, and the values that its attributes have while the redirect is on.
Replacements = tuple[Any, dict[str, Any]]
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_TENSOR_TYPES = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _itself(x: Any, *args: object, **kwargs: object) -> Any:
    return x


def names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class CudaToCpu(TorchFunctionMode):
    """Function mode under which ``device="cuda"`` (or an index) means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device and isinstance(args[0], int):
            return torch.device("cuda", args[0])
        if names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _Engine(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps the autograd engine, so that backward passes run with the redirect on.

    ``Tensor.backward`` is a torch function, and while a mode handles one, it is off: for custom backward
    functions, too, which run within. Those of sequence parallelism allocate CUDA buffers.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with CudaToCpu():
            return self.__wrapped__.run_backward(*args, **kwargs)


class _Nothing:
    """A context that does nothing, any number of times."""

    __init__ = __exit__ = _constant(None)
    __enter__ = _itself


class _Context(_Nothing, ContextDecorator):
    """The same as a decorator, too, as contexts of ``torch.cuda`` are."""


class Stream(_Nothing):
    """Stands for every CUDA stream. Work is done when a call returns, so there is nothing to order.

    It is not callable: Megatron calls what is, to get a stream.
    """

    cuda_stream = priority = 0
    device = torch.device("cpu")
    wait_stream = wait_event = synchronize = _constant(None)
    query = _constant(True)
    is_capturing = _constant(False)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """Stands for a CUDA event; :meth:`elapsed_time` is wall time in milliseconds."""

    wait = synchronize = _constant(None)
    query = _constant(True)

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.record()

    def record(self, stream: object = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._recorded - self._recorded) * 1e3


def _device_count() -> int:
    """Return how many ranks share this machine, as each has a GPU of its own; torchrun sets the number."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__base__)


class _Generator(torch.Generator, metaclass=_GeneratorType):
    """Stands for ``torch.Generator``, whose instances are generators of the CPU, for any device."""

    def __new__(cls, device: object = None) -> torch.Generator:  # type: ignore[misc]
        return cls.__base__()


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``Tensor.type()`` name CUDA types, and ``Tensor.type(dtype)`` accept them.

    Megatron's optimizer sorts parameters by the name of their type, and refuses those that are not on a GPU.
    """

    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Under a function mode torch looks the method up again, so the name may have its prefix already.
            return "torch.cuda." + original(self).removeprefix("torch.").removeprefix("cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def _of_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function answer for the CPU's autocast where it is asked for a GPU's, the default."""
    return lambda device_type="cuda": original("cpu" if names_cuda(device_type) else device_type)


def _eager(model: Any = None, **options: object) -> Any:
    return model if model is not None else _itself


def replacements() -> list[Replacements]:
    """Return what of torch is replaced while the redirect is on, besides that of ``cpu_adapters``."""
    cuda, cuda_functions = torch.cuda, _cuda_functions()
    # torch itself, Adam for one, asks torch.accelerator, which in a wheel with CUDA is a GPU on any machine.
    accelerator_functions = {
        **cuda_functions,  # it has most of them under the same names
        "current_accelerator": _constant(torch.device("cuda")),
        "get_device_capability": _constant({"supported_dtypes": _DTYPES}),
        "get_memory_info": cuda_functions["mem_get_info"],
        "device_index": _Context,
        **dict.fromkeys(("current_device_index", "current_device_idx"), _constant(0)),
        **dict.fromkeys(("set_device_index", "set_device_idx"), _constant(None)),
        **dict.fromkeys(("empty_host_cache", "reset_accumulated_memory_stats"), _constant(None)),
    }
    tensor_methods = {
        "cuda": _itself,
        "pin_memory": _itself,
        "record_stream": _constant(None),
        "type": _tensor_type(torch.Tensor.type),
    }
    autocast_dtype = _of_cpu(torch.get_autocast_dtype)
    return [
        (cuda, cuda_functions),
        (torch.accelerator, accelerator_functions),
        # Or else torch would write the accelerator into this class, where it would stay after the block.
        (DefaultDeviceType, {"_default_device_type": "cuda"}),
        (cuda.random, {"current_device": _constant(0), "device_count": _device_count}),
        (cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _constant(0)) | {"range": _Context}),
        (cuda.nccl, {"version": _constant((2, 0, 0))}),
        (torch.Tensor, tensor_methods),
        (torch.nn.Module, {"cuda": _itself}),
        (Variable, {"_execution_engine": _Engine(Variable._execution_engine)}),
        (torch, {"is_autocast_enabled": _of_cpu(torch.is_autocast_enabled)}),
        (torch, {"get_autocast_dtype": autocast_dtype, "get_autocast_gpu_dtype": autocast_dtype}),
        (torch, {"compile": _eager, "Generator": _Generator, "Stream": Stream, "Event": Event}),
    ]


def _cuda_functions() -> dict[str, Any]:
    """Return what takes the place of functions of ``torch.cuda``."""
    stream = _constant(Stream())
    properties = SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )
    by_value: list[tuple[Any, str]] = [
        # With is_initialized, torch's lazy initialization returns at once, and so do copies in other modules.
        (True, "is_available is_initialized is_bf16_supported"),
        (False, "is_current_stream_capturing"),
        (None, "init set_device synchronize ipc_collect set_stream empty_cache"),
        (None, "reset_peak_memory_stats reset_max_memory_allocated"),
        (0, "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved"),
        (0, "utilization temperature power_draw clock_rate device_memory_used"),
        ("", "memory_summary"),
        (properties.name, "get_device_name"),
        ((properties.major, properties.minor), "get_device_capability"),
        (properties, "get_device_properties"),
    ]
    return {
        **{name: _constant(value) for value, names in by_value for name in names.split()},
        **dict.fromkeys(("device", "device_of", "stream"), _Context),
        **dict.fromkeys(("Stream", "ExternalStream"), Stream),
        **dict.fromkeys(("current_stream", "default_stream"), stream),
        "Event": Event,
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TENSOR_TYPES},
        "device_count": _device_count,
        "mem_get_info": lambda device=None: psutil.virtual_memory()[1::-1],
        "memory_stats": lambda *args, **kwargs: defaultdict(int),
        # One generator serves as the CPU's and the GPU's; torch.cuda.random works on it unchanged.
        "default_generators": [torch.default_generator] * _device_count(),
    }
