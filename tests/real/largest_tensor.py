"""How large a tensor any operation has returned."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that an operation returns, in any layout and dtype."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Another subclass of Tensor goes first, so that its own operations are counted.
        if set(types) - {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                elements = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, elements)
        return result
