"""Samples of a host that slices the logits, scored at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.losses import hosts
from megatron_rl_patches.losses.samples import at_once, only_slices

from .live_bytes import live_bytes
from .test_hosts import model_logits

SPANS = (slice(2, 5), slice(7, 7), slice(9, 16))
TOKENS = [torch.arange(3), torch.arange(4), torch.arange(7)]


def per_sample(logits_1tv: Tensor) -> list[Any]:
    """In the shape of a host's function; ``tokens[-0:]`` of a sample without response are all of them."""
    scope, scores = hosts.current_scoring(), []
    for span, tokens in zip(SPANS, TOKENS, strict=True):
        chunk = logits_1tv.squeeze(0)[span]
        if scope.samples is not None:
            scores.append(scope.samples.score(chunk, tokens, None, True))
        else:
            scores.append(hosts.score(chunk, tokens[: len(chunk)], None, with_entropy=True))
    return scores


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_all_samples_at_once_are_those_one_by_one(entropy_grad: bool) -> None:
    logits = model_logits(1, 20, 11)
    one_by_one = per_sample(logits / 0.7)
    with hosts.scoring(temperature=0.7, entropy_grad=entropy_grad) as scope:
        together = at_once(per_sample, logits, scope)
    gradients = []
    for scores in (one_by_one, together):
        entropies = torch.cat([entropy for _, entropy in scores])
        loss = torch.cat([log_prob for log_prob, _ in scores]).sum()
        loss = loss + entropies.sum() if entropy_grad else loss
        gradients.append(torch.autograd.grad(loss, logits)[0])
    for (log_prob, entropy), (wanted, wanted_entropy) in zip(together, one_by_one, strict=True):
        torch.testing.assert_close(log_prob, wanted)
        torch.testing.assert_close(entropy, wanted_entropy)
        assert (log_prob.requires_grad, entropy.requires_grad) == (True, entropy_grad)
    torch.testing.assert_close(*gradients)


def test_no_samples() -> None:
    with hosts.scoring() as scope:
        assert at_once(lambda numbers: "nothing asked", model_logits(1, 4, 11), scope) == "nothing asked"


def test_all_samples_at_once_cost_one_gradient() -> None:
    logits = model_logits(1, 256, 8192)
    spans = [slice(start, start + 30) for start in range(0, 256, 32)]

    def loss_of(logits_1tv: Tensor) -> Tensor:
        scope = hosts.current_scoring()
        score = scope.samples.score if scope.samples else lambda *args: hosts.score(*args[:3])
        parts = [score(logits_1tv[0, span], torch.arange(30), None, False)[0] for span in spans]
        return torch.cat(parts).sum()

    def together() -> Tensor:
        with hosts.scoring() as scope:
            return torch.autograd.grad(at_once(loss_of, logits, scope), logits)[0]

    one_by_one = live_bytes(lambda: torch.autograd.grad(loss_of(logits), logits)).peak
    assert one_by_one > 2 * logits.nbytes
    assert live_bytes(together).peak < 1.2 * logits.nbytes


# --- which functions only slice -----------------------------------------------------------------------------


def as_hosts_do(logits: Tensor, args: Any, tokens: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    assert logits.dtype == torch.float32, f"{logits.dtype}"
    gigabytes = logits.nelement() * logits.element_size() / (1 << 30)
    if gigabytes > 2:
        print(list(logits.shape))
    logits = logits.squeeze(0)
    if args.rollout_temperature != 1.0:
        logits = logits.div(args.rollout_temperature)
    local_length, offsets = logits.size(0), (1, 2)
    for start, sample in enumerate(tokens):
        first, second = logits[start : start + local_length], logits[2 * start : local_length - offsets[0]]
        first = first[: offsets[1] - offsets[0]]
        chunk = torch.cat([first, second], dim=0)
        if args.late:
            chunk = chunk / args.rollout_temperature
        assert chunk.size(0) == sample.size(0), f"{chunk.size(0)}"
        yield chunk, sample


def caps(logits: Tensor, args: Any) -> Iterator[Tensor]:
    logits = torch.tanh(logits / 30) * 30
    yield logits[0:1]


def caps_a_slice(logits: Tensor, args: Any) -> Iterator[Tensor]:
    rows = logits[0:1]
    part = rows.squeeze(0)
    yield part.tanh(), 0


def divides_by_something(logits: Tensor, args: Any) -> Iterator[Tensor]:
    yield logits.div(args.scale), 0


def scales(logits: Tensor, args: Any) -> Iterator[Tensor]:
    logits *= args.scale
    yield logits[0:1], 0


def masks(logits: Tensor, args: Any) -> Iterator[Tensor]:
    logits[:, 7:] = float("-inf")
    yield logits[0:1], 0


def hands_on(logits: Tensor, args: Any) -> Iterator[Tensor]:
    yield args.transform(logits), 0


@functools.wraps(as_hosts_do)
def somebody_elses(logits: Tensor, *args: Any) -> Any:
    return as_hosts_do(logits.tanh(), *args)


def test_slices_are_seen_as_such() -> None:
    assert only_slices(as_hosts_do)


@pytest.mark.parametrize(
    "function",
    [caps, caps_a_slice, divides_by_something, scales, masks, hands_on, somebody_elses, len, None],
    ids=lambda function: getattr(function, "__name__", "None"),
)
def test_whatever_looks_at_values_is_not(function: Callable[..., Any]) -> None:
    assert not only_slices(function)
