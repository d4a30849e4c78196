"""Constructing Megatron modules without memory for their parameters, and giving them memory afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch.nn import Parameter

from .global_state import cuda_rng_tracker


@contextmanager
def parameters_on_meta(*, use_cuda: bool) -> Iterator[None]:
    """Every ``Parameter`` that this thread creates inside is on the meta device from the start.

    Buffers and plain tensors, such as the inverse frequencies of rotary embeddings, are computed for real,
    which a ``torch.device("meta")`` context would not do. Attributes that constructors set on parameters
    stay. Initialisation comes to nothing: it works on meta tensors, and Megatron's RNG tracker does not
    fork. Parameters of tensor subclasses (FP8 weights of TransformerEngine) are left as they are made.

    Megatron's constructors ask for the current CUDA device whatever they are for. Without ``use_cuda`` they
    are told the CPU, and no CUDA context comes into being.
    """
    new, all_reduce, cuda = Parameter.__new__, torch.distributed.all_reduce, torch.Tensor.cuda
    builder = threading.get_ident()

    def new_on_meta(cls: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (torch.Tensor, Parameter) and threading.get_ident() == builder:
            data = data.detach().to("meta")
        return new(cls, data, requires_grad)

    # With tied embeddings and pipeline parallelism, the constructor moves the weight to the GPU and adds up
    # the copies of the first and the last stage. There is nothing to move or to add, on either.
    def all_reduce_if_real(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.is_meta else all_reduce(tensor, *args, **kwargs)

    def cuda_if_real(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cuda(self, *args, **kwargs) if use_cuda and not self.is_meta else self

    with ExitStack() as stack:
        stack.enter_context(replaced(Parameter, "__new__", staticmethod(new_on_meta)))
        stack.enter_context(replaced(torch.distributed, "all_reduce", all_reduce_if_real))
        stack.enter_context(replaced(torch.Tensor, "cuda", cuda_if_real))
        stack.enter_context(rng_tracker_that_does_not_fork())
        if not use_cuda:
            stack.enter_context(replaced(torch.cuda, "current_device", lambda: torch.device("cpu")))
            stack.enter_context(replaced(torch.cuda, "Stream", _NoStream))
        yield


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's meta parameters memory on ``device``.

    Floating-point parameters are filled with NaN, so that one that no checkpoint fills shows in the first
    output. A parameter stays the same object with the same attributes: modules share parameters, and some
    (Mamba's) hold references besides.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            fill = float("nan") if parameter.is_floating_point() else 0
            data = torch.full_like(parameter, fill, device=device, requires_grad=False)
            real = Parameter(data, requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` for a while."""
    inherited = name not in vars(owner)
    original = None if inherited else vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


class _NoStream:
    """What constructors of MoE layers get for a CUDA stream without CUDA."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


@contextmanager
def rng_tracker_that_does_not_fork() -> Iterator[None]:
    """For whoever forks a tracker that may not be seeded, or whose device may not exist."""
    from megatron.core.tensor_parallel import random as megatron_random

    existed = cuda_rng_tracker() is not None
    tracker = megatron_random.get_cuda_rng_tracker()
    try:
        with replaced(tracker, "fork", lambda *args, **kwargs: nullcontext()):
            yield
    finally:
        if not existed:
            # Whoever seeds Megatron later still chooses what kind of tracker it gets.
            megatron_random._CUDA_RNG_STATE_TRACKER = None
            megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
