"""Log-probabilities and entropies by conventions of frameworks, then of the responses of a microbatch.

Context parallelism is tested on slime's stand-in and on checkouts.
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
from torch.utils.checkpoint import checkpoint

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
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, with_entropy=True)
    assert entropies is not None
    expected = dense_log_probs_and_entropy(logits.view(6, 11), tokens.view(6))
    torch.testing.assert_close((log_probs, entropies), tuple(x.view(2, 3).float() for x in expected))
    assert frameworks.log_probs_and_entropy(logits, tokens, None)[1] is None


def test_tokens_outside_of_the_vocabulary_have_no_share_in_anything() -> None:
    logits = model_logits(4, 11)
    tokens = torch.tensor([3, -100, 11, -1])
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, with_entropy=True)
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


# --- the responses of a microbatch

V = 11
TOTALS, RESPONSES = [9, 6, 8], [4, 0, 7]
TOKENS = [torch.arange(length) % V for length in TOTALS]
Scores = dict[str, list[Tensor]]


def get_parallel_state() -> Namespace:
    """As in miles, whose groups are its own."""
    alone = Namespace(rank=0, size=1, group=None)
    return Namespace(cp=alone, tp=alone)


def naive(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> tuple[Tensor, Any]:
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(1, tokens[: len(logits), None])
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None


def with_need_entropy_grad(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, need_entropy_grad: bool = False
) -> tuple[Tensor, Any]:
    log_probs, entropy = naive(logits, tokens, tp_group, with_entropy)
    return log_probs, entropy if need_entropy_grad else entropy.detach()


def with_keep_mask(
    logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False, log_prob_keep_mask: Any = None
) -> tuple[Tensor, Any]:
    kept = logits.masked_fill(~log_prob_keep_mask.scatter(1, tokens[:, None], True), float("-inf"))
    return naive(kept, tokens, tp_group)[0], naive(logits, tokens, tp_group, with_entropy)[1]


class Framework:
    """``get_log_probs_and_entropy`` on top of a ``calculate``, sample by sample or all rows at once.

    Attributes:
        passes: how often it has gone over a microbatch.
        calls: how often its own ``calculate`` has run while it was patched.
    """

    def __init__(
        self,
        calculate: Callable[..., tuple[Tensor, Any]] = naive,
        at_once: bool = False,
        change: str = "",
        finish: Callable[[Tensor], Tensor] = lambda x: x,
        **passed: Any,
    ) -> None:
        self._calculate, self._at_once, self._change, self._finish = calculate, at_once, change, finish
        self.passed, self.passes, self.calls = passed, 0, 0
        #: One function, as a framework has one.
        self.function = self._function()

    def unpatched(self, logits: Tensor, temperature: float = 0.7, **batch: Any) -> Scores:
        return self._score(
            self._calculate, logits, Namespace(rollout_temperature=temperature), **batch_of(batch)
        )

    def patched(self, logits: Tensor, temperature: float = 0.7, batch: Any = None, **args: Any) -> Scores:
        options = {"args": Namespace(rollout_temperature=temperature, **args), **batch_of(batch or {})}
        function = slime_losses.get_log_probs_and_entropy
        return function(Call(self.function, (logits,), options))  # type: ignore[no-any-return]

    def _function(self) -> Callable[..., Scores]:
        @functools.wraps(self._calculate)
        def own(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._calculate(*args, **kwargs)

        def calculate(*args: Any, **kwargs: Any) -> Any:
            return slime_losses.calculate_log_probs_and_entropy(Call(own, args, kwargs))

        def get_log_probs_and_entropy(
            logits: Tensor,
            *,
            args: Namespace,
            unconcat_tokens: list[Tensor],
            total_lengths: list[int],
            response_lengths: list[int],
            with_entropy: bool = False,
            max_seq_lens: list[int] | None = None,
            top_p: float | None = None,
        ) -> Scores:
            batch = (unconcat_tokens, total_lengths, response_lengths, with_entropy, max_seq_lens)
            return self._score(calculate, logits, args, *batch)

        return get_log_probs_and_entropy

    def _score(
        self,
        calculate: Callable[..., Any],
        logits: Tensor,
        args: Namespace,
        unconcat_tokens: list[Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool,
        max_seq_lens: list[int] | None = None,
    ) -> Scores:
        self.passes += 1
        scope: dict[str, Any] = {"torch": torch, "logits": logits.reshape(-1, logits.size(-1))}
        if self._change.startswith("logits"):
            exec(self._change, scope)
        logits = scope["logits"].div(args.rollout_temperature)
        starts = torch.tensor([0, *(max_seq_lens or total_lengths)[:-1]]).cumsum(0).tolist()
        ends = [start + total for start, total in zip(starts, total_lengths, strict=True)]
        samples = list(zip(ends, response_lengths, unconcat_tokens, strict=True))
        log_probs, entropies = [], []
        if self._at_once:
            shifted = torch.zeros(len(logits), dtype=torch.int64)
            for end, length, tokens in samples:
                shifted[end - length - 1 : end - 1] = tokens[len(tokens) - length :]
            log_prob, entropy = calculate(logits, shifted, None, with_entropy=with_entropy, **self.passed)
        for end, length, tokens in samples:
            rows = slice(end - length - 1, end - 1)
            if self._at_once:
                of_sample = log_prob[rows], entropy[rows] if with_entropy else None
            else:
                scope["chunk"] = logits[rows]
                if self._change.startswith("chunk"):
                    exec(self._change, scope)
                passed = {"with_entropy": with_entropy, **self.passed}
                of_sample = calculate(scope["chunk"], tokens[-length:], None, **passed)
            log_probs.append(self._finish(of_sample[0].squeeze(-1)))
            entropies.append(of_sample[1])
        return {"log_probs": log_probs, **({"entropy": entropies} if with_entropy else {})}


def batch_of(changes: dict[str, Any]) -> dict[str, Any]:
    batch = {"unconcat_tokens": TOKENS, "total_lengths": TOTALS, "response_lengths": RESPONSES}
    return {**batch, "with_entropy": True, **changes}


def gradient_of(scores: Scores, logits: Tensor, entropy_grad: bool = True) -> Tensor:
    names = ("log_probs", "entropy") if entropy_grad else ("log_probs",)
    values = torch.cat([value for name in names for value in scores[name]])
    [gradient] = torch.autograd.grad((torch.linspace(0.5, 1.5, len(values)) * values).sum(), logits)
    return gradient


def compare(
    scores: Scores, expected: Scores, logits: Tensor, check_dtype: bool = True, **tolerance: Any
) -> None:
    """Compare scores, and the gradients of the logits."""
    for name in ("log_probs", "entropy"):
        assert all(type(value) is Tensor and value.requires_grad for value in scores[name])
        torch.testing.assert_close(scores[name], expected[name], check_dtype=check_dtype, **tolerance)
    torch.testing.assert_close(gradient_of(scores, logits), gradient_of(expected, logits), **tolerance)


PADDED = {"max_seq_lens": [12] * 3}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch", [{}, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("at_once", [False, True])
def test_responses_have_the_scores_and_the_gradient_of_the_framework(
    at_once: bool, batch: dict[str, Any], temperature: float
) -> None:
    logits, framework = model_logits(*((3, 12, V) if batch else (1, 30, V))), Framework(at_once=at_once)
    args = {"qkv_format": "bshd"} if batch else {}
    for calls in (1, 2):
        expected = framework.unpatched(logits, temperature, **batch)
        compare(framework.patched(logits, temperature, batch, **args), expected, logits)
        # Its own code has run for each reference, and once when it was tried.
        assert (framework.passes, framework.calls) == (calls + 1, 0)


def test_scores_without_grad_mode_and_of_a_recomputed_loss() -> None:
    logits, framework = model_logits(1, 30, V), Framework()
    expected = framework.unpatched(logits)
    with torch.inference_mode():
        scores = framework.patched(logits.detach(), loss_type="in inference mode")
    assert not any(value.requires_grad for value in (*scores["log_probs"], *scores["entropy"]))
    torch.testing.assert_close(torch.cat(scores["log_probs"]), torch.cat(expected["log_probs"]).detach())

    def loss(logits: Tensor) -> Tensor:
        return torch.cat(framework.patched(logits, loss_type="recomputed")["log_probs"]).sum()

    # The framework's function is tried in the first pass, and not in the second one.
    [gradient] = torch.autograd.grad(checkpoint(loss, logits, use_reentrant=False), logits)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(torch.cat(expected["log_probs"]).sum(), logits)[0]
    )


@pytest.mark.parametrize(
    ("entropy_coef", "loss_type", "passed", "requires_grad"),
    [
        (0.1, "policy_loss", {}, True),
        (0, "policy_loss", {}, False),
        (0, "custom_loss", {}, True),
        # Releases that say themselves whether the entropy has a gradient.
        (0.1, "policy_loss", {"calculate": with_need_entropy_grad, "need_entropy_grad": True}, True),
        (0.1, "policy_loss", {"calculate": with_need_entropy_grad, "need_entropy_grad": False}, False),
    ],
)
def test_an_entropy_that_is_a_metric_has_no_gradient(
    entropy_coef: float, loss_type: str, passed: dict[str, Any], requires_grad: bool
) -> None:
    logits, framework = model_logits(1, 30, V), Framework(at_once=True, **passed)
    scores = framework.patched(logits, loss_type=loss_type, entropy_coef=entropy_coef)
    assert {entropy.requires_grad for entropy in scores["entropy"]} == {requires_grad}
    assert (framework.passes, framework.calls) == (1, 0)
    expected = gradient_of(framework.unpatched(logits), logits, entropy_grad=requires_grad)
    torch.testing.assert_close(gradient_of(scores, logits, entropy_grad=requires_grad), expected)


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


def test_a_keep_mask() -> None:
    logits = model_logits(1, 30, V)
    mask = torch.rand(30, V, generator=torch.Generator().manual_seed(1)) > 0.4
    framework = Framework(with_keep_mask, at_once=True, log_prob_keep_mask=mask)
    expected, scores = framework.unpatched(logits), framework.patched(logits, batch={"top_p": 0.9})
    compare(scores, expected, logits)
    assert (framework.passes, framework.calls) == (2, 0)


def with_sampling_mask(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    sampling_mask: Any = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Any]:
    """As in miles since September 2026, whose stand-in in ``tests/frameworks`` shows the values."""
    scaled = logits.to(torch.float32, copy=True).div_(temperature if temperature > 0 else 1.0)
    kept = scaled.clone()
    if sampling_mask is not None:
        kept = kept.masked_fill_(~sampling_mask, float("-inf"))
    return naive(kept, tokens, tp_group)[0], naive(scaled, tokens, tp_group, with_entropy)[1]


def test_a_sampling_mask_costs_itself_and_one_gradient() -> None:
    logits, tokens = model_logits(64, 8192), torch.arange(64)
    mask = (torch.rand(logits.shape) > 0.5).scatter(1, tokens[:, None], True)

    def peak(calculate: Callable[..., Any]) -> int:
        def gradient() -> Tensor:
            log_probs, _ = calculate(logits, tokens, None, sampling_mask=mask)
            return torch.autograd.grad(log_probs.sum(), logits)[0]

        return live_bytes(gradient).peak

    def patched(*args: Any, **options: Any) -> Any:
        return slime_losses.calculate_log_probs_and_entropy(Call(with_sampling_mask, args, options))

    assert peak(with_sampling_mask) > 2.5 * logits.nbytes
    assert peak(patched) < 1.3 * logits.nbytes


@pytest.mark.parametrize("backend", ["fused", "triton"])
def test_a_kernel_that_an_option_selects_runs_on_logits(backend: str) -> None:
    """It does what the patch does, and reads memory, which deferred logits do not have."""
    kinds: list[type] = []

    def kernel(logits: Tensor, *args: Any, **options: Any) -> Any:
        kinds.append(type(logits))
        return with_need_entropy_grad(logits, *args, **options)

    framework = Framework(functools.wraps(with_need_entropy_grad)(kernel), need_entropy_grad=True)
    hidden, weight = model_logits(1, 30, 4), torch.randn(V, 4)
    expected = framework.unpatched(hidden @ weight.T)
    with (
        mock.patch.dict(own_options),
        mock.patch.object(slime_losses, "calculate_log_probs_and_entropy", lambda call: call()),
    ):
        scores = framework.patched(deferred_logits(hidden, weight), log_probs_backend=backend)
        [site] = [s for s in PATCHES["lean-loss"].sites if s.target == f"{LOSS}.get_log_probs_and_entropy"]
        assert site.detail is not None and site.detail() == f"not needed with --log-probs-backend {backend}"
    torch.testing.assert_close(scores, expected)
    assert kinds == [Tensor] * 6 and framework.passes == 2  # of two passes over three samples


def test_an_argument_that_is_not_known_is_left_to_the_framework() -> None:
    def capped(
        logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool, soft_cap: Any = None
    ) -> Any:
        logits = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
        return naive(logits, tokens, tp_group, with_entropy)

    logits = model_logits(1, 30, V)
    for options, passes in (({"soft_cap": 3.0}, 3), ({"soft_cap": None}, 2)):
        framework = Framework(capped, at_once=True, **options)
        expected, scores = framework.unpatched(logits), framework.patched(logits)
        compare(scores, expected, logits)
        assert (framework.passes, framework.calls) == (passes, passes - 2 + (passes == 3))


#: What a fork may do to the logits, or to a sample's slice of them, that changes values or gradients.
CHANGES = [
    "chunk = chunk * 1.25",
    "chunk = torch.tanh(chunk / 50) * 50",
    "chunk = chunk.to(torch.bfloat16).float()",
    "chunk.div_(2)",
    "chunk = torch.cat([chunk, chunk[:, :1]], dim=1)",
    "chunk = chunk / torch.linspace(1, 2, 11)",
    "chunk = chunk.detach() + 0 * chunk",
    "logits = logits.mul(2)",
    "logits[0:8].div_(7)",
    "logits[:, 3:] = -50.0",
    "logits *= 2",
    "logits = logits.clamp(min=-50)",
    "logits = logits if len(logits) == 31 else logits[99]",  # an error with other rows
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_framework_that_changes_logits_gets_what_it_computes(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    leaf = model_logits(1, 31, V).detach().requires_grad_()
    framework = Framework(change=change, finish=lambda x: x.float())
    expected, scores = framework.unpatched(leaf * 1), framework.patched(leaf * 1)
    assert framework.passes == 3
    assert "get_log_probs_and_entropy alone, since on a small microbatch at temperature 0.7 it" in caplog.text
    tolerance = {"rtol": 0.05, "atol": 0.05} if "bfloat16" in change else {"rtol": 1e-5, "atol": 1e-5}
    compare(scores, expected, leaf, **tolerance)


def test_a_temperature_of_0_is_named(caplog: pytest.LogCaptureFixture) -> None:
    framework = Framework()
    framework.patched(model_logits(1, 31, V), 0.0)
    assert framework.passes == 2  # also after the small microbatch
    assert "on a small microbatch at temperature 0 it" in caplog.text and "Set another" in caplog.text


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({"finish": lambda x: x.clamp(min=-3)}, {}),
        ({"finish": lambda x: F.pad(x.float(), (1, 0)).mul_(2)}, {}),
        # A response without a prompt, whose first token no row predicts: no layout has such lengths.
        ({"at_once": True}, {"response_lengths": [4, 0, 8]}),
    ],
)
def test_a_framework_with_other_scores_or_lengths_gets_what_it_computes(
    options: dict[str, Any], batch: dict[str, Any]
) -> None:
    logits, framework = model_logits(1, 30, V), Framework(**options)
    expected, scores = framework.unpatched(logits, **batch), framework.patched(logits, batch=batch)
    compare(scores, expected, logits)
    assert framework.passes == (2 if batch else 3)


def test_a_function_that_is_wrapped_runs() -> None:
    """What wraps it may be another patch, which would be left out."""
    logits, framework = model_logits(1, 30, V), Framework()

    @functools.wraps(framework.function)
    def halved(*args: Any, **kwargs: Any) -> Scores:
        return {name: [x / 2 for x in values] for name, values in stock(*args, **kwargs).items()}

    stock, framework.function = framework.function, halved
    expected, scores = framework.unpatched(logits), framework.patched(logits)
    torch.testing.assert_close(torch.cat(scores["entropy"]), torch.cat(expected["entropy"]) / 2)


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_all_samples_cost_one_gradient(temperature: float) -> None:
    logits, framework = model_logits(1, 264, 8192), Framework()

    def peak(score: Callable[..., Scores], *args: Any, **options: Any) -> int:
        def gradient() -> Tensor:
            scores = score(logits, temperature, *args, **options)
            return torch.autograd.grad(torch.cat(scores["log_probs"]).sum(), logits)[0]

        return live_bytes(gradient).peak

    assert peak(framework.unpatched, **LARGE) > 2 * logits.nbytes
    assert peak(framework.patched, LARGE) < 1.2 * logits.nbytes


def test_all_samples_of_deferred_logits_cost_one_gradient_of_the_weight() -> None:
    hidden, weight = torch.randn(1, 264, 16), torch.randn(16384, 16, requires_grad=True)
    stock, other = Framework(), Framework(change="chunk = chunk[:]", finish=lambda x: x * 1.001)

    def gradient(framework: Framework) -> Tensor:
        logits = deferred_logits(hidden, weight, tile_bytes=1 << 18)
        log_probs = framework.patched(logits, batch=LARGE)["log_probs"]
        return torch.autograd.grad(torch.cat(log_probs).sum(), weight)[0]

    torch.testing.assert_close(1.001 * gradient(stock), gradient(other))
    assert live_bytes(lambda: gradient(other)).peak > 2 * weight.nbytes
    assert live_bytes(lambda: gradient(stock)).peak < 1.8 * weight.nbytes
