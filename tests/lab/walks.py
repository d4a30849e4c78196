"""How far a reader walks: which modules of the package a call visits, and how often it goes from one to another.

    python -m tests.lab.walks            # all walks
    python -m tests.lab.walks dense      # one of them, with each stay

A *stay* is a row of calls of named functions in one module, without a call of a function in another module of the package
in between. ``sys.setprofile`` sees the calls of this thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import megatron_rl_patches

PACKAGE = Path(megatron_rl_patches.__file__).parent


def walk(call: Callable[[], Any]) -> list[str]:
    """Return the module of each stay, in order; the call runs twice, and the first time is not looked at."""
    call()
    stays: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)) and not frame.f_code.co_name.startswith("<"):
            module = str(Path(file).relative_to(PACKAGE))
            if not stays or stays[-1] != module:
                stays.append(module)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stays


N, HIDDEN, VOCABULARY = 8, 4, 32


def _deferred(frozen: bool = False) -> Any:
    from megatron_rl_patches.losses import deferred_logits

    hidden = torch.randn(N, HIDDEN, requires_grad=not frozen)
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=not frozen)
    return deferred_logits(hidden, weight)


def dense() -> None:
    """Log-probs and entropy of logits that exist, forward and backward."""
    from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

    logits = torch.randn(N, VOCABULARY, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.zeros(N, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()


def deferred() -> None:
    """Hidden states, deferred logits, log-probs and entropy in one tile, forward and backward."""
    from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

    log_probs, entropy = vocab_parallel_log_probs_and_entropy(_deferred(), torch.zeros(N, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()


def sliced() -> None:
    """The same of rows that slime selects, converts and divides."""
    from megatron_rl_patches.losses import vocab_parallel_log_probs_and_entropy

    rows = _deferred()[2:6].float().div(0.5)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(rows, torch.zeros(4, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()


def divergence() -> None:
    """Reverse KL over the whole vocabulary, student and teacher deferred, forward and backward."""
    from megatron_rl_patches.losses import full_vocabulary_divergence

    full_vocabulary_divergence(_deferred(), _deferred(frozen=True)).sum().backward()


WALKS = {"dense": dense, "deferred": deferred, "sliced": sliced, "divergence": divergence}


def main(names: list[str]) -> None:
    for name, function in WALKS.items():
        if not names or name in names:
            stays = walk(function)
            print(f"{name:<12}{len(set(stays)):3d} files {len(stays):4d} stays  {function.__doc__}")
            if names:
                print("\n".join(f"  {module}" for module in stays))


if __name__ == "__main__":
    main(sys.argv[1:])
