"""Output layers with log-probabilities in chunks, as their frameworks have them, for ``bench_head``.

A candidate is loaded, and called once, where it is measured; what it raises then is why it is missing.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
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

from ._loss_candidates import CHECKOUTS
from ._loss_candidates import _from_checkout as from_checkout
from ._machine import commit_of

# (hidden [T, h], weight [V, h], targets [T], temperature, with entropy) -> log-probs and, where asked for and
# where there is one, the entropies.
Head = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Candidate:
    name: str
    load: Callable[[], Head]


def naive() -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        log_p = (linear(hidden, weight).float() / t).log_softmax(-1)
        log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
        return (log_probs, -(log_p.exp() * log_p).sum(-1)) if entropy else (log_probs,)

    return head


def ours(deferred: bool) -> Head:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        logits = deferred_logits(hidden, weight) if deferred else linear(hidden, weight).float()
        if entropy:
            return vocab_parallel_log_probs_and_entropy(logits, targets, temperature=t, entropy_grad=True)
        return (vocab_parallel_log_probs(logits, targets, temperature=t),)

    return head


def nemo_rl(chunk_size: int) -> Head:
    """Load it with what its training step does next: divide what the model returned by the temperature."""
    module = from_checkout("nemo-rl", "nemo_rl.distributed.model_utils")
    step = Path(module.__file__).parents[1] / "models" / "megatron" / "train.py"
    apply_temperature_scaling = _definition(step, "apply_temperature_scaling")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        log_probs = module.ChunkedDistributedHiddenStatesToLogprobs.apply(
            hidden[:, None], targets[None], weight, 0, len(weight), chunk_size, dist.group.WORLD, False
        )
        return (apply_temperature_scaling(log_probs, SimpleNamespace(temperature=t))[0],)

    return head


def skyrl(chunk_size: int) -> Head:
    module = from_checkout("SkyRL", "skyrl.backends.skyrl_train.distributed.megatron.model_utils")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        # It takes tokens, of which each is the target of the row before, and leaves out the last row.
        rows = torch.cat([hidden, hidden[:1]])[None]
        tokens = torch.cat([targets[:1], targets])[None]
        options = {"chunk_size": chunk_size, "temperature": t}
        group = dist.group.WORLD
        log_probs = module.from_parallel_hidden_to_logprobs(
            rows, weight, tokens, 0, len(weight), group, **options
        )
        if not entropy:
            return (log_probs[0],)
        of_rows = module._fused_vocab_parallel_entropy_from_hidden(hidden[None], weight, group, **options)
        return log_probs[0], of_rows[0]

    return head


def areal(chunk_size: int) -> Head:
    folder = os.environ.get(CHECKOUTS["AReaL"])
    # The packages themselves import what serves and schedules, which the head does not need.
    for package in ("areal", "areal.utils", "areal.utils.functional") if folder else ():
        bare = sys.modules.setdefault(package, ModuleType(package))
        bare.__path__ = [str(Path(folder or "", *package.split(".")))]
    module = from_checkout("AReaL", "areal.models.mcore.vocab_parallel_head")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        outputs = module._ChunkedVocabParallelLMHead.apply(
            *(hidden, weight, None, targets, t, chunk_size),
            *(False, False, False, dist.group.WORLD, 1.0, False),
        )
        return outputs[: 1 + entropy]

    return head


def trl() -> Head:
    module = from_checkout("TRL", "trl.kernels.chunked_logprob")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        names = ("entropy",) if entropy else ()
        outputs = module.ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, t, 32768, None, 1.0, names
        )
        return outputs[: 1 + entropy]

    return head


def trl_before() -> Head:
    """Load it from a release before 1.13, which always computes the entropy."""
    folder = os.environ.get(TRL_BEFORE)
    if not folder:
        raise ModuleNotFoundError(f"{TRL_BEFORE} not set")
    function = _definition(Path(folder, "trl", "trainer", "utils.py"), "_ChunkedLogProbFunction")

    def head(hidden: Tensor, weight: Tensor, targets: Tensor, t: float, entropy: bool) -> tuple[Tensor, ...]:
        return function.apply(hidden, weight, targets, t, 8192)[: 1 + entropy]

    return head


TRL_BEFORE = "TRL_BEFORE_DIR"
NAIVE, BASE, DEFERRED = "naive autograd", "logits made, `lean-loss`", "deferred"
OURS = (
    Candidate(NAIVE, naive),
    Candidate(BASE, partial(ours, False)),
    Candidate(DEFERRED, partial(ours, True)),
)
OTHERS = (
    Candidate("NeMo-RL, chunks of 256", partial(nemo_rl, 256)),
    Candidate("SkyRL, chunks of 1024", partial(skyrl, 1024)),
    Candidate("SkyRL, chunks of 128", partial(skyrl, 128)),
    Candidate("AReaL, chunks of 128", partial(areal, 128)),
    Candidate("TRL", trl),
    Candidate("TRL before 1.13", trl_before),
)


def load_heads(
    candidates: Iterable[Candidate] = OURS + OTHERS,
) -> tuple[dict[str, Head], dict[str, str]]:
    """Return what runs here, and for all others why they do not."""
    heads, missing = {}, {}
    for candidate in candidates:
        hidden, targets = torch.ones(2, 4, requires_grad=True), torch.arange(2)
        try:
            head = candidate.load()
            torch.autograd.grad(head(hidden, torch.ones(8, 4), targets, 1.0, True)[0].sum(), hidden)
        except Exception as error:
            missing[candidate.name] = str(error)
        else:
            heads[candidate.name] = head
    return heads, missing


def revisions() -> list[str]:
    """Return the release or the commit of each checkout."""
    variables = {name: CHECKOUTS[name] for name in ("nemo-rl", "SkyRL", "AReaL", "TRL")}
    versions = []
    for name, variable in {**variables, "TRL before 1.13": TRL_BEFORE}.items():
        if folder := os.environ.get(variable):
            release = next(Path(folder).glob("trl-*.dist-info"), None)
            versions.append(release.stem.replace("-", " ") if release else f"{name} {commit_of(folder)}")
    return versions


def _definition(file: Path, name: str) -> Any:
    """Return one function or class of a file, without importing what the rest of the file needs."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) == name]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(tree, file, "exec"), scope)
    return scope[name]
