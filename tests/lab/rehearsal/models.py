"""What is rehearsed on a real GPTModel of megatron-core, in DDP on the first of two data-parallel ranks.

The process group is torch's ``fake``, which moves nothing: collectives end at once, and what other ranks send
is missing. Two functions stand in where Megatron reads values on the CPU. All of a training step runs so, the
optimizer included. Values, NCCL and what streams overlap cannot be seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from megatron_rl_patches import Settings, applied, inference, losses
from megatron_rl_patches.reentry import TrainGuard
from megatron_rl_patches.testing import TinyModel
from tests.references import tiny_gpt

TILE_BYTES = 256


@contextmanager
def _two_ranks(dtype: torch.dtype) -> Iterator[TinyModel]:
    """Yield a tiny GPT, on the first of two data-parallel ranks."""
    tensor = torch.tensor

    def stacked(data: Any, **options: Any) -> Tensor:
        # Megatron's gradient norm makes a tensor of tensors, whose values torch would read one by one.
        leaves = tree_leaves(data)
        return torch.stack(leaves) if isinstance(leaves[0], FakeTensor) else tensor(data, **options)

    def gathered(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with patch.object(torch, "tensor", stacked), patch.object(dist, "all_gather_object", gathered):
            yield TinyModel(bf16=dtype == torch.bfloat16)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def lean_head(dtype: torch.dtype) -> None:
    """``lean-head`` with ``gradient_accumulation_fusion``: the weight's gradient goes to ``main_grad``."""
    with _two_ranks(dtype) as gpt, applied("lean-head", settings=Settings(lean_head_tile_bytes=TILE_BYTES)):
        (chunk,), optimizer = gpt.build()
        layer = get_attr_wrapped_model(chunk, "output_layer")
        layer.gradient_accumulation_fusion = True
        tokens, positions = torch.zeros(2, 16, dtype=torch.int64).cuda(), torch.arange(16, device="cuda")
        logits = chunk(tokens, positions.expand_as(tokens), attention_mask=None).flatten(0, 1)
        assert isinstance(logits, losses.DeferredLogits), type(logits)
        targets = torch.zeros(len(logits), dtype=torch.int64, device="cuda")
        log_probs, entropy = losses.vocab_parallel_log_probs_and_entropy(logits, targets)
        (log_probs + entropy).sum().backward()
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.main_grad.dtype == torch.float32
        chunk.finish_grad_sync()
        assert optimizer.step()[0]


def re_entry(dtype: torch.dtype) -> None:
    """Three calls of a training loop, of which the second raises; forward pre-hooks switched twice."""
    with _two_ranks(dtype) as gpt, applied("reentrant-train"):
        model, optimizer = gpt.build()

        def loss(losses_bs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            count = torch.full((), losses_bs.numel(), dtype=torch.int32, device=losses_bs.device)
            return losses_bs.sum(), count, {"loss": losses_bs.detach().mean()}

        def train(*arguments: Any) -> None:
            with patch.object(tiny_gpt, "_loss", loss), TrainGuard(model, optimizer):
                tiny_gpt.train(model, optimizer, *arguments)

        microbatches = [2, 2]
        train(tiny_gpt.data_iterators(gpt), microbatches, gpt)
        with pytest.raises(StopIteration):
            train([iter([next(tiny_gpt.SyntheticData())] * 3)], microbatches, gpt)  # one is missing
        train(tiny_gpt.data_iterators(gpt), microbatches, gpt)
        for switch in (tiny_gpt.enable_forward_pre_hook, tiny_gpt.disable_forward_pre_hook) * 2:
            switch(model)
            switch(model)


def teachers(dtype: torch.dtype) -> None:
    """Two teachers in pinned memory take turns, score, and give hidden states for a divergence."""
    with _two_ranks(dtype) as gpt:
        gpt.initialize()
        # Without initialization the builder gives meta parameters memory in a way that fake ones refuse.
        options = {"dtype": "bf16" if gpt.bf16 else "fp32", "perform_initialization": True}
        model = inference.build_inference_model(gpt.provider, gpt.transformer_config(), **options)
        pool = inference.TeacherPool(model)
        for name in ("math", "code"):
            pool.add(name, lambda model: [parameter.data.zero_() for parameter in model[0].parameters()])
        microbatches = [{"tokens": torch.zeros(2, 16, dtype=torch.int64), "total_lengths": [16, 10]}] * 2
        with pool.use("math") as teacher:
            assert inference.forward_log_probs(teacher, microbatches, with_entropy=True, progress=False)
        head = pool.head("code", "cpu")
        with pool.use("code") as teacher:
            hidden = inference.forward_hidden_states(teacher, microbatches, progress=False)
        assert head is not None and hidden is not None
        parts = [losses.FullDistribution.from_hidden(one, head) for one in hidden]
        distribution = losses.FullDistribution.cat(parts).to("cuda")
        student = torch.zeros(len(distribution), gpt.vocab_size, device="cuda", requires_grad=True)
        losses.full_vocabulary_divergence(student, distribution.logits()).sum().backward()
