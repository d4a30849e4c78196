"""An ordinary Megatron training loop for ``tiny_model()``, and data for it.

:func:`train` has the shape that Megatron-LM's and slime's ``train`` share, upstream assertions included.
Call it on a rank with ``torch.distributed`` initialized: on NCCL and a GPU, or inside ``cpu_backend()``.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import multi_token_prediction
from megatron.core.utils import get_model_config

from megatron_rl_patches.testing import TinyModel
from megatron_rl_patches.testing.transformer_engine.base import positions_of

VOCABULARY, SEQUENCE, BATCH, HIDDEN, LAYERS, HEADS = TinyModel.vocab_size, TinyModel.seq_length, 2, 32, 4, 4


def inference_model(options: TinyModel, device: str | None = None) -> list[Any]:
    """Build the model that only scores, in the groups that there are; weights have to be loaded into it."""
    from megatron_rl_patches.inference import build_inference_model

    config, dtype = options.transformer_config(), "bf16" if options.bf16 else "fp32"
    return build_inference_model(options.provider, config, dtype=dtype, device=device)


def trains_mtp_without_labels() -> bool:
    """Return whether this release takes the tokens as labels of multi-token prediction without labels."""
    process = getattr(multi_token_prediction, "process_mtp_loss", None)
    return process is not None and "input_ids" in inspect.signature(process).parameters


def positions() -> torch.Tensor:
    """Return the positions that this context-parallel rank has of each sequence, ``[s / cp]``."""
    cp = parallel_state.get_context_parallel_world_size()
    return positions_of(parallel_state.get_context_parallel_rank(), cp, SEQUENCE // cp)


class SyntheticData:
    """An endless stream of batches for this rank: the next token is a fixed function of the last.

    Sample ``i`` of the stream is the same on any layout, so runs on different layouts see the same data.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._microbatch = 0

    def __iter__(self) -> SyntheticData:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        replicas = parallel_state.get_data_parallel_world_size()
        number = self._microbatch * replicas + parallel_state.get_data_parallel_rank()
        self._microbatch += 1
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        token_b = torch.randint(VOCABULARY, (BATCH,), generator=generator)
        sequence = [token_b]
        for _ in range(SEQUENCE):
            sequence.append((5 * sequence[-1] + 3) % VOCABULARY)
        tokens_bs = torch.stack(sequence, dim=1)
        positions_s = positions()
        return {
            "tokens": tokens_bs[:, positions_s],
            "labels": tokens_bs[:, positions_s + 1],
            "position_ids": positions_s.expand(BATCH, -1),
        }


def data_iterators(options: TinyModel, seed: int = 0) -> list[SyntheticData]:
    """One iterator per model chunk, all over the same stream."""
    return [SyntheticData(seed) for _ in range(options.vpp or 1)]


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    """Megatron's ``forward_step_func``: output of one microbatch and the function for its loss."""
    device = next(model.parameters()).device
    batch = {name: values.to(device) for name, values in next(data_iterator).items()}
    # True is what must not be seen.
    mask_ss = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)
    output = model(batch["tokens"], batch["position_ids"], mask_ss, labels=batch["labels"])
    return output, partial(_loss)


def _loss(losses_bs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses_bs.float().mean()
    # The schedule multiplies by the context-parallel size, as it expects a share of the sequence's mean.
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach()}


NO_SYNC = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
    "a custom no_sync_func is not supported when overlapping grad-reduce"
)


def install_sync_functions(config: Any, model: Sequence[DistributedDataParallel]) -> None:
    """Install those of one chunk, or a list of those of all."""
    for name, method in (("no_sync_func", "no_sync"), ("grad_sync_func", "start_grad_sync")):
        functions = [getattr(model_chunk, method) for model_chunk in model]
        setattr(config, name, functions[0] if len(functions) == 1 else functions)


def train(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Sequence[Iterator[dict[str, torch.Tensor]]],
    num_microbatches: Sequence[int],
    options: TinyModel,
) -> list[float]:
    """Train one step per entry of ``num_microbatches``; return the loss of each, the same on every rank.

    An ordinary Megatron-core loop: like those of Megatron-LM and slime, it works once per process.
    """
    for chunk in model:
        chunk.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if isinstance(model[0], DistributedDataParallel) and options.overlap_grad_reduce:
        assert config.no_sync_func is None, NO_SYNC
        install_sync_functions(config, model)
    config.finalize_model_grads_func = finalize_model_grads

    pre_hook_enabled = False
    overlaps = options.overlap_param_gather and options.use_distributed_optimizer
    if overlaps:
        # The first step shows errors of loading or initialization before a gather can spread them.
        disable_forward_pre_hook(model, param_sync=False)

    losses = []
    for step, microbatches in enumerate(num_microbatches):
        losses.append(train_step(model, optimizer, data_iterator, microbatches))
        if step == 0 and overlaps:
            enable_forward_pre_hook(model)
            pre_hook_enabled = True
    if pre_hook_enabled:
        disable_forward_pre_hook(model)
    return losses


def train_step(
    model: Sequence[DistributedDataParallel],
    optimizer: Any,
    data_iterator: Sequence[Iterator[dict[str, torch.Tensor]]],
    num_microbatches: int,
) -> float:
    """One optimizer step; return the mean loss over microbatches and replicas."""
    optimizer.zero_grad()
    reports = backward(model, data_iterator, num_microbatches, forward_step)
    succeeded, _, _ = optimizer.step()
    assert succeeded
    # Only the last pipeline stage has a loss.
    sums = torch.tensor([sum(float(report["loss"]) for report in reports), float(len(reports))])
    sums = sums.to(next(model[0].parameters()).device)
    torch.distributed.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def backward(
    model: Sequence[DistributedDataParallel],
    data_iterator: Sequence[Iterator[Any]],
    num_microbatches: int,
    step: Callable[..., Any],
    micro_batch_size: int = BATCH,
) -> list[dict[str, Any]]:
    """Let Megatron's own schedule write gradients into the buffers; return what the losses report."""
    for chunk in model:
        chunk.zero_grad_buffer()
    return run_schedule(model, data_iterator, num_microbatches, step, micro_batch_size=micro_batch_size)


def run_schedule(
    model: Sequence[Any],
    data_iterator: Any,
    num_microbatches: int,
    step: Callable[..., Any] | None = None,
    *,
    micro_batch_size: int = BATCH,
    forward_only: bool = False,
) -> list[Any]:
    """Run microbatches through Megatron's own schedule, by default with :func:`forward_step`."""
    with torch.set_grad_enabled(not forward_only):
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=step or forward_step,
            data_iterator=data_iterator,
            model=list(model),
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    return reports


def enable_forward_pre_hook(model: Sequence[DistributedDataParallel]) -> None:
    for chunk in model:
        chunk.enable_forward_pre_hook()


def disable_forward_pre_hook(model: Sequence[DistributedDataParallel], param_sync: bool = True) -> None:
    for chunk in model:
        chunk.disable_forward_pre_hook(param_sync=param_sync)


def checksum(model: Sequence[torch.nn.Module], optimizer: Any) -> str:
    """A hash of every bit of this rank's parameters and of its shard of the optimizer's own copies."""
    digest = hashlib.sha256()
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for tensor in (*(parameter for chunk in model for parameter in chunk.parameters()), *masters):
        digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def counting_overlap() -> Iterator[Any]:
    """Count the collectives that the bucket groups dispatch while computing, by who calls them."""
    group = _ParamAndGradBucketGroup
    callers = {
        group.finish_param_sync.__code__: "param_gathers",  # a forward pre-hook
        group.register_grad_ready.__code__: "grad_reduces",  # a backward hook, in the last microbatch
        DistributedDataParallel.start_grad_sync.__code__: "scheduled_grad_reduces",  # a schedule
    }
    overlap = SimpleNamespace(**dict.fromkeys(callers.values(), 0))

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind := callers.get(sys._getframe(1).f_code):
                setattr(overlap, kind, getattr(overlap, kind) + 1)
            return method(*args, **kwargs)

        return call

    starts: Any = {name: counted(getattr(group, name)) for name in ("start_param_sync", "start_grad_sync")}
    with mock.patch.multiple(group, **starts):
        yield overlap
