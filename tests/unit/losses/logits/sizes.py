"""The sizes of the tensors that a function makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_patches.losses import DeferredLogits


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements, and the number of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            # What only looks large, as an expanded number, takes no memory.
            if isinstance(tensor, Tensor) and not isinstance(tensor, DeferredLogits):
                used = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
                self.largest = max(self.largest, torch.Size(used).numel())
        self.products += "mm" in str(func)
        return result
