"""Copies of tensors to a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.common.devices import on_device
from megatron_rl_patches.testing.cuda_redirect import CudaToCpu


def test_an_expanded_tensor_is_copied_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As positions of several sequences are, or an attention mask."""

    def pin_memory(tensor: Tensor) -> Tensor:
        # torch gives the copy in pinned memory the same strides.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    positions = torch.arange(5).expand(3, -1)
    with CudaToCpu():
        assert torch.equal(on_device(positions, torch.device("cuda")), positions)
