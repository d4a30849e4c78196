"""Log-probabilities and entropies by conventions of frameworks.

Those of the responses of a microbatch are tested in ``tests/frameworks``.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import log_probs as frameworks
from megatron_rl_patches.frameworks import slime_losses
from tests.references.dense import dense_log_probs_and_entropy
from tests.references.live_bytes import live_bytes

V = 11


def model_logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output of some operation, as a model's are."""
    leaf = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return leaf.to(dtype).requires_grad_() * 1


def test_scores_have_the_shape_of_the_tokens() -> None:
    logits, tokens = model_logits(2, 3, V), torch.arange(6).view(2, 3)
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, entropy_grad=True)
    assert entropies is not None
    expected = dense_log_probs_and_entropy(logits.view(6, V), tokens.view(6))
    torch.testing.assert_close((log_probs, entropies), tuple(x.view(2, 3).float() for x in expected))
    assert frameworks.log_probs_and_entropy(logits, tokens, None)[1] is None


def test_tokens_outside_of_the_vocabulary_have_no_share_in_anything() -> None:
    logits = model_logits(4, V)
    tokens = torch.tensor([3, -100, 11, -1])
    log_probs, entropies = frameworks.log_probs_and_entropy(logits, tokens, None, entropy_grad=True)
    assert entropies is not None
    assert log_probs[1:].tolist() == entropies[1:].tolist() == [0.0] * 3
    [gradient] = torch.autograd.grad((log_probs + entropies).sum(), logits)
    assert gradient[0].any() and not gradient[1:].any()


@pytest.mark.parametrize("case", ["float32", "bfloat16", "a leaf", "a part", "has an entropy"])
def test_the_gradient_goes_into_float32_logits_that_nobody_else_needs(case: str) -> None:
    logits = model_logits(4, V, dtype=torch.bfloat16 if case == "bfloat16" else torch.float32)
    if case == "a leaf":
        logits = logits.detach().requires_grad_()
    elif case == "a part":
        logits = model_logits(6, V)[1:5]
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
    soft_cap: float | None = None,
) -> tuple[Tensor, Any]:
    """With ``true_on_policy`` miles keeps the bits of its engine; ``soft_cap`` is a fork's."""
    return torch.full((3, 1), 7.0), torch.full((3,), 7.0)


def naive(logits: Tensor, tokens: Tensor, tp_group: Any, with_entropy: bool = False) -> tuple[Tensor, Any]:
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(1, tokens[: len(logits), None])
    return log_probs, -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else None


@pytest.mark.parametrize(
    ("calculate", "options", "dtype", "requires_grad"),
    [
        (naive, {}, torch.bfloat16, True),
        (of_each_release, {"vocab_size": V}, torch.float32, True),
        (of_each_release, {"with_entropy_grad": False}, torch.float32, False),
        (of_each_release, {"entropy_requires_grad": False}, torch.float32, False),
        (of_each_release, {"need_entropy_grad": False}, torch.float32, False),
        (of_each_release, {"true_on_policy": True}, torch.float32, None),
        (of_each_release, {"soft_cap": 3.0}, torch.float32, None),
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


def test_a_fork_may_write_to_the_part_of_the_next_sample() -> None:
    leaf = torch.randn(6, V, requires_grad=True)
    logits = leaf * 1
    log_probs, _ = slime_losses.calculate_log_probs_and_entropy(
        Call(naive, (logits[:3], torch.arange(3), None))
    )
    logits.detach()[3:].zero_()
    log_probs.sum().backward()
    assert leaf.grad is not None and leaf.grad[:3].any() and not leaf.grad[3:].any()


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


def with_keep_mask(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    log_prob_keep_mask: Any = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Any]:
    """The name of slime."""
    return with_sampling_mask(logits, tokens, tp_group, with_entropy, log_prob_keep_mask, temperature)


@pytest.mark.parametrize("function", [with_sampling_mask, with_keep_mask])
def test_a_sampling_mask_costs_itself_and_one_gradient(function: Callable[..., Any]) -> None:
    logits, tokens = model_logits(64, 8192), torch.arange(64)
    mask = (torch.rand(logits.shape) > 0.5).scatter(1, tokens[:, None], True)

    def patched(*args: Any, **options: Any) -> Any:
        return slime_losses.calculate_log_probs_and_entropy(Call(function, args, options))

    def run(calculate: Callable[..., Any]) -> tuple[Tensor, ...]:
        scores = calculate(logits, tokens, None, True, mask, temperature=0.7)
        return *scores, torch.autograd.grad(sum(x.sum() for x in scores), logits)[0]

    def peak(calculate: Callable[..., Any]) -> int:
        def gradient() -> Tensor:
            log_probs, _ = calculate(logits, tokens, None, False, mask)
            return torch.autograd.grad(log_probs.sum(), logits)[0]

        return live_bytes(gradient).peak

    torch.testing.assert_close(run(patched), run(function))
    assert peak(function) > 2.5 * logits.nbytes
    assert peak(patched) < 1.3 * logits.nbytes


@pytest.mark.parametrize(("loss_type", "requires_grad"), [("policy_loss", False), ("custom_loss", True)])
def test_an_entropy_that_is_a_metric_has_no_gradient(loss_type: str, requires_grad: bool) -> None:
    """A custom loss may use it whatever its coefficient is."""

    def get_log_probs_and_entropy(logits: Tensor, args: Any) -> Any:
        return slime_losses.calculate_log_probs_and_entropy(
            Call(naive, (logits, torch.arange(3), None, True))
        )

    args = Namespace(loss_type=loss_type, entropy_coef=0)
    call = Call(get_log_probs_and_entropy, (model_logits(3, V), args))
    assert slime_losses.get_log_probs_and_entropy(call)[1].requires_grad is requires_grad
