"""How the problems of several ranks are told, and copies of tensors to a GPU."""

from __future__ import annotations

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from megatron_rl_patches.common.agreement import agreed, all_or_none, raise_on_all, summary
from megatron_rl_patches.common.devices import on_device
from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.testing.cuda_redirect import CudaToCpu


def test_ranks_that_failed_alike_are_named_together() -> None:
    assert summary(["gone"]) == "every rank: gone"
    assert summary(["gone", None, "gone", "cut"]) == "ranks 0, 2: gone; rank 3: cut"


def test_a_process_without_a_group_is_alone() -> None:
    raise_on_all(None)
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        raise_on_all("no data")
    assert agreed(1, None, None) == [1]
    with pytest.raises(InvalidInputError, match=r"^no data$"):
        agreed(1, "no data", None)
    with (
        pytest.raises(
            CheckpointError, match=r"^reading: every rank: KeyError: 'a'\. All is old\.$"
        ) as raised,
        all_or_none("reading", error=CheckpointError, outcome="All is old."),
    ):
        raise KeyError("a")
    assert isinstance(raised.value.__cause__, KeyError)


def test_an_expanded_tensor_is_copied_to_a_gpu(monkeypatch: MonkeyPatch) -> None:
    """As positions of several sequences are, or an attention mask."""

    def pin_memory(tensor: Tensor) -> Tensor:
        # torch gives the copy in pinned memory the same strides.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    positions = torch.arange(5).expand(3, -1)
    with CudaToCpu():
        assert torch.equal(on_device(positions, torch.device("cuda")), positions)
