"""The losses that ``loss`` compares: each takes logits and targets as its own framework would."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy

from .candidates import Candidate, checkout

LOG_PROBS, ENTROPY, ENTROPY_GRAD = MODES = ("log-probs", "+ entropy", "+ entropy with gradient")
ALONE = (LOG_PROBS,)


class Given(NamedTuple):
    """What a loss is given: logits [T, V / tp], and targets [T] in the whole vocabulary."""

    logits: Tensor
    targets: Tensor
    group: dist.ProcessGroup


#: Log-probs and, but for the first mode, entropies.
Values = tuple[Tensor, ...]
Loss = Callable[[Given, str], Values]


@dataclass(frozen=True)
class LossCandidate(Candidate):
    modes: tuple[str, ...] = MODES
    destroys_logits: bool = False


def ours(x: Given, mode: str, **options: Any) -> Values:
    if mode == LOG_PROBS:
        return (vocab_parallel_log_probs(x.logits, x.targets, tp_group=x.group, **options),)
    options["entropy_grad"] = mode == ENTROPY_GRAD
    return vocab_parallel_log_probs_and_entropy(x.logits, x.targets, tp_group=x.group, **options)


def naive(x: Given, mode: str) -> Values:
    log_p = torch.log_softmax(x.logits.float(), -1)
    log_probs = log_p.gather(1, x.targets[:, None]).squeeze(1)
    return _with_entropy(log_probs, lambda: -(log_p.exp() * log_p).sum(-1), mode)


def naive_checkpointed(x: Given, mode: str) -> Values:
    values: Values = checkpoint(naive, x, mode, use_reentrant=False)
    return values


def megatron_cross_entropy(x: Given, mode: str) -> Values:
    from megatron.core import tensor_parallel

    return (-tensor_parallel.vocab_parallel_cross_entropy(x.logits.float(), x.targets),)


def megatron_fused_cross_entropy(x: Given, mode: str) -> Values:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return (-fused_vocab_parallel_cross_entropy(x.logits.float(), x.targets, x.group),)


def slime(module: Any, x: Given, mode: str, chunk_size: int = -1) -> Values:
    log_probs, entropy = module.calculate_log_probs_and_entropy(
        x.logits.float(),  # as its Megatron model returns them
        x.targets,
        x.group,
        with_entropy=mode != LOG_PROBS,
        with_entropy_grad=mode == ENTROPY_GRAD,
        chunk_size=chunk_size,
    )
    return (log_probs.view(-1),) if mode == LOG_PROBS else (log_probs.view(-1), entropy)


def verl_megatron(module: Any, x: Given, mode: str) -> Values:
    """As its Megatron engine calls them: the entropy needs a copy, since the log-probs destroy the logits."""
    logits = x.logits.float()
    if mode == LOG_PROBS:
        return (module.vocab_parallel_log_probs_from_logits(logits, x.targets),)
    copy = logits.clone()
    with torch.set_grad_enabled(mode == ENTROPY_GRAD):
        entropy = module.vocab_parallel_entropy(logits)
    return module.vocab_parallel_log_probs_from_logits(copy, x.targets), entropy


def verl_fsdp(module: Any, x: Given, mode: str) -> Values:
    log_probs = module.logprobs_from_logits(x.logits, x.targets, inplace_backward=False)
    return _with_entropy(log_probs, lambda: module.entropy_from_logits_with_chunking(x.logits), mode)


def nemo_rl(module: Any, x: Given, mode: str, chunk_size: int) -> Values:
    start, batch = x.group.rank() * x.logits.shape[1], x.logits[None]
    place = (start, start + x.logits.shape[1])
    log_probs = module.ChunkedDistributedLogprob.apply(
        batch, x.targets[None], *place, chunk_size, x.group, False
    )

    def entropy() -> Tensor:
        return -module.ChunkedDistributedEntropy.apply(batch, chunk_size, x.group, False)[0]

    return _with_entropy(log_probs[0], entropy, mode)


def trl(module: Any, x: Given, mode: str) -> Values:
    log_probs = module.selective_log_softmax(x.logits, x.targets)
    return _with_entropy(log_probs, lambda: module.entropy_from_logits(x.logits), mode)


def liger(module: Any, x: Given, mode: str) -> Values:
    return (-module.liger_cross_entropy(x.logits, x.targets, reduction="none"),)


def _liger_module() -> Any:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")
    return importlib.import_module("liger_kernel.transformers.functional")


def _with_entropy(log_probs: Tensor, entropy: Callable[[], Tensor], mode: str) -> Values:
    if mode == LOG_PROBS:
        return (log_probs,)
    with torch.set_grad_enabled(mode == ENTROPY_GRAD):
        return log_probs, entropy()


def with_mode(mode: str) -> list[LossCandidate]:
    return [candidate for candidate in CANDIDATES if mode in candidate.modes]


SLIME_MODULE = checkout("slime", "slime.utils.ppo_utils")
NAIVE, SLIME, PLAIN, COMPILED = "naive autograd", "slime", "ours, plain", "ours, compiled"
COMPILED_IN_PLACE, PLAIN_IN_PLACE = f"{COMPILED}, in place", f"{PLAIN}, in place"
OURS = (
    LossCandidate(COMPILED, partial(ours, fused=True)),
    LossCandidate(COMPILED_IN_PLACE, partial(ours, fused=True, inplace_backward=True)),
    LossCandidate(PLAIN, partial(ours, fused=False)),
    LossCandidate(PLAIN_IN_PLACE, partial(ours, fused=False, inplace_backward=True)),
)
CANDIDATES = (
    *OURS,
    LossCandidate(NAIVE, naive, splits_vocabulary=False),
    LossCandidate("naive, checkpointed", naive_checkpointed, splits_vocabulary=False),
    LossCandidate("Megatron cross entropy", megatron_cross_entropy, modes=ALONE, destroys_logits=True),
    LossCandidate(
        "Megatron fused cross entropy", megatron_fused_cross_entropy, modes=ALONE, destroys_logits=True
    ),
    LossCandidate(SLIME, slime, SLIME_MODULE),
    LossCandidate("slime, chunks of 1024", partial(slime, chunk_size=1024), SLIME_MODULE),
    LossCandidate(
        "verl (Megatron)",
        verl_megatron,
        checkout("verl", "verl.utils.megatron.tensor_parallel"),
        destroys_logits=True,
    ),
    LossCandidate(
        "verl (FSDP)", verl_fsdp, checkout("verl", "verl.utils.torch_functional"), splits_vocabulary=False
    ),
    LossCandidate(
        "NeMo-RL, chunks of 128",
        partial(nemo_rl, chunk_size=128),
        checkout("nemo-rl", "nemo_rl.distributed.model_utils"),
    ),
    LossCandidate("TRL", trl, partial(importlib.import_module, "trl.trainer.utils"), splits_vocabulary=False),
    LossCandidate("Liger", liger, _liger_module, splits_vocabulary=False, modes=ALONE, destroys_logits=True),
)
