"""Which modules of the package a call visits, and how often it goes from one to another.

    python -m tests.lab.walks            # all walks
    python -m tests.lab.walks dense      # one of them, with each stay

A *stay* is a row of calls of named functions in one module, without a call of a function in another module of
the package in between. ``sys.setprofile`` sees the calls of this thread. What stands in for a GPU, in
``testing/``, does not count.
"""

import sys
import warnings
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron_rl_patches
from megatron_rl_patches import apply, inference, losses, revert, testing
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import slime_losses

PACKAGE = Path(megatron_rl_patches.__file__).parent
N, HIDDEN, VOCABULARY = 8, 4, 32


def calls_of(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return module and function of each call, in order; ``call`` runs twice, and is looked at then."""
    call()
    calls: list[tuple[str, str]] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            calls.append((str(Path(file).relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def stays_of(call: Callable[[], Any]) -> list[str]:
    """Return the module of each stay, in order."""
    named = (module for module, function in calls_of(call) if not function.startswith("<"))
    return [module for module, _ in groupby(module for module in named if not module.startswith("testing"))]


def _deferred(n: int = N, frozen: bool = False) -> losses.DeferredLogits:
    weight = torch.randn(VOCABULARY, HIDDEN, requires_grad=not frozen)
    return losses.deferred_logits(torch.randn(n, HIDDEN, requires_grad=not frozen), weight)


def _scored(logits: torch.Tensor) -> None:
    """Log-probs and entropy, forward and backward."""
    targets = torch.zeros(len(logits), dtype=torch.int64)
    log_probs, entropy = losses.vocab_parallel_log_probs_and_entropy(logits, targets)
    (log_probs.sum() + entropy.sum()).backward()


def get_parallel_state() -> SimpleNamespace:
    """Groups of the function below, as miles has its own."""
    alone = SimpleNamespace(rank=0, size=1, group=None)
    return SimpleNamespace(cp=alone, tp=alone)


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = True,
) -> dict[str, list[torch.Tensor]]:
    """As in miles."""
    log_probs, entropies = [], []
    samples = logits[0].div(args.rollout_temperature).log_softmax(-1).split(total_lengths)
    for sample, tokens, n in zip(samples, unconcat_tokens, response_lengths, strict=True):
        rows = sample[-n - 1 : -1]
        log_probs.append(rows.gather(1, tokens[-n:, None]).squeeze(1))
        entropies.append(-(rows.exp() * rows).sum(-1))
    return {"log_probs": log_probs, "entropy": entropies}


def _slime(logits: torch.Tensor) -> None:
    """The responses of a microbatch of two samples with a temperature, forward and backward."""
    batch = {
        "args": SimpleNamespace(rollout_temperature=0.7, loss_type="policy_loss"),
        "unconcat_tokens": [torch.arange(6), torch.arange(5)],
        "total_lengths": [6, 5],
        "response_lengths": [4, 2],
        "with_entropy": True,
    }
    scores = slime_losses.get_log_probs_and_entropy(Call(get_log_probs_and_entropy, (logits,), batch))
    torch.cat([*scores["log_probs"], *scores["entropy"]]).sum().backward()


def _on_one_rank(call: Callable[[], Any]) -> None:
    # Not above, as ``apply`` is looked at before Megatron is imported.
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with testing.cpu_backend(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, of what is not installed
            testing.tiny_model().initialize()
            call()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _teacher() -> list[torch.nn.Module]:
    tiny = testing.tiny_model()
    return inference.build_inference_model(
        tiny.provider, tiny.transformer_config(), dtype="fp32", device="cpu"
    )


def _scores_of_a_teacher() -> None:
    """Two microbatches of two samples each, with entropies; nobody looks while the model is built."""
    look = sys.getprofile()
    sys.setprofile(None)
    model = _teacher()
    sys.setprofile(look)
    batch = {"tokens": torch.arange(20).view(2, 10), "total_lengths": [10, 7], "response_lengths": [4, 3]}
    inference.forward_log_probs(model, [batch, batch], with_entropy=True, progress=False)


WALKS: dict[str, Callable[[], Any]] = {
    # All patches, for frameworks that are installed and not imported yet, or not installed.
    "apply": lambda: (apply("all"), revert()),
    "dense": lambda: _scored(torch.randn(N, VOCABULARY, requires_grad=True)),
    "deferred": lambda: _scored(_deferred()),
    # Rows that slime selects, converts and divides.
    "sliced": lambda: _scored(_deferred()[2:6].float().div(0.5)),
    # Reverse KL over the whole vocabulary, student and teacher deferred.
    "divergence": lambda: (
        losses.full_vocabulary_divergence(_deferred(), _deferred(frozen=True)).sum().backward()
    ),
    # What takes the place of ``get_log_probs_and_entropy``, on logits that exist and on deferred ones.
    "slime": lambda: _slime(torch.randn(1, 11, VOCABULARY, requires_grad=True)),
    "slime, deferred": lambda: _slime(_deferred(11)[None]),
    "teacher's build": lambda: _on_one_rank(_teacher),
    "teacher's scores": lambda: _on_one_rank(_scores_of_a_teacher),
}


#: How many stays a walk may have. A commit lowers a number or leaves it.
MOST = {"dense": 37, "deferred": 55, "sliced": 61, "divergence": 68, "slime": 66, "slime, deferred": 95}
MOST |= {"teacher's build": 45, "teacher's scores": 193, "apply": 620}


if __name__ == "__main__":
    for name in sys.argv[1:] or WALKS:
        stays = stays_of(WALKS[name])
        print(f"{name:<16}{len(set(stays)):3d} files {len(stays):4d} stays")
        if sys.argv[1:]:
            print("\n".join(f"  {module}" for module in stays))
