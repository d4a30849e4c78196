"""Deferred logits from hidden states and an output layer's weight, and their way back to ordinary ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.arguments import check_floats, check_group, check_no_transform
from ..logits.autograd import gather_sequence, sum_gradient
from .contents import OutputLayer, Product
from .options import KeepBytes, TileOptions
from .products import product
from .tensor import Defer, DeferredLogits
from .tiles import OutputLayerRows


def deferred_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    tile_bytes: int | None = None,
    keep_bytes: KeepBytes = 0,
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
            four. Several losses that wait take as much each. ``"auto"`` takes half of what is free on a GPU
            at the first backward of the process, and never more later; before that, and on a CPU, it takes
            nothing.
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
