"""Deferred logits from Megatron's language models: what the output layer returns in place of its logits.

A model defers its logits within :func:`deferring`, or in a call by :func:`language_model_forward`. Its
output layer is then still called, so that hooks of the layer run and its parameters are gathered;
:func:`column_parallel_forward` takes the place of the layer's own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.chunks import has_base
from ..common.devices import copied_to
from ..common.messages import Message
from ..common.scopes import Scope, replaced
from .vocab.arguments import check_integer, check_layer
from .vocab.autograd import sum_gradient
from .vocab.deferred import DeferredLogits, defer, deferred_logits
from .vocab.log_probs import vocab_parallel_log_probs
from .vocab.output_layer import TileOptions, product
from .vocab.reduction import all_gather

_MATERIALIZED = Message(
    "the output layer materializes the logits: {reason}",
    "The result is right, but lean-head saves no memory.",
    "If memory runs out, change that setting of the layer.",
)
#: Attributes of Megatron's linear layer, or of its config, with which its forward does more than to multiply.
_MORE_THAN_A_PRODUCT = (
    "defer_embedding_wgrad_compute",
    "disable_grad_reduce",
    "explicit_expert_comm",
    "use_mup",
)
_NO_TOKEN = -1
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


@dataclass(frozen=True)
class _Deferral:
    """The layer that defers its logits, ``None`` for no layer, and how their tiles are computed."""

    layer: Any
    tile_bytes: int | None
    keep_bytes: int


_deferral: Scope[_Deferral] = Scope("deferred_output")


@contextmanager
def deferring(model: Any, *, tile_bytes: int | None = None, keep_bytes: int = 0) -> Iterator[None]:
    """Let a language model return deferred logits for the length of the block, where it can.

    The model is a chunk without wrappers, and must not run in another thread meanwhile. For ``tile_bytes``
    and ``keep_bytes`` see :func:`.deferred_logits`.
    """
    layer = getattr(model, "output_layer", None)
    if layer is None or not is_column_parallel(layer):
        yield
        return

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = functools.partial(type(layer).forward, layer, *args, **kwargs)
        return column_parallel_forward(own, layer, *args, **kwargs)

    with replaced(layer, forward=forward), _deferral.enter(_Deferral(layer, tile_bytes, keep_bytes)):
        yield


def language_model_forward(
    forward: Callable[[], Any],
    model: Any,
    arguments: Mapping[str, Any],
    *,
    tile_bytes: int | None = None,
    keep_bytes: int = 0,
) -> Any:
    """Call a model's own forward; its output layer defers the logits if the arguments ask for them."""
    # With one of these the model returns no logits, generates text, or hands hidden states to other code.
    others = ("labels", "inference_context", "inference_params", "output_processor")
    returns_logits = all(arguments.get(name) is None for name in others)
    layer = getattr(model, "output_layer", None) if returns_logits else None
    with _deferral.enter(_Deferral(layer, tile_bytes, keep_bytes)):
        return forward()


def column_parallel_forward(forward: Callable[[], Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return deferred logits if the layer is to defer them and can, else what its own forward returns."""
    deferral = _deferral.get()
    if deferral is None or layer is not deferral.layer or _converts_or_records():
        return forward()
    return _deferred_output(deferral, layer, *args, **kwargs) or forward()


def loss_of_labels(compute: Callable[[], Any], layer: Any, labels: Tensor, logits: Tensor) -> Any:
    """Return a model's cross entropy, as multi-token prediction uses it, without materializing logits.

    ``compute`` is the model's own function of these ``labels`` ``[b, s]`` and ``logits`` ``[s, b, V / tp]``,
    which are split over the group of the output ``layer``. The loss is float32 ``[b, s]``, and zero for
    labels that are no token ids.
    """
    # Whether somebody has read or written the logits on this rank alone must not decide about collectives.
    if not isinstance(logits, DeferredLogits):
        return compute()
    group = _tensor_parallel_group(layer)
    vocabulary = logits.shape[-1] * (1 if group is None else dist.get_world_size(group))
    tokens_sb = labels.transpose(0, 1)
    targets = tokens_sb.where((tokens_sb >= 0) & (tokens_sb < vocabulary), _NO_TOKEN)
    rows, ids = logits.flatten(0, 1), targets.flatten()
    log_probs = vocab_parallel_log_probs(rows, ids, tp_group=group, ignore_index=_NO_TOKEN)
    return -log_probs.view(tokens_sb.shape).transpose(0, 1).contiguous()


def is_column_parallel(layer: Any) -> bool:
    """Return whether a layer is Megatron's linear layer with a forward of Megatron's own.

    An adapter that derives from it is not. Megatron's own subclass only adds the cross entropy of labels.
    """
    if "forward" in vars(layer) or not has_base(layer, "ColumnParallelLinear"):
        return False
    owner = next(base for base in type(layer).__mro__ if "forward" in vars(base))
    return owner.__name__ == "ColumnParallelLinear" or owner.__module__.startswith("megatron.core.")


def logit_dtype_of(layer: Any, weight: Tensor) -> torch.dtype | None:
    """Return the dtype of an output layer's logits, if it is not that of the weight."""
    dtype: torch.dtype | None = getattr(layer, "output_dtype", None)
    return None if dtype == weight.dtype else dtype


def _deferred_output(
    deferral: _Deferral,
    layer: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
    **others: Any,
) -> tuple[DeferredLogits, Tensor | None] | None:
    weight = layer.weight if weight is None else weight
    gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
    group = _tensor_parallel_group(layer)
    size = 1 if group is None else dist.get_world_size(group)
    reason = _reason_against(layer, input_, weight)
    if reason or others or (gathers and size > 1):
        if reason and reason not in _warned_reasons:
            _warned_reasons.add(reason)
            _MATERIALIZED.log(reason=reason)
        return None
    assert weight is not None
    whole = sum_gradient(input_, group, layer.sequence_parallel)
    bias, dtype = None if layer.skip_bias_add else layer.bias, logit_dtype_of(layer, weight)

    def own_product(hidden: Tensor) -> Tensor:
        if dtype is not None:  # Megatron's own needs TransformerEngine
            return product(hidden, weight, bias, dtype)
        logits = torch.matmul(hidden, weight.t())
        return logits if bias is None else logits + bias

    accumulating = weight if getattr(layer, "gradient_accumulation_fusion", False) else None
    options = TileOptions(deferral.tile_bytes, deferral.keep_bytes, accumulating, dtype)
    return defer(whole, weight, bias, options, own_product), layer.bias if layer.skip_bias_add else None


_warned_reasons: set[str] = set()


def _reason_against(layer: Any, hidden: Tensor, weight: Tensor | None) -> str:
    """Return why a layer's logits cannot be computed in tiles; an empty string if they can."""
    for owner in (layer, layer.config):
        for name in _MORE_THAN_A_PRODUCT:
            if getattr(owner, name, None) not in (None, False):
                return f"{name} is set"
    if getattr(layer, "output_dtype", None) not in (None, hidden.dtype, torch.float32):
        return f"output_dtype is {layer.output_dtype}"
    if getattr(layer, "gtp_remat_size", 1) not in (None, 1):
        return "gtp_remat_size is set"
    function = getattr(layer, "_forward_impl", None)
    if getattr(function, "__module__", None) != "megatron.core.tensor_parallel.layers":
        return f"the layer multiplies with {function!r}"
    is_plain = type(weight) in (torch.nn.Parameter, Tensor) and not hasattr(weight, "__fsdp_param__")
    if weight is None or not is_plain:
        return f"its weight is a {type(weight).__name__} that may be gone when the loss needs it"
    if has_base(layer, *_SHARDED):
        return "its weight is sharded after the layer has run"
    if (weight.dtype, weight.device) != (hidden.dtype, hidden.device):
        return f"its weight is {weight.dtype} on {weight.device}, its input {hidden.dtype} on {hidden.device}"
    return ""


def _converts_or_records() -> bool:
    """Return whether autocast converts operations, or a compiler or a CUDA graph records them."""
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    autocast = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
    return captured or autocast or torch.compiler.is_compiling()


def _tensor_parallel_group(layer: Any) -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = getattr(layer, "tp_group", None)
    if group is None and dist.is_initialized():
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
    return group


@dataclass(frozen=True, eq=False)
class OutputHead:
    """This rank's part of a model's output layer.

    Attributes:
        weight: ``[V / tp, h]``.
        bias: ``[V / tp]``.
        logit_dtype: of the logits, if the layer computes them in a more precise dtype; see
            :func:`.deferred_logits`.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_layer(self.weight, self.bias)

    def copied_to(self, device: torch.device | str) -> OutputHead:
        """Return a copy on the device; what comes from a GPU goes to pinned host memory."""
        return self._mapped(lambda tensor: copied_to(tensor, device))

    def resharded(self, width: int, tp_group: dist.ProcessGroup) -> OutputHead:
        """Return a copy with ``width`` rows on each rank, as many as the student's output layer has there.

        It is for a teacher whose vocabulary is padded to another size than the student's, so that a rank's
        rows stand for other ids. Rows that the teacher lacks are zero, and rows that are too many are left
        out: say with ``vocab_size`` how many ids there are. While this runs, each rank of ``tp_group`` has
        all rows on the device of the weight; with NCCL that is a GPU.

        Raises:
            InvalidInputError: ``width`` is not a positive integer.
        """
        width = check_integer("width", width, 1, "the rows of the student's output layer on a rank")
        start = dist.get_rank(tp_group) * width

        def shard_of(tensor: Tensor) -> Tensor:
            mine = all_gather(tensor.contiguous(), tp_group).flatten(0, 1)[start : start + width]
            return torch.cat([mine, mine.new_zeros(width - len(mine), *mine.shape[1:])])

        return self._mapped(shard_of)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> OutputHead:
        bias = None if self.bias is None else function(self.bias)
        return OutputHead(function(self.weight), bias, self.logit_dtype)

    def logits(self, hidden: Tensor) -> DeferredLogits:
        """Return the deferred logits of hidden states, without a gradient for the weight."""
        hidden, weight = hidden.to(self.weight.dtype), self.weight.detach()
        return deferred_logits(hidden, weight, bias=self.bias, logit_dtype=self.logit_dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """Weight and bias, if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return sum(tensor.nbytes for tensor in self.tensors)
