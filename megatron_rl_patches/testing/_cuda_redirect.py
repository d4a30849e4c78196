"""``torch.cuda`` on a machine without a GPU: what names the GPU goes to the CPU.

Two mechanisms, each for what the other cannot reach:

* :class:`CudaToCpu`, a function mode, rewrites the *arguments* of factory calls and of ``.to``;
* :func:`replacements` lists plain attributes that are swapped while the redirect is on.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

_TENSOR_TYPES = ("Bool", "Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double")


class Replacement(NamedTuple):
    """``setattr(owner, name, value)``, to be undone later."""

    owner: Any
    name: str
    value: Any


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class CudaToCpu(TorchFunctionMode):
    """Function mode under which ``device="cuda"`` (or an index) means the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _Engine:
    """The autograd engine, running with the redirect on.

    ``Tensor.backward`` is itself a torch function, and torch switches a mode off while it handles one:
    custom backward functions, of sequence parallelism for one, would ask for CUDA buffers.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with CudaToCpu():
            return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Stream:
    """Stands for every CUDA stream: work is done when the call returns, so there is nothing to order."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


class Event:
    """Stands for a CUDA event; :meth:`elapsed_time` is wall time in milliseconds."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._recorded = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._recorded - self._recorded) * 1e3


_STREAM = Stream()


def _memory_of_the_machine(device: Any = None) -> tuple[int, int]:
    """Free and total bytes: callers divide by the latter."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _itself(tensor: Any, *args: object, **kwargs: object) -> Any:
    return tensor


def _null_context(*args: object, **kwargs: object) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _nvtx_range(*args: object, **kwargs: object) -> Iterator[None]:
    # Also a decorator, as the original is.
    yield


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Megatron's optimizer sorts parameters by this name and refuses what is not on a GPU.
            # Under a function mode torch looks the method up again and comes through here twice.
            return "torch.cuda." + original(self).removeprefix("torch.").removeprefix("cuda.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type


def _eager(model: Any = None, **options: object) -> Any:
    return model if model is not None else _itself


def replacements() -> list[Replacement]:
    """Everything of torch, except ``torch.distributed``, that is swapped while the redirect is on."""
    cuda = torch.cuda
    properties = SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=0, multi_processor_count=1, warp_size=32
    )
    cuda_functions = {
        "is_available": _constant(True),
        # With this one, torch's own lazy initialisation returns at once, also for those who copied it.
        "is_initialized": _constant(True),
        "init": _constant(None),
        "device_count": _constant(1),
        "current_device": _constant(0),
        "set_device": _constant(None),
        "device": _null_context,
        "device_of": _null_context,
        "get_device_name": _constant(properties.name),
        "get_device_capability": _constant((properties.major, properties.minor)),
        "get_device_properties": _constant(properties),
        "is_bf16_supported": _constant(True),
        "synchronize": _constant(None),
        "ipc_collect": _constant(None),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _null_context,
        "set_stream": _constant(None),
        "current_stream": _constant(_STREAM),
        "default_stream": _constant(_STREAM),
        "is_current_stream_capturing": _constant(False),
        "empty_cache": _constant(None),
        "memory_allocated": _constant(0),
        "max_memory_allocated": _constant(0),
        "memory_reserved": _constant(0),
        "max_memory_reserved": _constant(0),
        "reset_peak_memory_stats": _constant(None),
        "reset_max_memory_allocated": _constant(None),
        "mem_get_info": _memory_of_the_machine,
        "memory_stats": lambda *args, **kwargs: defaultdict(int),
        "memory_summary": _constant(""),
        "utilization": _constant(0),
        # One generator plays the CPU's and the GPU's; torch.cuda.random works on it unchanged.
        "default_generators": (torch.default_generator,),
    }
    tensor_methods = {
        "cuda": _itself,
        "pin_memory": _itself,
        "record_stream": _constant(None),
        "type": _tensor_type(torch.Tensor.type),
    }
    tables: list[tuple[Any, dict[str, Any]]] = [
        (cuda, cuda_functions),
        (cuda, {f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TENSOR_TYPES}),
        (cuda.random, {"current_device": _constant(0), "device_count": _constant(1)}),
        (cuda.nvtx, {"range_push": _constant(0), "range_pop": _constant(0)}),
        (cuda.nvtx, {"range": _nvtx_range, "mark": _constant(None)}),
        (torch.Tensor, tensor_methods),
        (torch.nn.Module, {"cuda": _itself}),
        (Variable, {"_execution_engine": _Engine(Variable._execution_engine)}),
        (torch, {"compile": _eager}),
    ]
    return [Replacement(owner, name, value) for owner, table in tables for name, value in table.items()]
