"""Logits that are computed when code reads their values, which the losses of this package never do."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...common.devices import on_device
from ...common.messages import Message
from ...errors import InvalidInputError
from . import arguments
from .arguments import RowIndex, VocabParallelOptions
from .autograd import gradients_of_inputs, save_sources, sum_gradient
from .output_layer import Divisions, OutputLayer, Product, TileOptions, product
from .reduction import without_autocast
from .sources import SelectedRows, Source

aten = torch.ops.aten
_PACKAGE, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_LIBRARIES = _PACKAGE, _TORCH, copy.__file__, pickle.__file__, "<"
_MATERIALIZED = Message(
    "{operation} at {file}:{line} has materialized deferred logits {shape}",
    "The result is right, but these logits stay in memory until nothing refers to them.",
    "If memory runs out, use a loss of this package there, or leave out lean-head.",
)
_warned: set[tuple[str, str, int]] = set()


def _reading(function: Callable[..., Any], copies: bool = False, has_graph: bool = True) -> Any:
    """Return a method that calls a function of an ordinary tensor, since deferred logits have no storage."""

    def method(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        read = logits.plain if has_graph else partial(logits._plain_values, aliases=not copies)
        return function(read(function.__name__, copies=copies), *args, **kwargs)

    return method


def deferred_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tile_bytes: int | None = None,
    keep_bytes: int = 0,
    logit_dtype: torch.dtype | None = None,
) -> DeferredLogits:
    """Return the logits ``hidden @ weight.T + bias`` without computing them.

    Functions of :mod:`megatron_rl_patches.losses` that take logits compute one tile at a time and keep none;
    see :class:`DeferredLogits` for what other code sees.

    Args:
        hidden: ``[..., h]``, what the output layer would get.
        weight: ``[V / tp, h]``, in the dtype of ``hidden``: this rank's rows of the output layer. It may be
            frozen, or that of the embedding. Where nothing has a gradient it may stay in host memory, best
            pinned: the losses copy it to the device of ``hidden`` in parts, of which at most two are there.
        bias: ``[V / tp]``, where the weight is.
        tp_group: ranks that hold the other rows of the weight. The gradient of ``hidden`` is summed over
            them; the losses need the group as well.
        sequence_parallel: the first dimension of ``hidden`` is split over ``tp_group``: it is gathered here,
            and its gradient is reduce-scattered.
        tile_bytes: how much memory the logits of one tile take. Default: 64 MiB on a CPU; 512 MiB on a GPU,
            and 1 GiB where all logits take 2 GiB or more. On each device, the last tile of a forward
            stays in memory until its backward, or until a loss reads other logits.
        keep_bytes: how much more memory the forward of each loss may fill with logits, which its backward
            then need not compute again: with all of them it multiplies three times instead of four.
        logit_dtype: ``torch.float32``: the logits of 16-bit ``hidden`` and ``weight`` are not rounded, but
            their gradient is before it is multiplied, as by Megatron's ``ColumnParallelLinear`` with an
            ``output_dtype``. ``None``: the logits have the dtype of ``hidden``.

    Returns:
        Logits ``[..., V / tp]`` of whole sequences. What is computed from them has gradients for ``hidden``,
        ``weight`` and ``bias``; those of bfloat16 and float16 are accumulated in float32. Without an NVIDIA
        GPU and torch 2.8, what a tile adds to that of ``hidden`` is rounded to bfloat16 first.

    Raises:
        InvalidInputError: arguments do not fit; before any communication, on every rank alike.
    """
    arguments.check_floats(hidden=hidden)
    arguments.check_layer(weight, bias)
    arguments.check_no_transform(hidden, weight, bias)
    arguments.check_group(tp_group)
    arguments.check_integer("tile_bytes", 1 if tile_bytes is None else tile_bytes, 1, "a number of bytes")
    arguments.check_integer("keep_bytes", keep_bytes, 0, "a number of bytes")
    if hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1] or len(weight) == 0:
        shapes = f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}"
        raise InvalidInputError(f"{shapes}, expected [..., h] and [vocab / tp, h]")
    layer = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    has_gradient = any(tensor.requires_grad for tensor in (hidden, *layer.values()))
    for name, tensor in layer.items():
        fits = tensor.device == hidden.device or not (has_gradient or tensor.is_meta)
        if tensor.dtype != hidden.dtype or not fits:
            raise InvalidInputError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected {hidden.dtype} on {hidden.device} as "
                "hidden is; another device is possible where nothing requires a gradient"
            )
    if sequence_parallel and tp_group is None:
        raise InvalidInputError("sequence_parallel is True without tp_group: pass the group it is split over")
    if logit_dtype not in (None, torch.float32):
        raise InvalidInputError(f"logit_dtype is {logit_dtype!r}, expected torch.float32 or None")
    if logit_dtype is not None and hidden.dtype == torch.float64:
        raise InvalidInputError("logit_dtype is torch.float32, and hidden is torch.float64: leave it out")

    def materialized(hidden: Tensor) -> Tensor:
        own_bias = None if bias is None else bias.to(hidden.device)
        return product(hidden, weight.to(hidden.device), own_bias, logit_dtype or hidden.dtype)

    tiling = TileOptions(tile_bytes, keep_bytes, logit_dtype=logit_dtype)
    whole = hidden if tp_group is None else sum_gradient(hidden, tp_group, sequence_parallel)
    return defer(whole, weight, bias, tiling, materialized)


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tiling: TileOptions, product: Product
) -> DeferredLogits:
    """Return deferred logits of whole sequences ``[..., h]``, whose gradient needs no further reduction.

    ``product`` computes logits ``[..., V / tp]`` of hidden states ``[..., h]`` for code that reads them.
    """
    hidden_th = hidden.flatten(0, -2)
    if hidden_th.is_inference():  # torch counts no writes to it
        hidden_th = hidden_th.clone()
    layer = OutputLayer((hidden_th, weight, bias), tiling, hidden.shape[:-1], product)
    logits: DeferredLogits = Defer.apply(layer, *layer.source.inputs)  # type: ignore[no-untyped-call]
    # Without grad mode they have no graph. They may get that of an autograd function of other code later.
    logits._has_gradient = logits._contents.has_gradient = logits.requires_grad
    return logits


def dense(logits: Tensor) -> Tensor:
    """Return deferred logits as an ordinary tensor in their memory, without a warning; others as they are."""
    return logits.plain("") if isinstance(logits, DeferredLogits) else logits


@dataclass(eq=False)
class Contents:
    """What deferred logits are. Their views share it; a copy has contents of its own.

    They are rows of an output layer's logits, converted and divided, until code writes to them or gets an
    ordinary tensor in their memory, since nothing counts what is written there. Then they are what it holds.
    """

    layer: OutputLayer
    rows: Tensor  # int64 [n], of the layer's logits
    divisions: Divisions = ()
    has_gradient: bool = False  # whether their gradient is that of these rows
    memory: Tensor | None = None  # [n, V / tp], once other code has a tensor in it, or has written to it


class DeferredLogits(Tensor):
    """Logits that have a shape, a dtype and a device, and no values until some code reads them.

    They stay deferred where rows are selected, reordered or concatenated, where they are converted to
    float32, and where they are divided by a number, which 16-bit logits are not, as the quotient is rounded.
    Functions of :mod:`megatron_rl_patches.losses` and ``sum()`` compute what they need from hidden states and
    weight. Any other operation that reads values materializes the logits by the output layer's own code, with
    a warning that names the operation and the line that called it. Once code writes to them, or gets an
    ordinary tensor in their memory, such as some columns or an array, losses too take them as ordinary ones.

    Attributes:
        followed: for operations whose result is deferred, functions that compute it, or return ``None``; for
            the method ``sum``, one that computes it in tiles.
    """

    followed: ClassVar[dict[Any, Callable[..., Any]]] = {}
    _contents: Contents
    _rows: Tensor  # which rows of the layer's logits, in the shape of this tensor without its last dimension
    _has_gradient: bool

    @staticmethod
    def __new__(
        cls, contents: Contents, rows: Tensor, dtype: torch.dtype, has_gradient: bool = False
    ) -> DeferredLogits:
        """Make a view of contents; ``rows`` is a view of theirs."""
        source = contents.layer.source
        # It takes requires_grad from autograd, as the output of an operation.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*rows.shape, source.width),
            strides=(*(stride * source.width for stride in rows.stride()), 1),
            storage_offset=rows.storage_offset() * source.width,
            dtype=dtype,
            device=source.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # C++ code would read the null pointer of its storage
        self._contents, self._rows, self._has_gradient = contents, rows, has_gradient
        return self

    @property
    def divisor(self) -> float:
        """What the logits have been divided by since the output layer."""
        return math.prod(number for number, _ in self._contents.divisions)

    @property
    def is_deferred(self) -> bool:
        """Whether a loss may compute values and gradients in tiles, without these logits and their graph.

        It may unless code has written to the values or has an ordinary tensor in their memory, a hook waits
        for their gradient, or an operation whose gradient this class does not know has returned them.
        """
        layer, needs_gradient = self._contents.layer, self.requires_grad and torch.is_grad_enabled()
        if self._contents.memory is not None or layer.has_hooks:
            return False
        return (not needs_gradient or self.has_gradient_of_rows) and layer.is_unchanged

    @property
    def has_gradient_of_rows(self) -> bool:
        """Whether the gradient of these logits is that of their rows of the output layer's logits.

        A leaf, and the output of an autograd function of other code, have gradients of their own.
        """
        if not self._has_gradient or not self.requires_grad or self.is_leaf:
            return False
        # If other code's function returns logits that have a graph, autograd puts its own in place of that.
        return getattr(type(self.grad_fn), "_forward_cls", Defer) is Defer

    def hidden_states(self) -> Tensor:
        """Return what the output layer gets for these logits, ``[..., h]``, without a graph."""
        source = self._contents.layer.source
        return source.hidden.detach()[on_device(self._rows, source.device)]

    def loss_source(self, index: RowIndex, options: VocabParallelOptions) -> Source:
        """Return rows of these logits for the functions that read tiles; they count as ``[T, V / tp]``.

        Deferred logits are read undivided; what they are divided by becomes part of the options.
        """
        layer, divisor, trained = self._contents.layer, self.divisor, self.requires_grad
        if not self.is_deferred:
            # Other code may write to the values before backward reads them, so these are a copy.
            return SelectedRows(self.plain("", copies=True), index, options)
        rows, keeps = self._rows.flatten(), trained and torch.is_grad_enabled()
        layer.has_losses |= keeps
        if isinstance(index, tuple):
            index = arguments.as_numbers(index)
        if isinstance(index, Tensor):
            rows = on_device(rows, index.device)
        selected, options = arguments.as_one_slice(rows[index], layer.source.device), options.divided(divisor)
        return layer.source.select(selected, options, trained, keeps)

    # --- operations

    # The methods of this class take the place of torch's. Results are of this class only if
    # __torch_dispatch__ returns one, not because an argument is.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aliased = _aliased(func, args, kwargs)
        if follow := cls.followed.get(func):
            operands = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            is_view = id(args[0]) in aliased and not func._schema.is_mutable  # it shares the contents
            if all(isinstance(x, cls) and (is_view or x._contents.memory is None) for x in operands):
                result = follow(func, *args, **kwargs)
                if result is not None:
                    return result
        else:
            # Under inference mode operations such as reshape arrive here whole.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
            problem = f"{func} was called, and deferred logits keep their shape and their memory"
            raise InvalidInputError(f"{problem}: call an operation that returns another tensor, such as view")
        materialized: dict[int, DeferredLogits] = {}

        def materialize(logits: DeferredLogits) -> Tensor:
            values = logits._plain_values(str(func), id(logits) in aliased)
            materialized[id(values)] = logits
            return values

        args, kwargs = tree_map_only(DeferredLogits, materialize, (args, kwargs))
        result = func(*args, **kwargs)
        own = materialized if func._schema.is_mutable else {}  # in place, it returns what it was given
        return tree_map_only(Tensor, lambda t: own.get(id(t), t), result)

    def _plain_values(self, operation: str, aliases: bool, copies: bool = False) -> Tensor:
        """Return the values without a graph, and warn of the ``operation`` if it is the first to read them.

        The tensor ``aliases`` their memory where other code gets it or writes to it; one that ``copies`` has
        memory of its own. An empty operation means no warning.
        """
        contents, layer = self._contents, self._contents.layer
        if operation and contents.memory is None and layer.materialized is None:
            _warn(operation, self)
        with layer.lock:
            if aliases and contents.memory is None:
                contents.memory = layer.values(contents.rows, self.dtype, contents.divisions, own=True)
        if (memory := contents.memory) is not None:
            offset = memory.storage_offset() + self.storage_offset()
            values = memory.as_strided(self.shape, self.stride(), offset)
            return values.clone() if copies else values
        rows = self._rows.clone()  # dimensions of the values have the order in memory that these have
        in_memory = rows.as_strided((rows.numel(),), (1,))
        values = layer.values(in_memory, self.dtype, contents.divisions, own=copies)
        strides = *(stride * self.shape[-1] for stride in rows.stride()), 1
        return values.as_strided(self.shape, strides, values.storage_offset())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        is_deferred = self._contents.memory is None and self._contents.layer.materialized is None
        state = "deferred" if is_deferred else "materialized"
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, device={self.device}, {state})"

    __copy__, numpy, __dlpack__ = _reading(copy.copy), _reading(Tensor.numpy), _reading(Tensor.__dlpack__)
    __reduce_ex__, __deepcopy__ = _reading(Tensor.__reduce_ex__, True), _reading(Tensor.__deepcopy__, True)
    data_ptr = _reading(Tensor.data_ptr, has_graph=False)
    untyped_storage = _reading(Tensor.untyped_storage, has_graph=False)
    tolist = _reading(Tensor.tolist, copies=True, has_graph=False)

    def plain(self, operation: str, copies: bool = False) -> Any:
        """Return an ordinary tensor in the memory of the values, or a copy; a warning names the operation."""
        return ToDense.apply(self, operation, copies)  # type: ignore[no-untyped-call]

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        is_of_all = not (args or kwargs) and self.is_deferred
        return self.followed["sum"](self) if is_of_all else super().sum(*args, **kwargs)

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]  # autograd does not count its writes

    @data.setter
    def data(self, value: Tensor) -> None:
        raise InvalidInputError("the data of deferred logits was set: write to the logits, logits[:] = data")

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        self._wait_for_gradient("register_hook")
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def retain_grad(self) -> None:
        self._wait_for_gradient("retain_grad")
        super().retain_grad()

    def _wait_for_gradient(self, name: str) -> None:
        if self._contents.layer.has_losses:
            raise InvalidInputError(
                f"{name} was called on deferred logits after a loss of them had been computed, and the "
                f"gradient of that loss does not pass through them: call {name} before the loss"
            )
        self._contents.layer.has_hooks = True


class Defer(torch.autograd.Function):
    """Makes deferred logits a function of hidden states, weight and bias, for code that reads them."""

    @staticmethod
    def forward(ctx: Any, layer: OutputLayer, *inputs: Tensor | None) -> DeferredLogits:
        save_sources(ctx, [layer.source], {})
        rows = layer.numbers
        return DeferredLogits(Contents(layer, rows), rows.view(layer.shape), layer.source.logit_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        def compute(sources: Sequence[Any], _: Any, needed: Sequence[bool], gradient: Tensor) -> Any:
            return sources[0].gradients_of(gradient, needed)

        with without_autocast():
            return None, *gradients_of_inputs(ctx, compute, 1, gradient.flatten(0, -2))


class ToDense(torch.autograd.Function):
    """Returns the values as an ordinary tensor, or a copy of them; its gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, operation: str, copies: bool) -> Tensor:
        return logits._plain_values(operation, aliases=not copies, copies=copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


#: Operations that return tensors in the memory of an argument, which their schema does not say.
_ALIASING = (aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.lift)


def _aliased(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of arguments that the operation returns tensors in the memory of, or may write to."""
    if func.namespace != "aten":  # schemas of collectives and of other code may not say what they write to
        return {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    aliased = {id(args[0])} if func.overloadpacket in _ALIASING else set()
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            aliased |= {id(x) for x in tree_leaves(value)}
    return aliased


def _warn(operation: str, logits: DeferredLogits) -> None:
    """Warn, once for each line of code, that an operation materializes the logits."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    if (operation, file, line) not in _warned:
        _warned.add((operation, file, line))
        _MATERIALIZED.log(operation=operation, file=file, line=line, shape=list(logits.shape))
