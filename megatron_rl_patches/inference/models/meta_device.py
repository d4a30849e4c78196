"""Construct Megatron modules without memory for their parameters, and give them memory afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...common.text import one_line
from ...reentry import router_replay
from .isolation import (
    original_of,
    replaced_in_this_thread,
    rng_tracker_is_seeded,
    rng_tracker_that_does_not_fork,
)


class NeedsValuesError(RuntimeError):
    """Why parameters cannot be on the meta device while a provider builds its model."""


@contextmanager
def construction(*, on_meta: bool, use_cuda: bool) -> Iterator[list[Parameter]]:
    """Yield a list to which every ``Parameter`` is added that this thread creates inside.

    With ``on_meta`` they are on the meta device from the start. Buffers and plain tensors are computed for
    real, unlike in a context of ``torch.device("meta")``. Parameters of tensor subclasses (FP8 weights of
    TransformerEngine) stay as they are. What needs a meta tensor's values raises :class:`NeedsValuesError`.

    Without ``use_cuda`` the current device is the CPU, and no CUDA context comes into being. The routers of
    mixtures of experts are not on Megatron's list of the routers of the process.
    """
    created: list[Parameter] = []

    def new(cls: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        if on_meta and type(data) in (torch.Tensor, Parameter):
            data = data.detach().to("meta")
        parameter = original_of(Parameter, "__new__")(cls, data, requires_grad)
        created.append(parameter)
        return parameter

    with ExitStack() as stack:

        def replace(owner: Any, name: str, substitute: Any) -> None:
            stack.enter_context(replaced_in_this_thread(owner, name, substitute))

        replace(Parameter, "__new__", new)
        replace(torch.distributed, "all_reduce", _all_reduce_if_real)
        if (replay_class := router_replay.replay_class()) is not None:

            def new_replay(replay: Any, *args: Any, **kwargs: Any) -> None:
                original_of(replay_class, "__init__")(replay, *args, **kwargs)
                router_replay.remove(replay)  # at once, since nobody else could do it if the build fails

            replace(replay_class, "__init__", new_replay)
        if not use_cuda:
            replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
        if not use_cuda and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Classes of Megatron keep a stream for all models of the process. With None in its place, the
            # next model makes one. Only the method is replaced: other threads may call isinstance().
            replace(torch.cuda.Stream, "__new__", lambda *args, **kwargs: None)
        stack.enter_context(_CudaIfReal(use_cuda))
        if on_meta or not rng_tracker_is_seeded():
            stack.enter_context(rng_tracker_that_does_not_fork())
        yield created


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's meta parameters memory on ``device``.

    They are NaN, so that the first output shows if no checkpoint has filled one. A parameter stays the same
    object with the same attributes: modules share parameters, and some (Mamba's) hold references besides.

    Raises:
        NeedsValuesError: something else holds on to a meta tensor, which stays on the meta device.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            fill = float("nan") if parameter.is_floating_point() else 0
            data = torch.full_like(parameter, fill, device=device, requires_grad=False)
            real = Parameter(data, requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            try:
                torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise NeedsValuesError(
                    f"holds another reference to {name} than modules do ({one_line(error)})"
                ) from error
    for path, child in module.named_modules():
        # Parameters are real by now; buffers and other tensors may not be, also those in lists and dicts.
        for name, value in {**child._buffers, **vars(child)}.items():
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                name = f"{path}.{name}".lstrip(".")
                raise NeedsValuesError(f"makes {name} from a weight while it builds the model")


# With tied embeddings and pipeline parallelism, the constructor moves the weight to the GPU and adds up the
# copies of the first and the last stage. A meta tensor can neither be moved nor be added up, and need not be.
def _all_reduce_if_real(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.is_meta:
        return None
    return original_of(torch.distributed, "all_reduce")(tensor, *args, **kwargs)


class _CudaIfReal(TorchFunctionMode):
    """Make ``tensor.cuda()`` return a meta tensor, and without ``use_cuda`` any tensor, as it is.

    Another function that fails with a meta tensor raises :class:`NeedsValuesError`.
    """

    def __init__(self, use_cuda: bool) -> None:
        super().__init__()
        self._use_cuda = use_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda and (args[0].is_meta or not self._use_cuda):
            return args[0]
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if any(isinstance(argument, torch.Tensor) and argument.is_meta for argument in args):
                reason = f"reads a weight while it builds the model ({one_line(error)})"
                raise NeedsValuesError(reason) from error
            raise
