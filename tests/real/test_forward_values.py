"""Values of a one-column head at every token, on several layouts, against the chunk's own output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.inference import build_inference_model, forward_values
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import on_ranks


class ValueHead(torch.nn.Linear):
    """What frameworks put in the place of a GPTModel's output layer."""

    def __init__(self, hidden_size: int, sequence_parallel: bool) -> None:
        super().__init__(hidden_size, 1, bias=False)
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor, *unused: Any, **options: Any) -> tuple[torch.Tensor, None]:
        values = super().forward(hidden)
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values)
        return values, None


def critic(tiny: TinyModel) -> list[Any]:
    def provide(pre_process: bool = True, post_process: bool = True, **options: Any) -> torch.nn.Module:
        chunk = tiny.provider(pre_process, post_process, **options)
        if post_process:
            chunk.output_layer = ValueHead(32, tiny.sequence_parallel)
        return chunk

    model = build_inference_model(provide, tiny.transformer_config(), dtype="fp32")
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


MICROBATCHES = [
    {"tokens": torch.arange(16).view(2, 8) % 32, "lengths": [8, 5], "indices": [2, 0]},
    {"tokens": torch.arange(16, 24).view(1, 8), "lengths": [7], "response_lengths": [3], "indices": [1]},
]


@on_ranks(1)
def test_values_are_those_of_the_model() -> None:
    tiny = tiny_model("dense")
    tiny.initialize()
    [chunk] = model = critic(tiny)
    values = forward_values(model, MICROBATCHES, progress=False)
    assert values is not None and [len(one) for one in values] == [5, 7, 8]
    for batch in MICROBATCHES:
        tokens, positions = batch["tokens"], torch.arange(8).expand_as(batch["tokens"])
        outputs = chunk(tokens, positions, None)[..., 0]
        for output, length, index in zip(outputs, batch["lengths"], batch["indices"], strict=True):
            torch.testing.assert_close(values[index], output[:length])

    def packed(chunk: Any, batch: Any) -> torch.Tensor:
        return torch.arange(8.0).view(1, 8, 1)

    several = [{"tokens": torch.zeros(1, 8, dtype=torch.int64), "lengths": [3, 4]}]
    values = forward_values(model, several, forward=packed, progress=False)
    assert [one.tolist() for one in values or ()] == [[0, 1, 2], [3, 4, 5, 6]]
    with pytest.raises(InvalidInputError, match=r"2 numbers per token\. Expected: one"):
        forward_values(model, several, forward=lambda *_: torch.zeros(1, 8, 2), progress=False)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    pytest.param({"pp": 2, "vpp": 2}, marks=pytest.mark.slow),
    {"cp": 2},
]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@on_ranks(2)
def test_layouts(sizes: dict[str, Any]) -> None:
    tiny = tiny_model("dense", **sizes)
    tiny.initialize()
    model = critic(tiny)
    values = forward_values(model, MICROBATCHES, progress=False)
    assert (values is not None) == parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if values is None:
        return
    assert [len(one) for one in values] == [5, 7, 8]
    if tiny.cp > 1:
        whole = forward_values(model, MICROBATCHES, forward=_gathered, progress=False)
        torch.testing.assert_close(values, whole)
    if tiny.tp > 1:
        for value in values:
            of_rank_0 = value.clone()
            torch.distributed.broadcast(of_rank_0, 0)
            assert torch.equal(value, of_rank_0)


def _gathered(chunk: Any, batch: Any) -> torch.Tensor:
    """Run the model on this rank's pieces of sequences of eight tokens, and return the values of all."""
    pieces = torch.arange(8).chunk(4)
    rank = parallel_state.get_context_parallel_rank()
    own = torch.cat([pieces[rank], pieces[3 - rank]])
    output = chunk(batch["tokens"][:, own], own.expand(len(batch["tokens"]), -1), None)
    whole = output.new_zeros(len(output), 8, 1)
    whole[:, own] = output
    torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole
