"""Log-probabilities and entropies by conventions of frameworks, then of samples that are scored one by one.

All-gather context parallelism is tested on slime's stand-in.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import log_probs as frameworks
from megatron_rl_patches.frameworks import slime_losses
from megatron_rl_patches.losses import deferred_logits
from tests.references.dense import dense_log_probs_and_entropy
from tests.references.live_bytes import live_bytes


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


# --- samples that are scored one by one, with one gradient

T, V = 24, 11
TOKENS = torch.arange(T) % V
Scores = dict[str, list[Tensor]]
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


def overlapping(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Of two pieces, as in zigzag, of which the next sample has a part."""
    assert logits.dtype == torch.float32 and logits.nelement() * logits.element_size() < 1e9
    logits = logits[0] if temperature == 1.0 else logits[0] / temperature
    yield torch.cat([logits[0:3], logits[6:9]], dim=0), TOKENS[:6]
    yield logits[4:9], TOKENS[:5]


def reused_buffer(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """A buffer of tokens may be filled again for each sample."""
    buffer = torch.empty(4, dtype=torch.int64)
    for start in (0, 5, 11):
        yield logits[0, start : start + 4] / temperature, buffer.copy_(TOKENS[start : start + 4])


LAYOUTS = (packed, padded, overlapping, reused_buffer)


def naive(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> tuple[Tensor, Any]:
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(1, tokens[: len(logits), None].clone())  # a layout fills its buffer again
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
    """``get_log_probs_and_entropy`` on top of a ``calculate``, as the frameworks have them.

    Attributes:
        passes: how often it has gone over the samples.
        calls: how often its own ``calculate`` has run while it was patched.
    """

    def __init__(
        self,
        layout: Layout,
        finish: Callable[[Tensor], Tensor] = lambda x: x,
        calculate: Callable[..., tuple[Tensor, Any]] = naive,
        **passed: Any,
    ) -> None:
        self.layout, self.finish, self._calculate, self.passed = layout, finish, calculate, passed
        self.passes = self.calls = 0

    def score(self, calculate: Callable[..., Any], logits: Tensor, args: Namespace) -> Scores:
        self.passes += 1
        log_probs, entropies = [], []
        for chunk, tokens in self.layout(logits, args.rollout_temperature):
            assert chunk.size(-1) >= V and len(chunk.shape) == 2
            log_prob, entropy = calculate(chunk, tokens, None, with_entropy=True, **self.passed)
            log_probs.append(self.finish(log_prob.squeeze(-1)))
            entropies.append(entropy)
        return {"log_probs": log_probs, "entropy": entropies}

    def unpatched(self, logits: Tensor, temperature: float = 0.7) -> Scores:
        return self.score(self._calculate, logits, Namespace(rollout_temperature=temperature))

    def patched(self, logits: Tensor, temperature: float = 0.7, **args: Any) -> Scores:
        @functools.wraps(self._calculate)
        def own(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._calculate(*args, **kwargs)

        def calculate(*args: Any, **kwargs: Any) -> Any:
            return slime_losses.calculate_log_probs_and_entropy(Call(own, args, kwargs))

        def get_log_probs_and_entropy(logits: Tensor, *, args: Namespace) -> Any:
            return self.score(calculate, logits, args)

        options = {"args": Namespace(rollout_temperature=temperature, **args)}
        function = slime_losses.get_log_probs_and_entropy
        return function(Call(get_log_probs_and_entropy, (logits,), options))  # type: ignore[no-any-return]


def gradient_of(scores: Scores, logits: Tensor, entropy_grad: bool = True) -> Tensor:
    names = ("log_probs", "entropy") if entropy_grad else ("log_probs",)
    values = torch.cat([value for name in names for value in scores[name]])
    [gradient] = torch.autograd.grad((torch.linspace(0.5, 1.5, len(values)) * values).sum(), logits)
    return gradient


def compare(
    found: Scores, expected: Scores, logits: Tensor, check_dtype: bool = True, **tolerance: Any
) -> None:
    """Compare scores, and the gradients of the logits."""
    for name in ("log_probs", "entropy"):
        assert all(type(value) is Tensor and value.requires_grad for value in found[name])
        torch.testing.assert_close(found[name], expected[name], check_dtype=check_dtype, **tolerance)
    torch.testing.assert_close(gradient_of(found, logits), gradient_of(expected, logits), **tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_have_the_scores_and_the_gradient_of_the_framework(
    layout: Layout, temperature: float
) -> None:
    shape = (2, T // 2, V) if layout is padded else (1, T, V)
    logits, framework = model_logits(*shape), Framework(layout)
    expected = framework.unpatched(logits, temperature)
    scores = framework.patched(logits, temperature)
    assert (framework.passes, framework.calls) == (2, 0)
    compare(scores, expected, logits)


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
    logits, framework = model_logits(1, T, V), Framework(packed, **passed)
    scores = framework.patched(logits, loss_type=loss_type, entropy_coef=entropy_coef)
    assert {entropy.requires_grad for entropy in scores["entropy"]} == {requires_grad}
    assert framework.calls == 0
    expected = gradient_of(framework.unpatched(logits), logits, entropy_grad=requires_grad)
    torch.testing.assert_close(gradient_of(scores, logits, entropy_grad=requires_grad), expected)


def test_an_entropy_has_the_dtype_that_the_release_computes_it_in() -> None:
    logits, tokens = model_logits(3, V, dtype=torch.bfloat16), torch.arange(3)
    releases = (
        (naive, {}, torch.bfloat16),
        (with_need_entropy_grad, {"need_entropy_grad": True}, torch.float32),
    )
    for calculate, options, dtype in releases:
        call = Call(calculate, (logits, tokens, None, True), options)  # type: ignore[arg-type]
        log_probs, entropy = slime_losses.calculate_log_probs_and_entropy(call)
        assert (log_probs.shape, log_probs.dtype) == ((3, 1), torch.float32)
        assert (entropy.shape, entropy.dtype) == ((3,), dtype)


def test_a_keep_mask() -> None:
    def whole(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
        yield logits.squeeze(0) / temperature, TOKENS

    logits = model_logits(1, T, V)
    mask = torch.rand(T, V, generator=torch.Generator().manual_seed(1)) > 0.4
    framework = Framework(whole, calculate=with_keep_mask, log_prob_keep_mask=mask)
    expected, scores = framework.unpatched(logits), framework.patched(logits)
    compare(scores, expected, logits)
    assert framework.calls == 0


def test_an_argument_that_is_not_known_is_left_to_the_framework() -> None:
    def capped(
        logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool, soft_cap: Any = None
    ) -> Any:
        logits = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
        return naive(logits, tokens, tp_group, with_entropy)

    logits = model_logits(1, T, V)
    for options, calls in (({"soft_cap": 3.0}, 3), ({"soft_cap": None}, 0)):
        framework = Framework(packed, calculate=capped, **options)
        expected, scores = framework.unpatched(logits), framework.patched(logits)
        compare(scores, expected, logits)
        assert framework.calls == calls


#: What a fork may do to the logits, or to a sample's slice of them, that changes values.
CHANGES = [
    "chunk = chunk * 1.25",
    "chunk = torch.tanh(chunk / 30) * 30",
    "chunk = chunk.to(torch.bfloat16)",
    "chunk = chunk.to(torch.bfloat16).float()",
    "chunk.div_(2)",
    "chunk = torch.cat([chunk, chunk[:, :1]], dim=1)",
    "chunk = chunk / torch.linspace(1, 2, 11)",
    "chunk = chunk.detach() + 0 * chunk",
    "logits = logits.mul(2)",
    "logits = logits.squeeze(0).to(torch.bfloat16)",
    "logits[0:4].div_(7)",
    "logits[:, 3:] = -50.0",
    "logits *= 2",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_framework_that_changes_logits_gets_what_it_computes(change: str) -> None:
    def changing(logits: Tensor, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
        scope: dict[str, Any] = {"torch": torch, "logits": logits.squeeze(0)}
        if change.startswith("logits"):
            exec(change, scope)
        logits = scope["logits"].div(temperature)
        for start, length in ((0, 4), (4, 0), (4, 5)):
            scope["chunk"] = logits[start : start + length]
            if change.startswith("chunk"):
                exec(change, scope)
            yield scope["chunk"], TOKENS[start : start + length]

    leaf = model_logits(1, 9, V).detach().requires_grad_()
    framework = Framework(changing, finish=lambda x: x.float())
    expected, scores = framework.unpatched(leaf * 1), framework.patched(leaf * 1)
    tolerance = {"rtol": 0.05, "atol": 0.05} if "bfloat16" in change else {"rtol": 1e-5, "atol": 1e-5}
    compare(scores, expected, leaf, "bfloat16" not in change, **tolerance)


@pytest.mark.parametrize("layout", [packed, overlapping])
def test_values_are_used_between_two_samples(layout: Layout) -> None:
    """A clipped score, a padded one: the framework computes with what it has just got."""
    logits = model_logits(1, T, V)
    framework = Framework(layout, finish=lambda x: F.pad(x.clamp(min=-3).float(), (1, 0)).mul_(2))
    expected, scores = framework.unpatched(logits), framework.patched(logits)
    compare(scores, expected, logits)


def score_of(logits: Tensor, tokens: Tensor) -> Tensor:
    call = Call(naive, (logits, tokens, None))
    return slime_losses.calculate_log_probs_and_entropy(call)[0].squeeze(-1)  # type: ignore[no-any-return]


def in_framework(function: Callable[[Tensor], Any], logits: Tensor) -> Any:
    """Run a function as a framework's ``get_log_probs_and_entropy``."""
    call = Call(lambda logits, args: function(logits), (logits, Namespace()))
    return slime_losses.get_log_probs_and_entropy(call)


def one_by_one(logits: Tensor) -> Tensor:
    starts = range(0, 256, 32)
    return torch.cat([score_of(logits[0, start : start + 30], torch.arange(30)) for start in starts])


def with_one_backward(logits: Tensor) -> Tensor:
    return in_framework(one_by_one, logits)


def test_all_samples_cost_one_gradient() -> None:
    logits = model_logits(1, 256, 8192)

    def peak(score: Callable[[Tensor], Tensor]) -> int:
        return live_bytes(lambda: torch.autograd.grad(score(logits).sum(), logits)[0]).peak

    assert peak(one_by_one) > 2 * logits.nbytes
    assert peak(with_one_backward) < 1.2 * logits.nbytes


def test_all_samples_of_deferred_logits_cost_one_gradient_of_the_weight() -> None:
    hidden, weight = torch.randn(1, 256, 16), torch.randn(16384, 16, requires_grad=True)

    def gradient(score: Callable[[Tensor], Tensor]) -> Tensor:
        logits = deferred_logits(hidden, weight, tile_bytes=1 << 18)
        return torch.autograd.grad(score(logits).sum(), weight)[0]

    torch.testing.assert_close(gradient(with_one_backward), gradient(one_by_one))
    assert live_bytes(lambda: gradient(one_by_one)).peak > 2 * weight.nbytes
    assert live_bytes(lambda: gradient(with_one_backward)).peak < 1.8 * weight.nbytes


def test_code_that_reads_the_memory_itself_gets_the_logits() -> None:
    """An extension that takes the address finds none, which torch says with an error."""
    logits = model_logits(1, T, V).detach()

    def function(logits: Tensor) -> Tensor:
        torch._C._to_dlpack(logits)  # type: ignore[attr-defined]
        return score_of(logits[0, 1:5], TOKENS[:4])

    expected = logits[0, 1:5].log_softmax(-1).gather(1, TOKENS[:4, None])[:, 0]
    torch.testing.assert_close(in_framework(function, logits), expected)


def test_an_error_after_a_score_is_raised() -> None:
    """Another call would start collectives that other ranks have behind them."""
    calls = []

    def function(logits: Tensor) -> None:
        calls.append(score_of(logits[0], TOKENS))
        raise RuntimeError("on this rank only")

    with pytest.raises(RuntimeError, match="on this rank only"):
        in_framework(function, model_logits(1, T, V))
    assert len(calls) == 1
