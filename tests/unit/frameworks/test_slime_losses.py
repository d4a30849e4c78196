"""Log-probabilities and entropies by conventions of frameworks, then of the responses of a microbatch.

Parallel layouts, and the losses on top, are tested on slime's stand-in and on checkouts.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import log_probs as frameworks
from megatron_rl_patches.frameworks import own_options, slime_losses
from megatron_rl_patches.losses import deferred_logits
from tests.references.dense import dense_log_probs_and_entropy
from tests.references.live_bytes import live_bytes

LOSS, PATCHES = "slime.backends.megatron_utils.loss", registry.patches()


def model_logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output of some operation, as a model's are."""
    leaf = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return leaf.to(dtype).requires_grad_() * 1


def test_scores_have_the_shape_of_the_tokens() -> None:
    logits, tokens = model_logits(2, 3, 11), torch.arange(6).view(2, 3)
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, entropy_grad=True)
    assert entropies is not None
    expected = dense_log_probs_and_entropy(logits.view(6, 11), tokens.view(6))
    torch.testing.assert_close((log_probs, entropies), tuple(x.view(2, 3).float() for x in expected))
    assert frameworks.log_probs_and_entropy(logits, tokens, None)[1] is None


def test_tokens_outside_of_the_vocabulary_have_no_share_in_anything() -> None:
    logits = model_logits(4, 11)
    tokens = torch.tensor([3, -100, 11, -1])
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, entropy_grad=True)
    assert entropies is not None
    assert log_probs[1:].tolist() == entropies[1:].tolist() == [0.0] * 3
    [gradient] = torch.autograd.grad((log_probs + entropies).sum(), logits)
    assert gradient[0].any() and not gradient[1:].any()


@pytest.mark.parametrize("case", ["float32", "bfloat16", "a leaf", "a part", "has an entropy"])
def test_the_gradient_goes_into_float32_logits_that_nobody_else_needs(case: str) -> None:
    logits = model_logits(4, 11, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)
    if case == "a leaf":
        logits = logits.detach().requires_grad_()
    elif case == "a part":
        logits = model_logits(6, 11)[1:5]
    entropies = frameworks.entropy(logits, None) if case == "has an entropy" else torch.zeros(4)
    before = logits.detach().clone()
    log_probs, _ = frameworks.log_probs_and_entropy(logits, torch.arange(4), None, inplace_backward=True)
    assert torch.equal(logits.detach(), before)
    (log_probs + entropies).sum().backward()
    assert torch.equal(logits.detach(), before) == (case != "float32")


# --- calculate_log_probs_and_entropy


def of_each_release(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    entropy_requires_grad: bool = True,
    need_entropy_grad: bool = True,
    true_on_policy: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Any]:
    """With ``true_on_policy`` miles keeps the bits of its engine."""
    return torch.full((3, 1), 7.0), torch.full((3,), 7.0)


def naive(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> tuple[Tensor, Any]:
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(1, tokens[: len(logits), None])
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None


V = 11


@pytest.mark.parametrize(
    ("calculate", "options", "dtype", "requires_grad"),
    [
        (naive, {}, torch.bfloat16, True),
        (of_each_release, {"vocab_size": V}, torch.float32, True),
        (of_each_release, {"with_entropy_grad": False}, torch.float32, False),
        (of_each_release, {"entropy_requires_grad": False}, torch.float32, False),
        (of_each_release, {"need_entropy_grad": False}, torch.float32, False),
        (of_each_release, {"true_on_policy": True}, torch.float32, None),
    ],
)
def test_an_entropy_is_what_the_release_and_its_options_say(
    calculate: Any, options: dict[str, Any], dtype: torch.dtype, requires_grad: bool | None
) -> None:
    logits, tokens = model_logits(3, V, dtype=torch.bfloat16), torch.arange(3)
    call = Call(calculate, (logits, tokens, None, True), options)
    log_probs, entropy = slime_losses.calculate_log_probs_and_entropy(call)
    assert bool((log_probs == 7).all()) == (requires_grad is None)
    assert (log_probs.shape, log_probs.dtype) == ((3, 1), torch.float32)
    assert (entropy.shape, entropy.dtype) == ((3,), dtype)
    assert (log_probs.requires_grad, entropy.requires_grad) == (
        requires_grad is not None,
        bool(requires_grad),
    )


def with_sampling_mask(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    sampling_mask: Any = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Any]:
    """As in miles since September 2026."""
    scaled = logits.to(torch.float32, copy=True).div_(temperature)
    kept = scaled.clone().masked_fill_(~sampling_mask, float("-inf"))
    return naive(kept, tokens, tp_group)[0], naive(scaled, tokens, tp_group, with_entropy)[1]


def test_a_sampling_mask_of_miles_costs_itself_and_one_gradient() -> None:
    logits, tokens = model_logits(64, 8192), torch.arange(64)
    mask = (torch.rand(logits.shape) > 0.5).scatter(1, tokens[:, None], True)

    def patched(*args: Any, **options: Any) -> Any:
        return slime_losses.calculate_log_probs_and_entropy(Call(with_sampling_mask, args, options))

    def run(calculate: Callable[..., Any]) -> tuple[Tensor, ...]:
        scores = calculate(logits, tokens, None, True, sampling_mask=mask, temperature=0.7)
        return *scores, torch.autograd.grad(sum(x.sum() for x in scores), logits)[0]

    def peak(calculate: Callable[..., Any]) -> int:
        def gradient() -> Tensor:
            log_probs, _ = calculate(logits, tokens, None, sampling_mask=mask)
            return torch.autograd.grad(log_probs.sum(), logits)[0]

        return live_bytes(gradient).peak

    torch.testing.assert_close(run(patched), run(with_sampling_mask))
    assert peak(with_sampling_mask) > 2.5 * logits.nbytes
    assert peak(patched) < 1.3 * logits.nbytes


# --- the responses of a microbatch

TOTALS, RESPONSES = [9, 6, 8], [4, 0, 7]
TOKENS = [torch.arange(length) % V for length in TOTALS]
Scores = dict[str, list[Tensor]]
Change = Callable[[Tensor], Tensor]


def get_parallel_state() -> Namespace:
    """As in miles, whose groups are its own."""
    alone = Namespace(rank=0, size=1, group=None)
    return Namespace(cp=alone, tp=alone)


def same(values: Tensor) -> Tensor:
    return values


class Framework:
    """Scores sample by sample, as miles does, on top of a ``calculate``.

    It may change the logits, the rows of a sample, or the log-probs. ``passes`` counts microbatches.
    """

    def __init__(
        self,
        calculate: Callable[..., tuple[Tensor, Any]] = naive,
        *,
        logits: Change = same,
        rows: Change = same,
        finish: Change = same,
        **passed: Any,
    ) -> None:
        self.calculate, self.passed, self.passes = calculate, passed, 0
        self._change, self._change_rows, self._finish = logits, rows, finish

    def get_log_probs_and_entropy(
        self,
        logits: Tensor,
        *,
        args: Namespace,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        max_seq_lens: list[int] | None = None,
    ) -> Scores:
        self.passes += 1
        logits_tv = self._change(logits.reshape(-1, logits.size(-1))).div(args.rollout_temperature)
        starts = torch.tensor([0, *(max_seq_lens or total_lengths)[:-1]]).cumsum(0).tolist()
        log_probs, entropies = [], []
        for start, total, n, tokens in zip(
            starts, total_lengths, response_lengths, unconcat_tokens, strict=True
        ):
            rows = self._change_rows(logits_tv[start + total - n - 1 : start + total - 1])
            log_probs_n, entropy_n = self.calculate(
                rows, tokens[-n:], None, with_entropy=with_entropy, **self.passed
            )
            log_probs.append(self._finish(log_probs_n.squeeze(-1)))
            entropies.append(entropy_n)
        return {"log_probs": log_probs, **({"entropy": entropies} if with_entropy else {})}

    def unpatched(self, logits: Tensor, temperature: float = 0.7, **batch: Any) -> Scores:
        return self.get_log_probs_and_entropy(
            logits, args=Namespace(rollout_temperature=temperature), **batch_of(batch)
        )

    def patched(self, logits: Tensor, temperature: float = 0.7, batch: Any = None, **args: Any) -> Scores:
        def calculate(*args: Any, **kwargs: Any) -> Any:
            return slime_losses.calculate_log_probs_and_entropy(Call(own, args, kwargs))

        own, function = self.calculate, self.get_log_probs_and_entropy
        options = {"args": Namespace(rollout_temperature=temperature, **args), **batch_of(batch or {})}
        with mock.patch.object(self, "calculate", calculate):
            scores: Scores = slime_losses.get_log_probs_and_entropy(Call(function, (logits,), options))
        return scores


def batch_of(changes: dict[str, Any]) -> dict[str, Any]:
    batch = {"unconcat_tokens": TOKENS, "total_lengths": TOTALS, "response_lengths": RESPONSES}
    return {**batch, "with_entropy": True, **changes}


def compare(scores: Scores, expected: Scores, logits: Tensor) -> None:
    """Compare scores, and the gradients of the logits."""

    def gradient(scores: Scores) -> Tensor:
        values = torch.cat([*scores["log_probs"], *scores["entropy"]])
        return torch.autograd.grad((torch.linspace(0.5, 1.5, len(values)) * values).sum(), logits)[0]

    assert all(
        type(value) is Tensor and value.requires_grad for values in scores.values() for value in values
    )
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient(scores), gradient(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("is_padded", [False, True])
def test_responses_have_the_scores_and_the_gradient_of_the_framework(
    is_padded: bool, temperature: float
) -> None:
    logits, framework = model_logits(*((3, 12, V) if is_padded else (1, 30, V))), Framework()
    batch, args = ({"max_seq_lens": [12] * 3}, {"qkv_format": "bshd"}) if is_padded else ({}, {})
    for calls in (1, 2):
        expected = framework.unpatched(logits, temperature, **batch)
        compare(framework.patched(logits, temperature, batch, **args), expected, logits)
        assert framework.passes == calls + 1  # for each reference, and once when it was tried


def test_scores_in_inference_mode() -> None:
    logits, framework = model_logits(1, 30, V), Framework()
    with torch.inference_mode():
        scores = framework.patched(logits.detach())
    assert not any(value.requires_grad for value in (*scores["log_probs"], *scores["entropy"]))
    torch.testing.assert_close(
        torch.cat(scores["log_probs"]), torch.cat(framework.unpatched(logits.detach())["log_probs"])
    )


@pytest.mark.parametrize(("loss_type", "requires_grad"), [("policy_loss", False), ("custom_loss", True)])
def test_an_entropy_that_is_a_metric_has_no_gradient(loss_type: str, requires_grad: bool) -> None:
    """A custom loss may use it whatever its coefficient is."""
    framework = Framework()
    scores = framework.patched(model_logits(1, 30, V), loss_type=loss_type, entropy_coef=0)
    assert {entropy.requires_grad for entropy in scores["entropy"]} == {requires_grad}
    assert framework.passes == 1


def test_a_kernel_that_an_option_selects_runs_on_logits() -> None:
    """It does what the patch does, and reads memory, which deferred logits do not have."""
    kinds: list[type] = []

    @functools.wraps(naive)
    def kernel(logits: Tensor, *args: Any, **options: Any) -> Any:
        kinds.append(type(logits))
        return naive(logits, *args, **options)

    framework = Framework(kernel)
    hidden, weight = model_logits(1, 30, 4), torch.randn(V, 4)
    expected = framework.unpatched(hidden @ weight.T)
    with (
        mock.patch.dict(own_options),
        mock.patch.object(slime_losses, "calculate_log_probs_and_entropy", lambda call: call()),
    ):
        scores = framework.patched(deferred_logits(hidden, weight), log_probs_backend="fused")
        [site] = [s for s in PATCHES["lean-loss"].sites if s.target == f"{LOSS}.get_log_probs_and_entropy"]
        assert site.detail is not None and site.detail() == "not needed with --log-probs-backend fused"
    torch.testing.assert_close(scores, expected)
    assert kinds == [Tensor] * 6 and framework.passes == 2  # of two passes over three samples


def test_an_argument_that_is_not_known_is_left_to_the_framework() -> None:
    def capped(
        logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool, soft_cap: Any = None
    ) -> Any:
        logits = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
        return naive(logits, tokens, tp_group, with_entropy)

    logits = model_logits(1, 30, V)
    for soft_cap, passes in ((3.0, 3), (None, 2)):
        framework = Framework(capped, soft_cap=soft_cap)
        compare(framework.patched(logits), framework.unpatched(logits), logits)
        assert framework.passes == passes


def overwritten(logits: Tensor) -> Tensor:
    logits[:, 3:] = -50.0
    return logits


#: What a fork may do that changes values or gradients.
FORKS: dict[str, dict[str, Change]] = {
    "scaled rows": {"rows": lambda rows: rows * 1.25},
    "rows that are written to": {"rows": lambda rows: rows.div_(2)},
    "one more column": {"rows": lambda rows: torch.cat([rows, rows[:, :1]], dim=1)},
    "a gradient alone": {"rows": lambda rows: rows.detach() + 0 * rows},
    "logits that are written to": {"logits": overwritten},
    "clamped": {"logits": lambda logits: logits.clamp(min=-50)},
    "an error with other rows": {"logits": lambda logits: logits if len(logits) == 31 else logits[99]},
    "clamped scores": {"finish": lambda x: x.clamp(min=-3)},
    "longer scores": {"finish": lambda x: F.pad(x.float(), (1, 0)).mul_(2)},
}


@pytest.mark.parametrize("fork", FORKS)
def test_a_fork_gets_what_it_computes(fork: str, caplog: pytest.LogCaptureFixture) -> None:
    leaf, framework = model_logits(1, 31, V).detach().requires_grad_(), Framework(**FORKS[fork])
    expected, scores = framework.unpatched(leaf * 1), framework.patched(leaf * 1)
    assert framework.passes == 3
    assert "get_log_probs_and_entropy alone, since on a small microbatch at temperature 0.7 it" in caplog.text
    compare(scores, expected, leaf)


def test_a_temperature_of_0_is_named(caplog: pytest.LogCaptureFixture) -> None:
    framework = Framework()
    framework.patched(model_logits(1, 31, V), 0.0)
    assert framework.passes == 2  # also after the small microbatch
    assert "on a small microbatch at temperature 0 it" in caplog.text and "Set another" in caplog.text


def test_lengths_that_no_layout_has_are_left_to_the_framework() -> None:
    """A response without a prompt has a first token that no row predicts."""
    logits, framework, batch = model_logits(1, 30, V), Framework(), {"response_lengths": [4, 0, 8]}
    compare(framework.patched(logits, batch=batch), framework.unpatched(logits, **batch), logits)
    assert framework.passes == 2


def test_a_function_that_is_wrapped_runs() -> None:
    """What wraps it may be another patch, which would be left out."""
    framework = Framework()
    own = framework.get_log_probs_and_entropy

    @functools.wraps(own)
    def halved(*args: Any, **kwargs: Any) -> Scores:
        return {name: [x / 2 for x in values] for name, values in own(*args, **kwargs).items()}

    vars(framework)["get_log_probs_and_entropy"] = halved
    logits = model_logits(1, 30, V)
    compare(framework.patched(logits), framework.unpatched(logits), logits)


def test_a_sample_may_be_written_to() -> None:
    scores = Framework().patched(model_logits(1, 30, V))
    scores["log_probs"][0].mul_(2)
    torch.cat(scores["log_probs"]).sum().backward()


LARGE = {
    "unconcat_tokens": [torch.arange(33)] * 8,
    "total_lengths": [33] * 8,
    "response_lengths": [32] * 8,
    "with_entropy": False,
}


def test_all_samples_cost_one_gradient() -> None:
    logits, framework = model_logits(1, 264, 8192), Framework()

    def peak(score: Callable[..., Scores], **options: Any) -> int:
        def gradient() -> Tensor:
            return torch.autograd.grad(torch.cat(score(logits, **options)["log_probs"]).sum(), logits)[0]

        return live_bytes(gradient).peak

    assert peak(framework.unpatched, **LARGE) > 2 * logits.nbytes
    assert peak(framework.patched, batch=LARGE) < 1.2 * logits.nbytes


def test_all_samples_of_deferred_logits_cost_one_gradient_of_the_weight() -> None:
    hidden, weight = torch.randn(1, 264, 16), torch.randn(16384, 16, requires_grad=True)
    stock, other = Framework(), Framework(rows=lambda rows: rows[:], finish=lambda x: x * 1.001)

    def gradient(framework: Framework) -> Tensor:
        logits = deferred_logits(hidden, weight, tile_bytes=1 << 18)
        log_probs = framework.patched(logits, batch=LARGE)["log_probs"]
        return torch.autograd.grad(torch.cat(log_probs).sum(), weight)[0]

    torch.testing.assert_close(1.001 * gradient(stock), gradient(other))
    assert live_bytes(lambda: gradient(other)).peak > 2 * weight.nbytes
    assert live_bytes(lambda: gradient(stock)).peak < 1.8 * weight.nbytes
