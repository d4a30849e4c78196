"""The sizes of the tensors that a function makes."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns, in elements of its storage, and the matrix products.

    ``copied`` are the sizes of what is copied from host memory, or converted there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.products = 0
        self.copied: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Another subclass of Tensor goes first, so that its own operations are counted.
        if set(types) - {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.largest = max(self.largest, elements)
        self.products += "mm" in str(func)
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.copied.append(args[0].numel())
        return result
