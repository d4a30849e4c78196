"""Losses on fake CUDA tensors, forward and backward: what a GPU would be asked to do, without one.

Run it with the libraries of :mod:`.stand_ins`. It prints a JSON object: for each case the error, if any, how
often the CPU would wait for the GPU and where, and the matrix products.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Both would ask the driver. Pinned memory and compiled functions need a real GPU.
fake_tensor.init_gpu_context = lambda device: None
torch.compile = lambda function=None, **options: function or (lambda other: other)
Tensor.pin_memory = lambda self, *args: self

from megatron_rl_patches import losses  # noqa: E402
from megatron_rl_patches.losses.logits import rows as rows_module  # noqa: E402

ROWS, VOCABULARY, HIDDEN = 1024, 32768, 512
#: Operations whose result the CPU reads, or whose shape depends on values.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "bincount")


class Asked(TorchDispatchMode):
    """Notes products, and what would make the CPU wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.products: list[list[list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        to_host = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        if on_gpu and (name in WAITING or (to_host and not kwargs.get("non_blocking"))):
            self.waits[f"{name} in {_caller()}"] += 1
        if name in ("mm", "addmm", "addmm_", "bmm"):
            self.products.append([list(tensor.shape) for tensor in tensors])
        if name == "nonzero":  # as if no row were chosen
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if name == "_local_scalar_dense":  # as if the condition did not hold
            return args[0].dtype != torch.bool and 0
        return func(*args, **kwargs)


def _caller() -> str:
    """Return the function of this package that has asked."""
    frames = [f for f in traceback.extract_stack() if "megatron_rl_patches/" in f.filename]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else "?"


def tensors(dtype: torch.dtype, frozen: bool = False, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the weight of the output layer, and ids."""
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    return (
        torch.empty(ROWS, hidden, **options, requires_grad=True),
        torch.empty(VOCABULARY, hidden, **options, requires_grad=not frozen),
        torch.zeros(ROWS, device="cuda", dtype=torch.int64),
    )


def backward(*values: Tensor) -> None:
    sum(value.sum() for value in values).backward()  # type: ignore[union-attr]
    assert all(value.device.type == "cuda" for value in values)


def deferred(dtype: torch.dtype, frozen: bool = False, entropy: bool = True, some_rows: bool = False) -> None:
    hidden, weight, ids = tensors(dtype, frozen)
    logits = losses.deferred_logits(hidden, weight)
    rows = torch.arange(0, ROWS, 2, device="cuda") if some_rows else None
    ids = ids[::2] if some_rows else ids
    if entropy:
        backward(*losses.vocab_parallel_log_probs_and_entropy(logits, ids, rows=rows))
    else:
        backward(losses.vocab_parallel_log_probs(logits, ids, rows=rows))
    assert hidden.grad is not None and hidden.grad.dtype == dtype and hidden.grad.shape == hidden.shape
    assert (weight.grad is None) == frozen


def scoring(dtype: torch.dtype) -> None:
    hidden, weight, ids = tensors(dtype)
    with torch.no_grad():
        losses.vocab_parallel_log_probs_and_entropy(losses.deferred_logits(hidden, weight), ids)


def materialized(dtype: torch.dtype, inplace: bool) -> None:
    hidden, weight, ids = tensors(dtype)
    logits = hidden @ weight.T
    backward(*losses.vocab_parallel_log_probs_and_entropy(logits, ids, inplace_backward=inplace))


def top_k(dtype: torch.dtype, is_deferred: bool) -> None:
    hidden, weight, _ = tensors(dtype)
    logits = losses.deferred_logits(hidden, weight) if is_deferred else hidden @ weight.T
    chosen = losses.vocab_parallel_topk(logits.detach(), 8)
    assert chosen.indices.device.type == "cuda" and chosen.indices.shape == (ROWS, 8)


def divergence(dtype: torch.dtype, name: Any) -> None:
    hidden, weight, _ = tensors(dtype)
    of_teacher, its_weight, _ = tensors(dtype, hidden=HIDDEN // 2)
    teacher = losses.deferred_logits(of_teacher.detach(), its_weight.detach())
    student = losses.deferred_logits(hidden, weight)
    backward(losses.full_vocabulary_divergence(student, teacher, divergence=name))


CASES: dict[str, Callable[[torch.dtype], None]] = {
    "log-probs and entropy": lambda dtype: materialized(dtype, inplace=False),
    "log-probs and entropy, in place": lambda dtype: materialized(dtype, inplace=True),
    "deferred": deferred,
    "deferred, some rows": lambda dtype: deferred(dtype, some_rows=True),
    "deferred, frozen": lambda dtype: deferred(dtype, frozen=True),
    "deferred, frozen, no entropy": lambda dtype: deferred(dtype, frozen=True, entropy=False),
    "deferred, scoring": scoring,
    "top-k": lambda dtype: top_k(dtype, is_deferred=False),
    "top-k, deferred": lambda dtype: top_k(dtype, is_deferred=True),
    "reverse KL": lambda dtype: divergence(dtype, "reverse_kl"),
    "forward KL": lambda dtype: divergence(dtype, "forward_kl"),
    "Jensen-Shannon": lambda dtype: divergence(dtype, "jensen_shannon"),
    "skewed forward KL": lambda dtype: divergence(dtype, "skewed_forward_kl"),
    "skewed reverse KL": lambda dtype: divergence(dtype, "skewed_reverse_kl"),
}


def rehearse(case: Callable[[torch.dtype], None], dtype: torch.dtype) -> dict[str, Any]:
    asked, error = Asked(), ""
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), asked:
            case(dtype)
    except Exception:
        error = traceback.format_exc()
    return {"error": error, "waits": dict(asked.waits), "products": asked.products}


def main() -> None:
    warnings.simplefilter("ignore")
    # Numbers of rows on the host are read there, without waiting for a GPU; fake ones have no values.
    read_on_host = rows_module.as_slice
    for module in list(sys.modules.values()):
        if getattr(module, "as_slice", None) is read_on_host:
            module.as_slice = lambda rows: rows  # type: ignore[attr-defined]
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    print(json.dumps({f"{n}, {d}": rehearse(case, dtypes[d]) for n, case in CASES.items() for d in dtypes}))
    sys.stdout.flush()
    os._exit(0)  # an orderly end would release streams that are not there


if __name__ == "__main__":
    main()
