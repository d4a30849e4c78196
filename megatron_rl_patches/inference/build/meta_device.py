"""Construct Megatron modules without memory for their parameters, and give them memory afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .rng import cuda_rng_tracker
from .this_thread import original_of, replaced_in_this_thread

_lock = threading.Lock()
#: For each open block the tracker that it uses, if a block has made it.
_made_trackers: list[Any] = []


@contextmanager
def parameters_on_meta(*, use_cuda: bool) -> Iterator[None]:
    """Put every ``Parameter`` that this thread creates inside on the meta device from the start.

    Buffers and plain tensors, such as the inverse frequencies of rotary embeddings, are computed for real,
    which a ``torch.device("meta")`` context would not do. Parameters of tensor subclasses (FP8 weights of
    TransformerEngine) are left as they are made.

    Megatron's constructors ask for the current CUDA device even if the model is for another one. Without
    ``use_cuda`` the answer is the CPU, so that no CUDA context comes into being.
    """
    with ExitStack() as stack:

        def replace(owner: Any, name: str, substitute: Any) -> None:
            stack.enter_context(replaced_in_this_thread(owner, name, substitute))

        replace(Parameter, "__new__", _new_on_meta)
        replace(torch.distributed, "all_reduce", _all_reduce_if_real)
        if not use_cuda:
            replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
            # Only the method is replaced: other threads may call isinstance(..., torch.cuda.Stream).
            replace(torch.cuda.Stream, "__new__", lambda *args, **kwargs: object())
        stack.enter_context(_CudaIfReal(use_cuda))
        stack.enter_context(rng_tracker_that_does_not_fork())
        yield


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's meta parameters memory on ``device``.

    They are NaN, so that the first output shows if no checkpoint has filled one. A parameter stays the same
    object with the same attributes: modules share parameters, and some (Mamba's) hold references besides.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            fill = float("nan") if parameter.is_floating_point() else 0
            data = torch.full_like(parameter, fill, device=device, requires_grad=False)
            real = Parameter(data, requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


@contextmanager
def rng_tracker_that_does_not_fork() -> Iterator[None]:
    """Make ``fork()`` of Megatron's RNG tracker do nothing, in this thread, which may not have seeded it."""
    from megatron.core.tensor_parallel import random as megatron_random

    with _lock:
        before = cuda_rng_tracker()
        tracker = megatron_random.get_cuda_rng_tracker()
        is_made = before is None or tracker in _made_trackers
        if is_made:
            _made_trackers.append(tracker)
    try:
        with replaced_in_this_thread(tracker, "fork", lambda *args, **kwargs: nullcontext()):
            yield
    finally:
        if is_made:
            with _lock:
                _made_trackers.remove(tracker)
                # Blocks of other threads use the same tracker, so only the last one to end removes it. Code
                # that seeds Megatron later can then choose its kind of tracker.
                is_last = tracker not in _made_trackers and cuda_rng_tracker() is tracker
                if is_last and not tracker.get_states():
                    megatron_random._CUDA_RNG_STATE_TRACKER = None
                    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False


def _new_on_meta(cls: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
    if type(data) in (torch.Tensor, Parameter):
        data = data.detach().to("meta")
    return original_of(Parameter, "__new__")(cls, data, requires_grad)


# With tied embeddings and pipeline parallelism, the constructor moves the weight to the GPU and adds up the
# copies of the first and the last stage. A meta tensor can neither be moved nor be added up, and need not be.
def _all_reduce_if_real(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.is_meta:
        return None
    return original_of(torch.distributed, "all_reduce")(tensor, *args, **kwargs)


class _CudaIfReal(TorchFunctionMode):
    """Make ``tensor.cuda()`` return a meta tensor, and without ``use_cuda`` any tensor, as it is."""

    def __init__(self, use_cuda: bool) -> None:
        super().__init__()
        self._use_cuda = use_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda and (args[0].is_meta or not self._use_cuda):
            return args[0]
        return func(*args, **(kwargs or {}))
