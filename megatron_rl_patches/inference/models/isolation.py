"""Building a model so that nobody else notices: random streams and other threads go on as before."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...common.scopes import restore, snapshot
from ...common.text import one_line
from ...reentry import router_replay

_lock = threading.Lock()
#: The functions that somebody replaces now, by the identity of their owner and their name.
_replaced: dict[tuple[int, str], _Replaced] = {}


@contextmanager
def replaced_in_this_thread(owner: Any, name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    """Call ``substitute(original, ...)`` in place of ``owner.name(...)``, in the calling thread only.

    The attribute belongs to all threads, so it gets a function that asks which thread is calling. Blocks may
    overlap and nest: the last to end puts back what the first has replaced, which is the original of all.
    """
    place = id(owner), name
    with _lock:
        replaced = _replaced[place] = _replaced.get(place) or _Replaced(owner, name)
        replaced.blocks += 1
    outer = getattr(replaced.thread, "substitute", None)
    replaced.thread.substitute = substitute
    try:
        yield
    finally:
        replaced.thread.substitute = outer
        with _lock:
            replaced.blocks -= 1
            if replaced.blocks == 0:
                _replaced.pop(place).put_back()


class _Replaced:
    """The function at ``owner.name``, which at least one thread replaces."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.blocks = 0
        self.thread = threading.local()
        self._before = snapshot(owner, name)
        original: Callable[..., Any] = getattr(owner, name)

        @wraps(original)
        def choose(*args: Any, **kwargs: Any) -> Any:
            substitute = getattr(self.thread, "substitute", None)
            return original(*args, **kwargs) if substitute is None else substitute(original, *args, **kwargs)

        is_static = name == "__new__" or isinstance(self._before[name], staticmethod)
        self._installed = staticmethod(choose) if is_static else choose
        setattr(owner, name, self._installed)

    def put_back(self) -> None:
        # Unless somebody has wrapped the function meanwhile: then it stays, and does nothing.
        if vars(self.owner).get(self.name) is self._installed:
            restore(self.owner, self._before)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Put every random stream back at the end, also if the body raises.

    These are the generators of Python, numpy, torch (of CUDA on the current device, if it has a context) and
    Megatron's RNG tracker. Numbers that another thread draws meanwhile are drawn again later.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    tracked = {} if (tracker := cuda_rng_tracker()) is None else tracker.get_states()
    # Drawing changes a generator in place, so its state is copied.
    moving = {state: state.get_state() for state in tracked.values() if isinstance(state, torch.Generator)}
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if has_cuda else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in moving.items():
            generator.set_state(state)
        # The tracker may have been made within the block.
        if (tracker := cuda_rng_tracker()) is not None:
            if tracked:
                tracker.set_states(tracked)
            elif tracker.get_states():
                tracker.reset()


def cuda_rng_tracker() -> Any:
    """Return Megatron's tracker if there is one; Megatron's own getter would create it and fix its class."""
    random_module = sys.modules.get("megatron.core.tensor_parallel.random")
    return getattr(random_module, "_CUDA_RNG_STATE_TRACKER", None)


def rng_tracker_is_seeded() -> bool:
    """Return whether Megatron's RNG tracker has streams, without which it cannot fork."""
    return (tracker := cuda_rng_tracker()) is not None and bool(tracker.get_states())


@contextmanager
def rng_tracker_that_does_not_fork() -> Iterator[None]:
    """Make ``fork()`` of Megatron's RNG tracker do nothing, in this thread, which may not have seeded it."""
    from megatron.core.tensor_parallel import random as megatron_random

    before = cuda_rng_tracker()
    kind = megatron_random.CudaRNGStatesTracker if before is None else type(before)
    try:
        with replaced_in_this_thread(kind, "fork", lambda *_, **__: nullcontext()):
            yield
    finally:
        # Code that seeds Megatron later can choose its kind of tracker, unless one is there.
        if before is None and cuda_rng_tracker() is not None and not rng_tracker_is_seeded():
            megatron_random._CUDA_RNG_STATE_TRACKER = None
            megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False


# --- construction on the meta device


class NeedsValuesError(RuntimeError):
    """Why parameters cannot be on the meta device while a provider builds its model."""


@contextmanager
def construction(*, on_meta: bool, use_cuda: bool) -> Iterator[list[Parameter]]:
    """Yield a list to which every ``Parameter`` is added that this thread creates inside.

    With ``on_meta`` they are on the meta device from the start, but for those of tensor subclasses (FP8
    weights of TransformerEngine). Buffers and plain tensors are real, unlike under ``torch.device("meta")``.
    What needs a meta tensor's values raises :class:`NeedsValuesError`.

    Without ``use_cuda`` the current device is the CPU, and no CUDA context comes into being. The routers of
    mixtures of experts are not on Megatron's list of the routers of the process.
    """
    created: list[Parameter] = []

    def new(original: Any, cls: type[Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        if on_meta and type(data) in (torch.Tensor, Parameter):
            data = data.detach().to("meta")
        parameter = original(cls, data, requires_grad)
        created.append(parameter)
        return parameter

    substitutes: list[tuple[Any, str, Callable[..., Any]]] = [
        (Parameter, "__new__", new),
        (torch.distributed, "all_reduce", _all_reduce_if_real),
    ]
    if (replay_class := router_replay.replay_class()) is not None:
        substitutes.append((replay_class, "__init__", _not_listed))
    if not use_cuda:
        substitutes.append((torch.cuda, "current_device", lambda _: torch.device("cpu")))
    if not use_cuda and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Classes of Megatron keep a stream for all models of the process. With None in its place, the next
        # model makes one. Only the method is replaced: other threads may call isinstance().
        substitutes.append((torch.cuda.Stream, "__new__", lambda *_, **__: None))
    with ExitStack() as stack:
        for owner, name, substitute in substitutes:
            stack.enter_context(replaced_in_this_thread(owner, name, substitute))
        stack.enter_context(_CudaIfReal(use_cuda))
        if on_meta or not rng_tracker_is_seeded():
            stack.enter_context(rng_tracker_that_does_not_fork())
        yield created


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Give the module's meta parameters memory on ``device``.

    They are NaN, so that the first output shows if no checkpoint has filled one. A parameter stays the same
    object with the same attributes: modules share parameters, and some (Mamba's) hold references besides.
    ``NeedsValuesError`` is raised if something else holds on to a tensor on the meta device.
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
                reason = f"holds another reference to {name} than modules do ({one_line(error)})"
                raise NeedsValuesError(reason) from error
    for path, child in module.named_modules():
        # Parameters are real by now; buffers and other tensors may not be, also those in lists and dicts.
        for name, value in {**child._buffers, **vars(child)}.items():
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                name = f"{path}.{name}".lstrip(".")
                raise NeedsValuesError(f"makes {name} from a weight while it builds the model")


# With tied embeddings and pipeline parallelism, the constructor moves the weight to the GPU and adds up the
# copies of the first and the last stage. A meta tensor can neither be moved nor be added up, and need not be.
def _all_reduce_if_real(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return None if tensor.is_meta else original(tensor, *args, **kwargs)


def _not_listed(original: Any, replay: Any, *args: Any, **kwargs: Any) -> None:
    original(replay, *args, **kwargs)
    router_replay.remove(replay)  # at once, since nobody else could do it if the build fails


class _CudaIfReal(TorchFunctionMode):
    """Make ``tensor.cuda()`` return a meta tensor as it is, and without ``use_cuda`` any tensor.

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
