"""Runs code on fake CUDA tensors, and records what it asks of the GPU: waits, products, row passes, memory.

Tensors that the code makes in host memory are real, so that it can read them. Those on the GPU are fake: they
have a shape, a dtype and a device, and no values. Where the code reads one all the same, the recorder notes a
wait and answers.
"""

import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl_patches.losses import DeferredLogits, output_layer
from megatron_rl_patches.losses.vocab import at_ids, compiling, log_probs, softmax
from megatron_rl_patches.losses.vocab import output_layer as tiles

aten = torch.ops.aten
_PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm)
_FREE = 80 << 30  # bytes of the GPU
#: Operations that start no kernel, beside views.
_NO_KERNEL = {"device", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_MASKS = (torch.bool, torch.uint8)


class Recorder(TorchDispatchMode):
    """Notes what operations ask of the GPU.

    Attributes:
        conditions_hold: what is answered where the package reads a condition, or the rows that meet one: that
            it holds, or that all rows do.
        waits: how often the CPU waited for the GPU, by function of the package and operation.
        products: how often a matrix product of some shapes was computed.
        row_passes: how often a function went over a block of rows; ``plain_passes``: how often as plain
            operators, which a GPU runs where nothing can be compiled.
        small_operations: how many operations started a kernel, without products and compiled passes.
        moved: bytes that these and the compiled passes read or write, each tensor once per operation.
        live: bytes of the tensors on the GPU; ``peak``: the most so far. Of a compiled pass over rows the
            results count alone, since its kernels hold intermediate values in registers.
    """

    def __init__(self, conditions_hold: bool) -> None:
        super().__init__()
        self.conditions_hold = conditions_hold
        self.waits: Counter[str] = Counter()
        self.products: Counter[str] = Counter()
        self.row_passes: Counter[str] = Counter()
        self.plain_passes: Counter[str] = Counter()
        self.live = self.peak = self.small_operations = self.moved = 0
        self.is_compiled = False
        self._storages: set[int] = set()
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, DeferredLogits) for x in tensors):
            return NotImplemented  # they answer by operations that come here
        if func.overloadpacket is aten.to:  # from deferred logits, whole
            with self:
                return func.decompose(*args, **kwargs)
        is_pinned = bool(kwargs.pop("pin_memory", False))
        device = torch.device(kwargs.get("device") or "cpu")
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):
                tensor.constant = None  # a number that was copied to the GPU, with which torch would compute
        is_real = not any(isinstance(x, FakeTensor) for x in tensors)
        if is_real and device.type == "cpu" and not is_pinned:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _collective(func, args, kwargs)
        if any(x.is_cuda for x in tensors):
            _check_exists(func)
        if has_waited := waits(func, args, kwargs, tensors, self._pinned):
            self.wait(func.overloadpacket.__name__)
        if func.overloadpacket in _PRODUCTS:
            shapes = [list(x.shape) for x in args if isinstance(x, Tensor)]
            self.products["{} × {}".format(*shapes[-2:])] += 1
        result = self._answer(func, args, kwargs)
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        is_on_gpu = any(x.is_cuda for x in (*tensors, *results))
        if is_on_gpu and starts_kernel(func) and not (has_waited or self.is_compiled):
            self.small_operations += 1
            self.moved += _moved(func, tensors, result)
        if func.overloadpacket is aten._to_copy and device.type == "cpu" and kwargs.get("non_blocking"):
            is_pinned = True  # torch allocates pinned memory for it
        for made in results:
            self._hold(made)
            if is_pinned:
                self.pin(made)
        return result

    def count_pass(self, function: str, is_compiled: bool) -> None:
        self.row_passes[function] += 1
        self.plain_passes[function] += not is_compiled

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result; of an operation whose result depends on values, one that could be."""
        name, first = func.overloadpacket, args[0] if args else None
        if name is aten._local_scalar_dense:
            return self._holds() if first.dtype == torch.bool else int(self._holds())
        if name is aten.equal:
            return self._holds()
        if name is aten.record_stream:
            return None  # there is no allocator that could note it
        if name is aten.addmm and "out" in kwargs:
            return kwargs["out"]  # torch 2.11 has no fake version of the one whose result has another dtype
        if name is aten.nonzero:
            return first.new_empty((first.numel() * self._holds(), first.dim()), dtype=torch.int64)
        if name is aten.bincount:
            return first.new_empty(kwargs.get("minlength", 0), dtype=torch.int64)
        if name is aten.index and any(x is not None and x.dtype in _MASKS for x in args[1]):
            return first[tuple(index for x in args[1] for index in self._numbers(x))]
        if name is aten._to_copy and first.device.type == "cpu" and not isinstance(first, FakeTensor):
            return torch.empty(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=kwargs["device"])
        return func(*args, **kwargs)

    def _holds(self) -> bool:
        return self.conditions_hold and bool(_place())  # and none does that Megatron asks for

    def _numbers(self, index: Tensor | None) -> list[Any]:
        """Return an index as it is, or in place of a mask one for each of its dimensions."""
        if index is None or index.dtype not in _MASKS:
            return [slice(None) if index is None else index]
        selected = index.numel() * self._holds()
        return [index.new_empty(selected, dtype=torch.int64) for _ in range(index.dim())]

    def wait(self, operation: str) -> None:
        if place := _place():
            self.waits[f"{operation} in {place}"] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def _hold(self, made: Any) -> None:
        if not (isinstance(made, FakeTensor) and made.is_cuda):
            return
        storage = made.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        if not self.is_compiled:
            self.peak = max(self.peak, self.live)

    def _release(self, key: int, nbytes: int) -> None:
        self._storages.discard(key)
        self.live -= nbytes


def starts_kernel(func: Any) -> bool:
    """Return whether an operation on a GPU is neither a product, nor a view, nor an allocation."""
    is_view = any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns)
    return not is_view and func.overloadpacket not in _PRODUCTS and func._opname not in _NO_KERNEL


def waits(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], pinned: Container[Any]) -> bool:
    """Return whether an operation makes the CPU wait for the GPU; ``pinned`` are storages."""
    name = func.overloadpacket
    if name in (aten._local_scalar_dense, aten.equal, aten.nonzero, aten.bincount, aten.masked_select):
        return any(x.is_cuda for x in tensors)
    if name in (aten.index, aten.index_put, aten.index_put_):
        indices = [x for x in args[1] if x is not None]
        return args[0].is_cuda and any(x.dtype in _MASKS or not x.is_cuda for x in indices)
    if name is aten._to_copy:
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        if {source.device.type, target.type} != {"cpu", "cuda"}:
            return False
        return not (kwargs.get("non_blocking") and (source.is_cuda or source.untyped_storage() in pinned))
    if name is aten.copy_ and args[0].is_cuda != args[1].is_cuda:
        is_async, on_cpu = kwargs.get("non_blocking") or args[2:] == (True,), args[args[0].is_cuda]
        return not (is_async and on_cpu.untyped_storage() in pinned)
    return False


_READ_BY_INDEX = (aten.gather, aten.index, aten.index_select)
_WRITTEN_BY_INDEX = (aten.scatter_, aten.scatter_add_, aten.index_put_, aten.index_copy_)


def _moved(func: Any, tensors: list[Tensor], result: Any) -> int:
    """Return the bytes of what an operation reads and writes, a tensor that it does both with once."""
    if func.overloadpacket in _READ_BY_INDEX:
        return result.numel() * tensors[0].element_size() + bytes_of([*tensors[1:], result])
    if func.overloadpacket in _WRITTEN_BY_INDEX:
        return tensors[-1].numel() * tensors[0].element_size() + bytes_of(tensors[1:])
    return bytes_of([*tensors, *tree_leaves(result)])


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors on the GPU, each once; of expanded ones, those that exist."""
    total = 0
    for tensor in {id(x): x for x in values if isinstance(x, Tensor) and x.is_cuda}.values():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        total += math.prod(size for size, stride in sizes if stride) * tensor.element_size()
    return total


def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective of the process group ``fake``, which moves nothing, on tensors that exist."""
    with unset_fake_temporarily():
        stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

        def real(tensor: Tensor) -> Tensor:
            return stand_ins.setdefault(id(tensor), (torch.empty(0), tensor))[0]

        args, kwargs = tree_map_only(Tensor, real, (args, kwargs))
        result = func(*args, **kwargs)
        originals = {id(stand_in): tensor for stand_in, tensor in stand_ins.values()}
        return tree_map_only(Tensor, lambda tensor: originals[id(tensor)], result)


def _check_exists(func: Any) -> None:
    """Raise an error if this release of torch cannot run an operation on a GPU."""
    if func.namespace == "aten" and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(
        func.name(), "CUDA"
    ):
        raise NotImplementedError(f"{func} has no kernel for CUDA")


def _place() -> str:
    """Return the function of the package that is running, as ``topk.py:finish_tile``.

    It is empty where the package has called Megatron's code or a test's, whose waits are not its own.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if any(part in path for part in ("/megatron/core/", "/tests/real/", "/megatron_rl_patches/testing/")):
            return ""
        if "/megatron_rl_patches/" in path and not name.startswith("<"):
            return f"{path.rpartition('/')[2]}:{name}"
        frame = frame.f_back
    return ""


def _apply(module: torch.nn.Module, convert: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """Convert what a module has, as ``module.cuda()`` does; torch cannot replace parameters by fake ones."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                converted = torch.nn.Parameter(convert(parameter.detach()), parameter.requires_grad)
                vars(converted).update(vars(parameter))
                part._parameters[name] = converted
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else convert(buffer)
    return module


def raise_at_once(block: object, error: Exception) -> None:
    """Take the place of ``BlockFunction._give_up``, which would go on with plain operators."""
    raise error


@contextmanager
def recording(conditions_hold: bool = False) -> Iterator[Recorder]:
    """Let the code inside make fake tensors on the device ``cuda``; the stand-ins must be loaded."""
    recorder = Recorder(conditions_hold)
    call, buffered_statistics = compiling.BlockFunction.__call__, softmax.buffered_statistics
    block_gradient = softmax.block_gradient
    data_ptr, tolist = torch.UntypedStorage.data_ptr, FakeTensor.tolist

    def row_pass(block: Any, *args: Any) -> Any:
        recorder.count_pass(block._function.__name__, block.compiled)
        recorder.is_compiled = block.compiled
        try:
            result = call(block, *args)
            recorder.moved += bytes_of(tree_leaves((args, result))) * block.compiled
            return result
        finally:
            recorder.is_compiled = False

    def buffered(*args: Any) -> Any:
        recorder.count_pass(buffered_statistics.__name__, is_compiled=False)
        return buffered_statistics(*args)

    @functools.wraps(block_gradient)
    def gradient(*args: Any) -> Any:
        if not recorder.is_compiled:
            recorder.count_pass(block_gradient.__name__, is_compiled=False)
        return block_gradient(*args)

    def waiting(owner: Any) -> Any:
        function = owner.synchronize

        def synchronize(*args: Any) -> Any:
            recorder.wait(f"{owner.__name__.rpartition('.')[2]}.synchronize")
            return function(*args)

        return patch.object(owner, "synchronize", synchronize)

    def address(storage: Any) -> int:
        # Storages of fake tensors have no memory; whether two are the same is all that the package asks.
        return storage._cdata if storage.device.type == "meta" else data_ptr(storage)

    def address_of_tensor(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()

    with ExitStack() as stack:
        for owner, name, value in (
            (fake_tensor, "init_gpu_context", lambda *device: None),  # it would start a kernel
            (FakeTensorMode, "avoid_device_init", True),
            (torch.cuda, "_initialized", True),  # there is no driver to initialize
            (torch.cuda, "get_device_capability", lambda *device: (9, 0)),
            (torch.cuda, "default_generators", (torch.Generator(),)),
            (torch.cuda, "mem_get_info", lambda *device: (_FREE - recorder.live, _FREE)),
            *((torch.cuda, name, lambda *device: 0) for name in ("memory_reserved", "memory_allocated")),
            (Tensor, "pin_memory", lambda tensor, *args: recorder.pin(tensor.clone())),
            (torch.UntypedStorage, "data_ptr", address),
            (FakeTensor, "data_ptr", address_of_tensor),
            (FakeTensor, "tolist", lambda tensor: tolist(tensor.cpu())),  # in one copy, as torch does it
            (torch.nn.Module, "_apply", _apply),
            # Under the modes of a rehearsal the functions run as Python, on the blocks of compiled ones.
            (compiling, "_is_disabled", lambda: False),
            (compiling, "_compiled", lambda function, is_elementwise: functools.partial(function)),
            (compiling.BlockFunction, "__call__", row_pass),
            *((module, "buffered_statistics", buffered) for module in (log_probs, at_ids)),
            *((module, "block_gradient", gradient) for module in (log_probs, at_ids, tiles)),
            (compiling.BlockFunction, "_give_up", raise_at_once),
            # A fake parameter is a FakeTensor, which the output layer would not take for a parameter.
            (output_layer, "type", lambda x: Tensor if isinstance(x, FakeTensor) else type(x)),
        ):
            stack.enter_context(patch.object(owner, name, value, create=True))
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            stack.enter_context(waiting(owner))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(recorder)
