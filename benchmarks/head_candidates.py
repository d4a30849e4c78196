"""Output layers with log-probabilities that ``head`` compares: ours, and those of other frameworks."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from megatron_rl_patches.losses import (
    deferred_logits,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)

from .candidates import CHECKOUTS, Candidate, checkout, from_checkout

TEMPERATURE = 0.8


@dataclass
class Inputs:
    """What a step is given; targets and advantages [t] are those of all rows or of some.

    Attributes:
        hidden: hidden states [T, h].
        weight: [V, h].
        entropy: whether the step is that of the entropies, not of the log-probabilities.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor
    rows: Tensor | None = None
    entropy: bool = False

    @property
    def used(self) -> Tensor:
        """The hidden states of the rows that have targets."""
        return self.hidden if self.rows is None else self.hidden[self.rows]


#: Log-probs and, where asked for and where there is one, the entropies.
Values = tuple[Tensor, ...]
Head = Callable[[Inputs], Values]


def naive(x: Inputs) -> Values:
    """``log_softmax`` of float32 logits, as frameworks without such functions write it."""
    logits = linear(x.hidden, x.weight).float()
    log_p = ((logits if x.rows is None else logits[x.rows]) / TEMPERATURE).log_softmax(-1)
    log_probs = log_p.gather(1, x.targets[:, None]).squeeze(1)
    return (log_probs, -(log_p.exp() * log_p).sum(-1)) if x.entropy else (log_probs,)


def made(x: Inputs) -> Values:
    """Logits in float32, as Megatron's ``Float16Module`` returns them."""
    return _ours(linear(x.hidden, x.weight).float(), x)


def deferred(x: Inputs, tile_bytes: int | None = None) -> Values:
    return _ours(deferred_logits(x.hidden, x.weight, tile_bytes=tile_bytes), x)


def half_kept(x: Inputs) -> Values:
    keep_bytes = len(x.targets) * len(x.weight) * x.hidden.element_size() // 2
    return _ours(deferred_logits(x.hidden, x.weight, keep_bytes=keep_bytes), x)


def _ours(logits: Tensor, x: Inputs) -> Values:
    options: dict[str, Any] = {"rows": x.rows, "temperature": TEMPERATURE}
    if x.entropy:
        return vocab_parallel_log_probs_and_entropy(logits, x.targets, entropy_grad=True, **options)
    return (vocab_parallel_log_probs(logits, x.targets, **options),)


def nemo_rl(module: Any, x: Inputs) -> Values:
    """With what its training step does next: divide what the model returned by the temperature."""
    step = Path(module.__file__).parents[1] / "models" / "megatron" / "train.py"
    log_probs = module.ChunkedDistributedHiddenStatesToLogprobs.apply(
        *(x.hidden[:, None], x.targets[None], x.weight, 0, len(x.weight)),
        *(256, dist.group.WORLD, False),
    )
    scale = _definition(step, "apply_temperature_scaling")
    return (scale(log_probs, SimpleNamespace(temperature=TEMPERATURE))[0],)


def skyrl(module: Any, x: Inputs, chunk_size: int) -> Values:
    # It takes tokens, of which each is the target of the row before, and leaves out the last row.
    rows = torch.cat([x.hidden, x.hidden[:1]])[None]
    tokens = torch.cat([x.targets[:1], x.targets])[None]
    options = {"chunk_size": chunk_size, "temperature": TEMPERATURE}
    group = dist.group.WORLD
    log_probs = module.from_parallel_hidden_to_logprobs(
        rows, x.weight, tokens, 0, len(x.weight), group, **options
    )
    if not x.entropy:
        return (log_probs[0],)
    entropies = module._fused_vocab_parallel_entropy_from_hidden(x.hidden[None], x.weight, group, **options)
    return log_probs[0], entropies[0]


def _areal_module() -> Any:
    folder = os.environ.get(CHECKOUTS["AReaL"])
    # The packages themselves import what serves and schedules, which the head does not need.
    for package in ("areal", "areal.utils", "areal.utils.functional") if folder else ():
        bare = sys.modules.setdefault(package, ModuleType(package))
        bare.__path__ = [str(Path(folder or "", *package.split(".")))]
    return from_checkout("AReaL", "areal.models.mcore.vocab_parallel_head")


def areal(module: Any, x: Inputs) -> Values:
    outputs = module._ChunkedVocabParallelLMHead.apply(
        *(x.hidden, x.weight, None, x.targets, TEMPERATURE, 128),
        *(False, False, False, dist.group.WORLD, 1.0, False),
    )
    return outputs[: 1 + x.entropy]


def trl(module: Any, x: Inputs) -> Values:
    names = ("entropy",) if x.entropy else ()
    outputs = module.ChunkedLogProbFunction.apply(
        x.hidden, x.weight, None, x.targets, TEMPERATURE, 32768, None, 1.0, names
    )
    return outputs[: 1 + x.entropy]


def _trl_function() -> Any:
    variable = CHECKOUTS["TRL before 1.13"]
    folder = os.environ.get(variable)
    if not folder:
        raise ModuleNotFoundError(f"{variable} not set")
    return _definition(Path(folder, "trl", "trainer", "utils.py"), "_ChunkedLogProbFunction")


def trl_before(function: Any, x: Inputs) -> Values:
    """Always computes the entropy."""
    return function.apply(x.hidden, x.weight, x.targets, TEMPERATURE, 8192)[: 1 + x.entropy]


def liger(module: Any, x: Inputs) -> Values:
    """A loss that weighs all tokens alike, without a temperature: it computes gradients in forward."""
    function = module.LigerFusedLinearCrossEntropyFunction
    loss = function.apply(x.used, x.weight, x.targets, None, None, -100, 0.0, 0.0, "sum")[0]
    return (-loss.expand(len(x.targets)),)


def verl(module: Any, x: Inputs) -> Values:
    return module.linear_cross_entropy(x.used, x.weight, x.targets, TEMPERATURE, "none", None)[:1]


@functools.cache
def _definition(file: Path, name: str) -> Any:
    """Return one function or class of a file, without importing what the rest of the file needs."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) == name]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(tree, file, "exec"), scope)
    return scope[name]


NAIVE, BASE, DEFERRED = "naive autograd", "logits materialized, `lean-loss`", "deferred"
HALF_KEPT = "deferred, half of the tiles kept"
NEMO_RL = "NeMo-RL, chunks of 256"
OURS = (
    Candidate(NAIVE, naive),
    Candidate(BASE, made),
    Candidate(DEFERRED, deferred),
    Candidate(HALF_KEPT, half_kept),
)
SKYRL = checkout("SkyRL", "skyrl.backends.skyrl_train.distributed.megatron.model_utils")
OTHERS = (
    Candidate(NEMO_RL, nemo_rl, checkout("nemo-rl", "nemo_rl.distributed.model_utils")),
    Candidate("SkyRL, chunks of 1024", partial(skyrl, chunk_size=1024), SKYRL),
    Candidate("SkyRL, chunks of 128", partial(skyrl, chunk_size=128), SKYRL),
    Candidate("AReaL, chunks of 128", areal, _areal_module),
    Candidate("TRL", trl, checkout("TRL", "trl.kernels.chunked_logprob")),
    Candidate("TRL before 1.13", trl_before, _trl_function),
)
ON_GPUS = (
    Candidate("deferred, tiles of 128 MiB", partial(deferred, tile_bytes=128 << 20)),
    Candidate("deferred, tiles of 2048 MiB", partial(deferred, tile_bytes=2048 << 20)),
    Candidate("Liger", liger, partial(import_module, "liger_kernel.ops.fused_linear_cross_entropy")),
    Candidate("verl's kernel", verl, partial(import_module, "verl.utils.kernel.linear_cross_entropy")),
)
