"""Matrix products of an output layer, whose results may have a higher precision than their factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..logits.rows import ranges

_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# Where torch has no product of 16-bit matrices with a float32 result, so many of their columns are converted
# to float32 at a time.
_CONVERTED_COLUMNS = 512
# Where torch has such a product, but does not add it to a float32 tensor, so large a part of it is computed
# at a time. The product of few rows of logits would be as large as the weight.
_PRODUCT_BYTES = 128 << 20


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``hidden @ weight.T + bias``, ``[..., V / tp]``, in a dtype that may be a more precise one."""
    logits = hidden.new_empty((*hidden.shape[:-1], len(weight)), dtype=dtype)
    multiply(hidden.flatten(0, -2), weight.T, bias, logits.flatten(0, -2))
    return logits


def multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``a @ b + bias`` into ``out``, in the precision of ``out``, which may be higher than theirs."""
    if a.dtype != out.dtype:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        add_product(out, a, b)
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, may_round: bool = False) -> None:
    """Add ``a @ b`` to ``total``, in the precision of ``total``, which may be higher than that of both.

    With ``may_round`` a product of bfloat16 matrices is rounded to bfloat16 where torch has no product with
    another dtype, as on a CPU. (A sum in float16 may be beyond its range.)
    """
    # torch's build for AMD's GPUs refuses to multiply 16-bit matrices with a float32 result.
    is_on_nvidia = a.device.type == "cuda" and torch.version.hip is None
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif is_on_nvidia and _TORCH >= (2, 10):
        # One product that adds: linkedin/Liger-Kernel#1239 measured 13.4 ms, and 23.5 with a sum of its own.
        # Before torch 2.10 the total must have the dtype of the matrices (pytorch/pytorch#167931).
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_on_nvidia and _TORCH >= (2, 8):
        for rows in ranges(0, len(a), max(_PRODUCT_BYTES // (b.shape[1] * total.element_size()), 1)):
            total[rows].add_(torch.mm(a[rows], b, out_dtype=total.dtype))
    elif may_round and a.dtype == torch.bfloat16:
        total += torch.mm(a, b)
    else:
        for part in ranges(0, len(b), _CONVERTED_COLUMNS):
            total.addmm_(a[:, part].to(total.dtype), b[part].to(total.dtype))
