"""Logits that are computed when code reads their values, which the losses of this package never do."""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...common.devices import on_device
from ...common.messages import Message
from ...errors import InvalidInputError
from .arguments import (
    DEFAULT,
    RowIndex,
    VocabParallelOptions,
    as_one_slice,
    check_floats,
    check_group,
    check_no_transform,
)
from .autograd import gradients_of_inputs, save_sources
from .output_layer import OutputLayerRows, StoredTiles, TileOptions, product
from .sources import Inputs, SelectedRows, Source, Tensors

Product = Callable[[Tensor], Tensor]
aten = torch.ops.aten
_PACKAGE, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_MATERIALIZED = Message(
    "{operation} at {file}:{line} has materialized deferred logits {shape}",
    "The result is right, but these logits stay in memory until nothing refers to them.",
    "If memory runs out, use a loss of this package there, or leave out lean-head.",
)
_warned: set[tuple[str, str, int]] = set()


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

    The functions of :mod:`megatron_rl_patches.losses` that take logits take these, and compute them in tiles
    that they forget; see :class:`DeferredLogits` for what other code sees.

    Args:
        hidden: ``[..., h]``, what the output layer would get: with ``sequence_parallel`` this rank's part of
            the first dimension.
        weight: ``[V / tp, h]``, in the dtype of ``hidden``: this rank's rows of the output layer. It may be
            frozen, and it may be that of the embedding. Where nothing has a gradient it may stay in host
            memory, best pinned: the losses copy it to the device of ``hidden`` in parts, one for each tile.
            At most two of them are there at a time.
        bias: ``[V / tp]``, where the weight is.
        tp_group: ranks that hold the other rows of the weight. The gradient of ``hidden`` is summed over
            them; the losses need the group as well.
        sequence_parallel: ``hidden`` is split over ``tp_group``: it is gathered here, and its gradient is
            reduce-scattered.
        tile_bytes: how much memory the logits of one tile take. Default: 64 MiB on a CPU; 512 MiB on a GPU,
            and 1 GiB where all logits take 2 GiB or more. On each device, the last tile of the latest forward
            stays in memory until its backward, or until other logits are read.
        keep_bytes: how much more memory the forward of each loss may fill with logits until its backward,
            which then need not compute them again: with all of them it multiplies three times instead of
            four. Several losses that wait take as much each.
        logit_dtype: ``torch.float32``: the logits of 16-bit ``hidden`` and ``weight`` are not rounded, as if
            both had been converted to float32 before. Their gradient is rounded to the dtype of ``hidden``
            before it is multiplied, as by Megatron's ``ColumnParallelLinear`` with an ``output_dtype``.
            ``None``: the logits have the dtype of ``hidden``.

    Returns:
        Logits ``[..., V / tp]`` in that dtype, of whole sequences. What is computed from them
        has gradients for ``hidden``, ``weight`` and ``bias``; those of bfloat16 and float16 are accumulated
        in float32. Without an NVIDIA GPU and torch 2.8, what a tile adds to that of ``hidden`` is rounded
        to bfloat16 first.

    Raises:
        InvalidInputError: arguments do not fit; before any communication, on every rank alike.
    """
    check_floats(hidden=hidden, weight=weight, **({} if bias is None else {"bias": bias}))
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or len(weight) == 0:
        raise InvalidInputError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}, expected [..., h] and "
            "[vocab / tp, h]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias is {list(bias.shape)}, expected {list(weight.shape[:1])}")
    inputs = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    has_gradient = hidden.requires_grad or any(tensor.requires_grad for tensor in inputs.values())
    for name, tensor in inputs.items():
        may_differ = not has_gradient and not tensor.is_meta
        if tensor.dtype != hidden.dtype or (not may_differ and tensor.device != hidden.device):
            raise InvalidInputError(
                f"{name} is {tensor.dtype} on {tensor.device}, expected {hidden.dtype} on {hidden.device} as "
                "hidden is; another device is possible where nothing requires a gradient"
            )
    check_group(tp_group)
    check_no_transform(hidden, weight, bias)
    if sequence_parallel and tp_group is None:
        raise InvalidInputError("sequence_parallel is True without tp_group: pass the group it is split over")
    tiling = TileOptions(tile_bytes, keep_bytes, logit_dtype=logit_dtype)
    if logit_dtype is not None and hidden.dtype == torch.float64:
        raise InvalidInputError("logit_dtype is torch.float32, and hidden is torch.float64: leave it out")
    whole = gather_sequence(hidden, tp_group) if sequence_parallel else sum_gradient(hidden, tp_group)

    def materialized(hidden: Tensor) -> Tensor:
        own_bias = None if bias is None else bias.to(hidden.device)
        if logit_dtype not in (None, hidden.dtype):
            return product(hidden, weight.to(hidden.device), own_bias, logit_dtype)
        return torch.nn.functional.linear(hidden, weight.to(hidden.device), own_bias)

    return defer(whole, weight, bias, tiling, materialized)


def defer(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tiling: TileOptions, product: Product
) -> DeferredLogits:
    """Return :class:`DeferredLogits` of whole sequences.

    Args:
        hidden: ``[..., h]``, whose gradient needs no further reduction.
        product: computes logits ``[..., V / tp]`` of hidden states ``[..., h]`` for code that reads them.
    """
    hidden_th = hidden.flatten(0, -2)
    if hidden_th.is_inference():  # torch counts no writes to it
        hidden_th = hidden_th.clone()
    rows = OutputLayerRows(hidden_th, weight, bias, slice(0, len(hidden_th)), tiling)
    layer = OutputLayer(rows, hidden.shape[:-1], product)
    logits: DeferredLogits = Defer.apply(layer, *rows.inputs)  # type: ignore[no-untyped-call]
    # Without grad mode they have no graph. They may get that of an autograd function of other code later.
    logits._has_gradient = logits.requires_grad
    return logits


def dense(logits: Tensor) -> Tensor:
    """Return deferred logits as an ordinary tensor in their memory, without a warning; others as they are."""
    return logits.plain("") if isinstance(logits, DeferredLogits) else logits


@dataclass(eq=False)
class OutputLayer:
    """The logits ``[..., V / tp]`` of an output layer, which deferred logits are rows of.

    Attributes:
        rows: reads all of them in tiles.
        shape: their shape without the last dimension.
        product: computes ``[..., V / tp]`` of hidden states ``[..., h]``, by the output layer's own code.
        has_hooks: whether a hook waits for their gradient.
        has_losses: whether a loss has been computed whose gradient does not pass through them.
        numbers: the number of each row, int64 ``[T]``.
    """

    rows: OutputLayerRows
    shape: torch.Size
    product: Product
    has_hooks: bool = False
    has_losses: bool = False
    lock: Any = field(default_factory=threading.RLock)
    _logits: Tensor | None = None

    def __post_init__(self) -> None:
        self._versions = self._current_versions()
        self.numbers = torch.arange(self.shape.numel())

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the tensors that the logits come from."""
        return self._versions == self._current_versions()

    @property
    def is_materialized(self) -> bool:
        """Whether some code has read the logits."""
        return self._logits is not None

    def logits(self) -> Tensor:
        """Return all logits ``[T, V / tp]``, which nobody may write to; they stay for the next reader."""
        with self.lock:
            self._logits = self._computed() if self._logits is None else self._logits
            return self._logits

    def own_logits(self) -> Tensor:
        """Return all logits in memory of their own."""
        with self.lock, self.without_modes():
            return self._computed() if self._logits is None else self._logits.clone()

    def own(self, values: Tensor) -> Tensor:
        """Return values in memory of their own: copied, if they are in that of :meth:`logits`."""
        shared = None if self._logits is None else self._logits.untyped_storage().data_ptr()
        with self.without_modes():
            return values.clone() if values.untyped_storage().data_ptr() == shared else values

    def _computed(self) -> Tensor:
        if not self.is_unchanged:
            raise InvalidInputError(
                "the hidden states or the weight behind deferred logits were overwritten before "
                "the logits were used: compute what needs the logits first, for instance before the "
                "optimizer's step"
            )
        hidden = self.rows.hidden
        StoredTiles.free_last(hidden.device)
        with self.without_modes():
            logits = self.product(hidden.view(*self.shape, hidden.shape[1])).detach()
        return logits.reshape(-1, logits.shape[-1])

    @contextmanager
    def without_modes(self) -> Iterator[None]:
        """Compute what does not depend on the autograd and autocast modes of who reads the values."""
        is_inference = any(t.is_inference() for t in self.rows.inputs if t is not None)
        autocast = torch.autocast(self.rows.device.type, enabled=False)
        with torch.inference_mode(is_inference), torch.no_grad(), autocast:
            yield

    def _current_versions(self) -> list[tuple[int, int]]:
        tensors = self.rows.inputs
        return [(t._version, t.data_ptr()) for t in tensors if t is not None and not t.is_inference()]


class Division(NamedTuple):
    """A division of all logits by a number, which a tensor may hold.

    Attributes:
        in_graph: whether autograd has recorded it, in case that the logits have a graph.
    """

    number: float
    operand: Tensor | float
    in_graph: bool = True


@dataclass(eq=False)
class Contents:
    """What deferred logits are; all views of them share it.

    They are rows of an output layer's logits, converted and divided, until code writes to them or gets an
    ordinary tensor in their memory, since nothing counts what is written there. From then on they are what
    their memory holds. Copies are contents of their own, which no write to these can change.

    Attributes:
        layer: what they are rows of.
        rows: which rows, int64 ``[n]``.
        divisions: how they have been divided.
        memory: ``[n, V / tp]``, once other code has a tensor in it, or has written to it.
    """

    layer: OutputLayer
    rows: Tensor
    divisions: tuple[Division, ...] = ()
    memory: Tensor | None = None

    def values(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows ``[...]`` of the layer's logits as the contents have them, ``[..., V / tp]``.

        The result may be in the memory of the layer's logits.
        """
        logits = self.layer.logits()
        index = as_one_slice(rows.flatten(), logits.device)
        with self.layer.without_modes():
            values = logits[index].view(*rows.shape, logits.shape[1]).to(dtype)
            for division in self.divisions:
                values = values / division.operand
            return values

    def own_values(self, dtype: torch.dtype) -> Tensor:
        """Return the values ``[n, V / tp]`` in memory of their own."""
        layer = self.layer
        if self.rows is layer.numbers and not self.divisions and dtype == layer.rows.logit_dtype:
            return layer.own_logits()
        return layer.own(self.values(self.rows, dtype))


class DeferredLogits(Tensor):
    """Logits that have a shape, a dtype and a device, and no values until some code reads them.

    They stay deferred where rows are selected, reordered or concatenated, where they are converted to
    float32, and where they are divided by a number. Functions of :mod:`megatron_rl_patches.losses` compute
    what they need from hidden states and weight; so does the sum of all. Any other operation that reads
    values materializes the logits, by the output layer's own code, with a warning that names the operation
    and the line that called it. Once code writes to them, or gets an ordinary tensor in their memory, such as
    some columns or an array, they are ordinary logits, which is what losses read then. A division
    materializes 16-bit logits, too: its quotient is rounded.

    Attributes:
        followed: for operations whose result is deferred, functions that compute it, or return ``None``.
        computed_in_tiles: the same for functions of torch that need no logits as a whole.
    """

    followed: ClassVar[dict[Any, Callable[..., Any]]] = {}
    computed_in_tiles: ClassVar[dict[Any, Callable[..., Any]]] = {}
    _contents: Contents
    _rows: Tensor  # which rows of the layer's logits, in the shape of this tensor without its last dimension
    _has_gradient: bool

    @staticmethod
    def __new__(
        cls, contents: Contents, rows: Tensor, dtype: torch.dtype, has_gradient: bool = False
    ) -> DeferredLogits:
        """Make a view of contents; ``rows`` is a view of theirs."""
        width = contents.layer.rows.width
        # It takes requires_grad from autograd, as the output of an operation.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            (*rows.shape, width),
            strides=(*(stride * width for stride in rows.stride()), 1),
            storage_offset=rows.storage_offset() * width,
            dtype=dtype,
            device=contents.layer.rows.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # C++ code would read the null pointer of its storage
        self._contents, self._rows, self._has_gradient = contents, rows, has_gradient
        return self

    @property
    def divisor(self) -> float:
        """What the logits have been divided by since the output layer."""
        return math.prod(division.number for division in self._contents.divisions)

    @property
    def is_deferred(self) -> bool:
        """Whether a loss may compute values and gradients in tiles, without these logits and their graph.

        This is so as long as no code has written to the values, or has an ordinary tensor in their memory, no
        hook waits for the gradient of the logits, and only operations whose gradient this class knows lie
        between the output layer and these logits. Ranks that differ in this run the same collectives.
        """
        contents, needs_gradient = self._contents, self.requires_grad and torch.is_grad_enabled()
        if not self.are_rows or contents.layer.has_hooks:
            return False
        if needs_gradient and not (
            self.has_gradient_of_rows and all(division.in_graph for division in contents.divisions)
        ):
            return False
        return contents.layer.is_unchanged

    @property
    def are_rows(self) -> bool:
        """Whether the values are rows of the layer's logits, divided: until other code has their memory."""
        return self._contents.memory is None

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
        layer = self._contents.layer.rows
        return layer.hidden.detach()[on_device(self._rows, layer.device)]

    def loss_source(self, index: RowIndex, options: VocabParallelOptions) -> Source:
        """Return rows of these logits for the functions that read tiles; they count as ``[T, V / tp]``.

        Deferred logits are read undivided; what they are divided by becomes part of the options.
        """
        if not self.is_deferred:
            # Other code may write to the values before backward reads them, so these are a copy.
            return SelectedRows(self.plain("", copies=True), index, options)
        return self.rows_in_tiles(index, options)

    def rows_in_tiles(self, index: RowIndex, options: VocabParallelOptions = DEFAULT) -> OutputLayerRows:
        """Return rows of these logits, which are deferred, for functions that divide them."""
        layer, divisor, trained = self._contents.layer, self.divisor, self.requires_grad
        device, keeps = self.device, trained and torch.is_grad_enabled()
        layer.has_losses |= keeps
        if isinstance(index, tuple):
            index = torch.cat([torch.arange(run.start, run.stop) for run in index])
        rows = self._rows.flatten()
        numbers = (on_device(rows, index.device) if isinstance(index, Tensor) else rows)[index]
        selected = as_one_slice(numbers, device)
        return layer.rows.select(selected, options.divided(divisor), trained=trained, keeps_tiles=keeps)

    # --- operations

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        compute = cls.computed_in_tiles.get(func)
        if compute and (result := compute(*args, **kwargs)) is not None:
            return result
        if func in (Tensor.register_hook, Tensor.retain_grad):
            args[0]._wait_for_gradient(func.__name__)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise InvalidInputError(
                "the data of deferred logits was set: write to the logits, logits[:] = data"
            )
        # Results are of this class only if __torch_dispatch__ returns one, not because an argument is.
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aliased = _aliased(func, args, kwargs)
        if follow := cls.followed.get(func):
            operands = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            is_view = id(args[0]) in aliased and not func._schema.is_mutable  # it shares the contents
            if all(isinstance(x, DeferredLogits) and (is_view or x.are_rows) for x in operands):
                result = follow(func, *args, **kwargs)
                if result is not None:
                    return result
        else:
            # Under inference mode operations such as reshape arrive here whole.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.Tag.inplace_view in func.tags and func is not aten.detach_.default:
            raise InvalidInputError(
                f"{func} was called, and deferred logits keep their shape and their memory: call an "
                "operation that returns another tensor, such as view or transpose"
            )
        materialized: dict[int, DeferredLogits] = {}

        def materialize(logits: DeferredLogits) -> Tensor:
            values = logits._plain_values(str(func), id(logits) in aliased)
            materialized[id(values)] = logits
            return values

        args, kwargs = tree_map_only(DeferredLogits, materialize, (args, kwargs))
        result = func(*args, **kwargs)
        own = materialized if func._schema.is_mutable else {}  # in place, it returns what it was given
        return tree_map_only(Tensor, lambda t: own.get(id(t), t), result)

    def _plain_values(self, operation: str, aliases: bool) -> Tensor:
        """Return the values as an ordinary tensor without a graph, and warn if nobody has read them before.

        Args:
            operation: what reads them, for the warning; empty: do not warn.
            aliases: the tensor is in their memory, since other code gets it or writes to it.
        """
        contents, layer = self._contents, self._contents.layer
        if operation and contents.memory is None and not layer.is_materialized:
            _warn(operation, self)
        with layer.lock:
            if aliases and contents.memory is None:
                contents.memory = contents.own_values(self.dtype)
        if (memory := contents.memory) is not None:
            offset = memory.storage_offset() + self.storage_offset()
            return memory.as_strided(self.shape, self.stride(), offset)
        # The dimensions of the result have the order in memory that those of this tensor have.
        strides = self._rows.stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        values = contents.values(self._rows.permute(order), self.dtype)
        return values.permute(*(order.index(dim) for dim in range(len(order))), len(order))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        is_materialized = self._contents.memory is not None or self._contents.layer.is_materialized
        state = "materialized" if is_materialized else "deferred"
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, device={self.device}, {state})"

    # The following read the storage, which logits without values do not have. They are methods, since hooks
    # of saved tensors call them where __torch_function__ is switched off.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain("pickling", copies=True).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __copy__(self) -> Tensor:
        return copy.copy(self.plain("copy.copy"))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.plain("copy.deepcopy", copies=True).__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        return self._plain_values("data_ptr", aliases=True).data_ptr()

    def untyped_storage(self) -> Any:
        return self._plain_values("untyped_storage", aliases=True).untyped_storage()

    def tolist(self) -> Any:
        return self._plain_values("tolist", aliases=False).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain("numpy").numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain("__dlpack__").__dlpack__(**options)

    def plain(self, operation: str, copies: bool = False) -> Tensor:
        """Return an ordinary tensor in the memory of the values, or a copy; a warning names the operation."""
        plain: Tensor = ToDense.apply(self, operation, copies)  # type: ignore[no-untyped-call]
        return plain

    def _wait_for_gradient(self, name: str) -> None:
        if self._contents.layer.has_losses:
            raise InvalidInputError(
                f"{name} was called on deferred logits after a loss of them had been computed, and the "
                f"gradient of that loss does not pass through them: call {name} before the loss"
            )
        self._contents.layer.has_hooks = True


class Defer(torch.autograd.Function):
    """Makes deferred logits a function of hidden states, weight and bias.

    Its backward gets only gradients of code that read the logits; losses in tiles compute theirs themselves.
    """

    @staticmethod
    def forward(ctx: Any, layer: OutputLayer, *inputs: Tensor | None) -> DeferredLogits:
        save_sources(ctx, [layer.rows], {})
        rows = layer.numbers
        return DeferredLogits(Contents(layer, rows), rows.view(layer.shape), layer.rows.logit_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *gradients_of_inputs(ctx, _gradients_of_logits, 1, gradient.flatten(0, -2))


def _gradients_of_logits(
    layers: Sequence[OutputLayerRows], saved: Tensors, needed: Sequence[bool], gradient: Tensor
) -> Inputs:
    return layers[0].gradients_of(gradient, needed)


class ToDense(torch.autograd.Function):
    """Returns the values as an ordinary tensor, or a copy of them; its gradient is that of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits, operation: str, copies: bool) -> Tensor:
        values, contents = logits._plain_values(operation, aliases=not copies), logits._contents
        if not copies:
            return values
        return contents.layer.own(values) if contents.memory is None else values.clone()

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
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    if (operation, file, line) not in _warned:
        _warned.add((operation, file, line))
        _MATERIALIZED.log(operation=operation, file=file, line=line, shape=list(logits.shape))


def _is_library(file: str) -> bool:
    return file.startswith((_PACKAGE, _TORCH, "<")) or Path(file).parent == Path(copy.__file__).parent


# --- ranks that share the hidden states


def sum_gradient(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the hidden states; their gradient is summed over the group.

    So does Megatron's ``copy_to_tensor_model_parallel_region``.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _SumGradient.apply(hidden, group)  # type: ignore[no-untyped-call]


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return ``[s, ..., h]`` of all ranks' ``[s / tp, ..., h]``; the gradient is summed and scattered.

    So does Megatron's ``gather_from_sequence_parallel_region``.
    """
    if group is None or dist.get_world_size(group) == 1:
        return hidden
    return _GatherSequence.apply(hidden, group)  # type: ignore[no-untyped-call]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        whole = hidden.new_empty((size * len(hidden), *hidden.shape[1:]))
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        part = gradient.new_empty((len(gradient) // size, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None
