"""The losses that ``bench_loss`` compares: each takes logits and targets as its own framework would.

A candidate is loaded where it is measured; what it raises then is the reason why it is missing.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

CHECKOUTS = {
    "slime": "SLIME_DIR",
    "verl": "VERL_DIR",
    "nemo-rl": "NEMO_RL_DIR",
    "OpenClaw-RL": "OPENCLAW_DIR",
    "SkyRL": "SKYRL_DIR",
    "AReaL": "AREAL_DIR",
    "TRL": "TRL_DIR",
}
LOG_PROBS, ENTROPY, ENTROPY_GRAD = MODES = ("log-probs", "+ entropy", "+ entropy with gradient")

Group = dist.ProcessGroup
# (logits [T, V / tp], targets [T], group, mode) -> log-probs and, but for the first mode, entropies.
Loss = Callable[[Tensor, Tensor, Group, str], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Candidate:
    name: str
    load: Callable[[], Loss]
    modes: tuple[str, ...] = MODES
    splits_vocabulary: bool = True
    destroys_logits: bool = False
    ours: bool = False


def naive() -> Loss:
    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        log_p = torch.log_softmax(logits.float(), -1)
        log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
        return _with_entropy(log_probs, lambda: -(log_p.exp() * log_p).sum(-1), mode)

    return loss


def naive_checkpointed() -> Loss:
    plain = naive()
    return lambda *args: checkpoint(plain, *args, use_reentrant=False)


def megatron_cross_entropy() -> Loss:
    from megatron.core import tensor_parallel

    return lambda logits, targets, group, mode: (
        -tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets),
    )


def megatron_fused_cross_entropy() -> Loss:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return lambda logits, targets, group, mode: (
        -fused_vocab_parallel_cross_entropy(logits.float(), targets, group),
    )


def slime(chunk_size: int = -1) -> Loss:
    module = _from_checkout("slime", "slime.utils.ppo_utils")

    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        # Its Megatron model returns float32 logits.
        log_probs, entropy = module.calculate_log_probs_and_entropy(
            logits.float(),
            targets,
            group,
            with_entropy=mode != LOG_PROBS,
            with_entropy_grad=mode == ENTROPY_GRAD,
            chunk_size=chunk_size,
        )
        return (log_probs.view(-1),) if mode == LOG_PROBS else (log_probs.view(-1), entropy)

    return loss


def verl_megatron() -> Loss:
    """As its Megatron engine calls them: the entropy needs a copy, since the log-probs destroy the logits."""
    module = _from_checkout("verl", "verl.utils.megatron.tensor_parallel")

    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        logits = logits.float()
        if mode == LOG_PROBS:
            return (module.vocab_parallel_log_probs_from_logits(logits, targets),)
        copy = logits.clone()
        with torch.set_grad_enabled(mode == ENTROPY_GRAD):
            entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(copy, targets), entropy

    return loss


def verl_fsdp() -> Loss:
    module = _from_checkout("verl", "verl.utils.torch_functional")

    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        log_probs = module.logprobs_from_logits(logits, targets, inplace_backward=False)
        return _with_entropy(log_probs, lambda: module.entropy_from_logits_with_chunking(logits), mode)

    return loss


def nemo_rl(chunk_size: int) -> Loss:
    module = _from_checkout("nemo-rl", "nemo_rl.distributed.model_utils")

    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        start, batch = group.rank() * logits.shape[1], logits[None]
        place = (start, start + logits.shape[1])
        log_probs = module.ChunkedDistributedLogprob.apply(
            batch, targets[None], *place, chunk_size, group, False
        )

        def entropy() -> Tensor:
            return -module.ChunkedDistributedEntropy.apply(batch, chunk_size, group, False)[0]

        return _with_entropy(log_probs[0], entropy, mode)

    return loss


def trl() -> Loss:
    module = importlib.import_module("trl.trainer.utils")

    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        log_probs = module.selective_log_softmax(logits, targets)
        return _with_entropy(log_probs, lambda: module.entropy_from_logits(logits), mode)

    return loss


def liger() -> Loss:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return lambda logits, targets, group, mode: (
        -functional.liger_cross_entropy(logits, targets, reduction="none"),
    )


def ours(**options: Any) -> Loss:
    def loss(logits: Tensor, targets: Tensor, group: Group, mode: str) -> tuple[Tensor, ...]:
        if mode == LOG_PROBS:
            return (vocab_parallel_log_probs(logits, targets, tp_group=group, **options),)
        return vocab_parallel_log_probs_and_entropy(
            logits, targets, tp_group=group, entropy_grad=mode == ENTROPY_GRAD, **options
        )

    return loss


NAIVE, SLIME, PLAIN, COMPILED = "naive autograd", "slime", "ours, plain", "ours, compiled"
COMPILED_IN_PLACE = f"{COMPILED}, in place"
CANDIDATES = (
    Candidate(COMPILED, partial(ours, fused=True), ours=True),
    Candidate(COMPILED_IN_PLACE, partial(ours, fused=True, inplace_backward=True), ours=True),
    Candidate(PLAIN, partial(ours, fused=False), ours=True),
    Candidate("ours, plain, in place", partial(ours, fused=False, inplace_backward=True), ours=True),
    Candidate(NAIVE, naive, splits_vocabulary=False),
    Candidate("naive, checkpointed", naive_checkpointed, splits_vocabulary=False),
    Candidate("Megatron cross entropy", megatron_cross_entropy, (LOG_PROBS,), destroys_logits=True),
    Candidate(
        "Megatron fused cross entropy", megatron_fused_cross_entropy, (LOG_PROBS,), destroys_logits=True
    ),
    Candidate(SLIME, slime),
    Candidate("slime, chunks of 1024", partial(slime, 1024)),
    Candidate("verl (Megatron)", verl_megatron, destroys_logits=True),
    Candidate("verl (FSDP)", verl_fsdp, splits_vocabulary=False),
    Candidate("NeMo-RL, chunks of 128", partial(nemo_rl, 128)),
    Candidate("TRL", trl, splits_vocabulary=False),
    Candidate("Liger", liger, (LOG_PROBS,), splits_vocabulary=False, destroys_logits=True),
)


def _with_entropy(log_probs: Tensor, entropy: Callable[[], Tensor], mode: str) -> tuple[Tensor, ...]:
    if mode == LOG_PROBS:
        return (log_probs,)
    with torch.set_grad_enabled(mode == ENTROPY_GRAD):
        return log_probs, entropy()


def _from_checkout(package: str, module: str) -> Any:
    """From the checkout that an environment variable names, else what is installed."""
    variable = CHECKOUTS[package]
    folder = os.environ.get(variable)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not folder and error.name == module.partition(".")[0]:
            raise ModuleNotFoundError(f"not installed, and {variable} not set") from error
        raise
