"""Samples of a framework that slices the logits in every layout, scored in one pass."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl_patches.frameworks import deferred_scoring, slime_losses
from megatron_rl_patches.frameworks.deferred_scoring import PendingScores

from ..losses.live_bytes import live_bytes
from .test_log_probs import model_logits

T, V = 24, 11
TOKENS = torch.arange(T) % V
Layout = Callable[[Tensor, float], Iterator[tuple[Tensor, Tensor]]]


def packed(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    logits = logits.squeeze(0).div(temperature)
    for start, length in ((1, 4), (5, 0), (9, 8)):
        # tokens[-0:] are all of them
        yield logits[start : start + length], TOKENS[:24][-length:]


def padded(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    logits = logits.view(-1, logits.size(-1))
    for sample in range(2):
        yield logits[12 * sample + 3 : 12 * sample + 7] / temperature, TOKENS[:4]


def zigzag(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    assert logits.dtype == torch.float32 and logits.nelement() * logits.element_size() < 1e9
    logits = logits.squeeze(0)
    if temperature != 1.0:
        logits = logits.div(temperature)
    for start in (0, 12):
        first, second = logits[start : start + 6], logits[start + 6 : start + 12]
        first, second = first[3:6], second[0:2]
        yield torch.cat([first, second], dim=0), torch.cat([TOKENS[:3], TOKENS[5:7]])


def all_gather(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    logits = logits.squeeze(0).div(temperature)
    yield logits[0:0], TOKENS[0:0]
    yield logits[2 : logits.size(0)], TOKENS[2:]


def overlapping(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    logits = logits[0] / temperature
    yield logits[0:6], TOKENS[:6]
    yield logits[4:9], TOKENS[:5]


def naive(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> tuple[Tensor, Any]:
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(1, tokens[: len(logits), None])
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None


class Framework:
    """``get_log_probs_and_entropy`` on top of a ``calculate``, as the frameworks have them."""

    def __init__(self, layout: Layout, finish: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.layout, self.finish, self.calls = layout, finish, 0

    def score(
        self, calculate: Callable[..., Any], logits: Tensor, args: Namespace
    ) -> dict[str, list[Tensor]]:
        self.calls += 1
        log_probs, entropies = [], []
        for chunk, tokens in self.layout(logits, args.rollout_temperature):
            assert chunk.size(-1) == V and len(chunk.shape) == 2
            log_prob, entropy = calculate(chunk, tokens, None, with_entropy=True)
            log_probs.append(self.finish(log_prob.squeeze(-1)))
            entropies.append(entropy)
        return {"log_probs": log_probs, "entropy": entropies}

    def unpatched(self, logits: Tensor, temperature: float = 0.7) -> dict[str, list[Tensor]]:
        return self.score(naive, logits, Namespace(rollout_temperature=temperature))

    def patched(self, logits: Tensor, temperature: float = 0.7, **args: Any) -> dict[str, list[Tensor]]:
        def calculate(*args: Any, **kwargs: Any) -> Any:
            return slime_losses.calculate_log_probs_and_entropy(naive, args, kwargs)

        def get_log_probs_and_entropy(logits: Tensor, *, args: Namespace) -> Any:
            return self.score(calculate, logits, args)

        options = {"args": Namespace(rollout_temperature=temperature, **args)}
        function = slime_losses.get_log_probs_and_entropy
        return function(get_log_probs_and_entropy, (logits,), options)  # type: ignore[no-any-return]


def gradient_of(scores: dict[str, list[Tensor]], logits: Tensor, entropy_grad: bool = True) -> Tensor:
    names = ("log_probs", "entropy") if entropy_grad else ("log_probs",)
    values = torch.cat([value for name in names for value in scores[name]])
    [gradient] = torch.autograd.grad((torch.linspace(0.5, 1.5, len(values)) * values).sum(), logits)
    return gradient


def passes() -> Any:
    return mock.patch.object(
        deferred_scoring, "log_probs_and_entropy", wraps=deferred_scoring.log_probs_and_entropy
    )


def reused_buffer(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    buffer = torch.empty(4, dtype=torch.int64)
    for start in (0, 5, 11):
        yield logits[0, start : start + 4] / temperature, buffer.copy_(TOKENS[start : start + 4])


LAYOUTS = {"packed": packed, "padded": padded, "zigzag": zigzag, "all-gather": all_gather}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_all_samples_in_one_pass_are_those_one_by_one(layout: Layout, temperature: float) -> None:
    logits, framework = (
        model_logits(2 if layout is padded else 1, T // (1 + (layout is padded)), V),
        Framework(layout),
    )
    expected = framework.unpatched(logits, temperature)
    with passes() as scored:
        scores = framework.patched(logits, temperature)
    assert (scored.call_count, framework.calls) == (1, 2)
    for name in ("log_probs", "entropy"):
        for value, reference in zip(scores[name], expected[name], strict=True):
            assert type(value) is Tensor and value.requires_grad
            torch.testing.assert_close(value, reference)
    torch.testing.assert_close(gradient_of(scores, logits), gradient_of(expected, logits))


def test_a_buffer_of_tokens_may_be_filled_again_for_each_sample() -> None:
    logits, framework = model_logits(1, T, V), Framework(reused_buffer)
    expected, scores = framework.unpatched(logits), framework.patched(logits)
    for value, reference in zip(scores["log_probs"], expected["log_probs"], strict=True):
        torch.testing.assert_close(value, reference)


def test_an_entropy_that_is_a_metric_has_no_gradient() -> None:
    logits, framework = model_logits(1, T, V), Framework(packed)
    scores = framework.patched(logits, loss_type="policy_loss", entropy_coef=0)
    assert not any(entropy.requires_grad for entropy in scores["entropy"])
    expected = gradient_of(framework.unpatched(logits), logits, entropy_grad=False)
    torch.testing.assert_close(gradient_of(scores, logits, entropy_grad=False), expected)


@pytest.mark.parametrize("layout", [packed, overlapping])
def test_values_that_are_used_early_are_computed_early(layout: Layout) -> None:
    """A clipped score, a padded one: the framework computes with what it has just asked for."""
    logits = model_logits(1, T, V)
    framework = Framework(layout, finish=lambda x: F.pad(x.clamp(min=-3).float(), (1, 0)).mul_(2))
    expected, scores = framework.unpatched(logits), framework.patched(logits)
    for value, reference in zip(scores["log_probs"], expected["log_probs"], strict=True):
        torch.testing.assert_close(value, reference)
    torch.testing.assert_close(gradient_of(scores, logits), gradient_of(expected, logits))


def test_pending_scores_are_tensors_to_whoever_asks() -> None:
    pending = PendingScores(lambda: torch.arange(3.0).requires_grad_())
    assert pending.shape == (3,) and pending.requires_grad and len(pending) == 3
    assert (1 - pending).tolist() == [1, 0, -1]
    assert isinstance(pending.view(3, 1).to(torch.float64), PendingScores)
    assert torch.zeros(2, dtype=torch.float64).to(pending).dtype == pending.to(pending).dtype == torch.float32


def test_no_samples() -> None:
    assert Framework(lambda logits, _: iter(())).patched(model_logits(1, 4, V)) == {
        "log_probs": [],
        "entropy": [],
    }


def test_no_grad_anywhere() -> None:
    with torch.no_grad():
        scores = Framework(packed).patched(model_logits(1, T, V))
    assert not any(value.requires_grad for value in scores["log_probs"])


def test_all_samples_in_one_pass_cost_one_gradient() -> None:
    logits = model_logits(1, 256, 8192)

    def calculate_all(calculate: Callable[..., Any], x: Tensor) -> Tensor:
        spans = [slice(start, start + 30) for start in range(0, 256, 32)]
        return torch.cat([calculate(x[0, span], torch.arange(30), None)[0].squeeze(-1) for span in spans])

    def one_by_one() -> Tensor:
        loss = calculate_all(
            lambda *args: slime_losses.calculate_log_probs_and_entropy(naive, args, {}), logits
        )
        return torch.autograd.grad(loss.sum(), logits)[0]

    def in_one_pass() -> Tensor:
        def function(logits: Tensor, args: Namespace) -> Tensor:
            return calculate_all(
                lambda *args: slime_losses.calculate_log_probs_and_entropy(naive, args, {}), logits
            )

        loss = slime_losses.get_log_probs_and_entropy(function, (logits, Namespace()), {})
        return torch.autograd.grad(loss.sum(), logits)[0]

    assert live_bytes(one_by_one).peak > 2 * logits.nbytes
    assert live_bytes(in_one_pass).peak < 1.2 * logits.nbytes
