"""Logits that are computed when code reads their values, which the losses of this package never do."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...common.devices import on_device
from ...common.messages import Message
from ...errors import InvalidInputError
from ..logits.arguments import DEFAULT, VocabParallelOptions
from ..logits.autograd import Tensors, gradients_of_inputs, save_source
from ..logits.rows import Inputs, LogitSource, SelectedRows
from ..logits.slices import RowIndex, as_one_slice
from .contents import Contents, OutputLayer
from .tiles import OutputLayerRows

aten = torch.ops.aten
_PACKAGE, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_MATERIALIZED = Message(
    "{operation} at {file}:{line} has materialized deferred logits {shape}",
    "The result is right, but these logits stay in memory until nothing refers to them.",
    "If memory runs out, use a loss of this package there, or leave out lean-head.",
)
_warned: set[tuple[str, str, int]] = set()


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

    def loss_source(self, index: RowIndex, options: VocabParallelOptions) -> LogitSource:
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
        save_source(ctx, layer.rows, {})
        rows = layer.numbers
        return DeferredLogits(Contents(layer, rows), rows.view(layer.shape), layer.rows.logit_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *gradients_of_inputs(ctx, _gradients_of_logits, 1, gradient.flatten(0, -2))


def _gradients_of_logits(
    layer: OutputLayerRows, saved: Tensors, needed: Sequence[bool], gradient: Tensor
) -> Inputs:
    return layer.gradients_of(gradient, needed)


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
