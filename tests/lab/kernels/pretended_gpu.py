"""A GPU for torch's compiler where there is none: it asks for properties, and starts no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Multiprocessors of A100, H100 SXM and B200, by compute capability.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


class _OnTheCpu(TorchDispatchMode):
    """The compiler folds constants with real tensors, which it makes on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _fold_on_the_cpu(self: Any, node: Any, deduce: Any = UniformValueConstantFolder._deduce_value) -> Any:
    with _OnTheCpu():
        return deduce(self, node)


@contextmanager
def _target(capability: int) -> Iterator[None]:
    """Give triton a driver that knows for which GPU it compiles."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            get_device_capability=lambda *device: divmod(capability, 10),
            get_current_stream=lambda *device: 0,
            map_python_to_cpp_type=lambda name: name,
        )
    )
    torch.utils._triton.triton_backend.cache_clear()
    torch.utils._triton.triton_hash_with_backend.cache_clear()
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """Let the compiler see a GPU of this compute capability, such as 90."""
    major_minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name=f"pretended sm_{capability}",
        major=major_minor[0],
        minor=major_minor[1],
        multi_processor_count=MULTIPROCESSORS[capability],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 << 30,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=50 << 20,
        gcnArchName="",
    )
    with ExitStack() as stack:
        for owner, name, value in (
            (fake_tensor, "init_gpu_context", lambda *device: None),
            (FakeTensorMode, "avoid_device_init", True),
            (torch.cuda, "_initialized", True),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *device: major_minor),
            (torch.cuda, "get_device_properties", lambda *device: properties),
            (torch.cuda, "get_device_name", lambda *device: properties.name),
            (torch.cuda, "synchronize", lambda *device: None),
            (torch.cuda, "_exchange_device", lambda index: 0),
            (torch.cuda, "_maybe_exchange_device", lambda index: 0),
            (torch.cuda, "get_rng_state", lambda *device: torch.empty(0, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda *state: None),
            (torch.cuda, "default_generators", (torch.Generator(),)),
            (torch._C, "_cuda_getDevice", lambda: 0),
            (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False),
            (CudaInterface, "is_available", staticmethod(lambda: True)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: capability)),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda including_emulation=False: True)),
            (CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
            (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
            (UniformValueConstantFolder, "_deduce_value", _fold_on_the_cpu),
        ):
            stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(_target(capability))
        yield
