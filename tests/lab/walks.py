"""Which modules of the package a call visits, and how often it goes from one to another.

    python -m tests.lab.walks            # all walks
    python -m tests.lab.walks dense      # one of them, with each stay

A *stay* is a row of calls of named functions in one module, without a call of a function in another module of
the package in between. ``sys.setprofile`` sees the calls of this thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatron_rl_patches
from megatron_rl_patches import losses
from tests.unit.frameworks.test_slime_losses import Framework

PACKAGE = Path(megatron_rl_patches.__file__).parent
N, HIDDEN, VOCABULARY = 8, 4, 32
FRAMEWORK = Framework()


def stays_of(call: Callable[[], Any]) -> list[str]:
    """Return the module of each stay, in order; the call runs twice, and the first time is not looked at."""
    call()
    stays: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and not frame.f_code.co_name.startswith("<"):
            module = str(Path(file).relative_to(PACKAGE))
            if stays[-1:] != [module]:
                stays.append(module)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


def _deferred(n: int = N, frozen: bool = False) -> losses.DeferredLogits:
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=not frozen)
    return losses.deferred_logits(torch.randn(n, HIDDEN, requires_grad=not frozen), weight)


def _scored(logits: torch.Tensor) -> None:
    """Log-probs and entropy, forward and backward."""
    targets = torch.zeros(len(logits), dtype=torch.int64)
    log_probs, entropy = losses.vocab_parallel_log_probs_and_entropy(logits, targets)
    (log_probs.sum() + entropy.sum()).backward()


def _slime(framework: Any, logits: torch.Tensor) -> None:
    """The responses of a microbatch of two samples with a temperature, forward and backward."""
    batch = {"unconcat_tokens": [torch.arange(6), torch.arange(5)], "total_lengths": [6, 5]}
    scores = framework.patched(logits, batch={**batch, "response_lengths": [4, 2]}, loss_type="policy_loss")
    torch.cat([*scores["log_probs"], *scores["entropy"]]).sum().backward()


WALKS: dict[str, Callable[[], Any]] = {
    "dense": lambda: _scored(torch.randn(N, VOCABULARY, requires_grad=True)),
    "deferred": lambda: _scored(_deferred()),
    # Rows that slime selects, converts and divides.
    "sliced": lambda: _scored(_deferred()[2:6].float().div(0.5)),
    # Reverse KL over the whole vocabulary, student and teacher deferred.
    "divergence": lambda: (
        losses.full_vocabulary_divergence(_deferred(), _deferred(frozen=True)).sum().backward()
    ),
    # What takes the place of ``get_log_probs_and_entropy``, on logits that exist and on deferred ones.
    "slime": lambda: _slime(FRAMEWORK, torch.randn(1, 11, VOCABULARY, requires_grad=True)),
    "slime, deferred": lambda: _slime(FRAMEWORK, _deferred(11)[None]),
}


#: How many stays a walk may have. A commit lowers a number or leaves it.
MOST = {"dense": 37, "deferred": 55, "sliced": 61, "divergence": 68, "slime": 68, "slime, deferred": 97}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        stays = stays_of(WALKS[name])
        print(f"{name:<12}{len(set(stays)):3d} files {len(stays):4d} stays")
        if sys.argv[1:]:
            print("\n".join(f"  {module}" for module in stays))
