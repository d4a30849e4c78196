"""Losses that backward computes again equal plain ones, keep nothing, and run whole on several ranks.

``test_table.py`` has those of deferred logits, also under hooks of saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks

from megatron_rl_patches.losses import checkpointed, deferred_logits, vocab_parallel_log_probs

LossFn = Callable[..., Any]


def logits_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 13, generator=generator), torch.randint(13, (6,), generator=generator)


def nll(logits: torch.Tensor, targets: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.nn.functional.cross_entropy(logits, targets)


def loss_and_grad(loss_fn: LossFn, logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # Logits of a model are no leaf: losses may overwrite them.
    leaf = logits.clone().requires_grad_()
    loss = loss_fn(leaf * 1, *args)
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(
    "options",
    [{}, {"early_stop": False, "preserve_rng_state": True}, {"early_stop": True}, {"enabled": False}],
)
def test_loss_and_gradient_are_those_of_the_plain_call(options: dict[str, Any]) -> None:
    logits, targets = logits_and_targets()
    expected = loss_and_grad(nll, logits, targets)
    assert all(map(torch.equal, expected, loss_and_grad(checkpointed(nll, **options), logits, targets)))


def test_nothing_is_kept_for_backward() -> None:
    logits, targets = logits_and_targets()
    logits.requires_grad_()
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in (logits.data_ptr(), targets.data_ptr()):
            saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        nll(logits, targets)
        assert sum(saved) >= logits.nbytes
        saved.clear()
        checkpointed(nll)(logits, targets)
    assert not sum(saved)  # torch 2.6 saves an empty tensor for each argument


def test_outputs_as_megatron_wants_them() -> None:
    logits, targets = logits_and_targets()

    def loss_func(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        loss = nll(output, targets)
        if non_loss_data:
            return {"targets": targets}
        return loss, torch.tensor(6, dtype=torch.int32), {"loss": loss.detach().clone(), "name": "nll"}

    recomputed = checkpointed(partial(loss_func))
    loss, num_tokens, metrics = recomputed(logits.requires_grad_())
    loss /= num_tokens  # in place, as the schedules do
    loss.backward()
    assert metrics["name"] == "nll"
    assert torch.equal(metrics["loss"], nll(logits, targets))
    assert torch.allclose(6 * logits.grad, torch.autograd.grad(nll(logits, targets), logits)[0])
    assert recomputed(logits, non_loss_data=True) == {"targets": targets}


def test_keyword_arguments_reach_the_loss_and_nobody_else() -> None:
    @checkpointed
    def loss_fn(logits: torch.Tensor, *, debug: float, early_stop: float) -> torch.Tensor:
        """Its docstring."""
        return (logits * debug * early_stop).sum()

    logits = torch.ones(3, requires_grad=True)
    loss_fn(logits, debug=2.0, early_stop=3.0).backward()
    assert logits.grad.tolist() == [6.0] * 3
    assert (loss_fn.__name__, loss_fn.__doc__) == ("loss_fn", "Its docstring.")
    # No overhead where there is nothing to recompute.
    logits, targets = logits_and_targets()
    with mock.patch("megatron_rl_patches.losses.checkpointing.checkpoint") as checkpoint, torch.no_grad():
        assert torch.equal(checkpointed(nll)(logits, targets), nll(logits, targets))
    assert checkpointed(nll, enabled=False) is nll
    checkpoint.assert_not_called()


def dropout_loss(logits: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.dropout(logits, 0.5) * logits).sum()


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_the_same_only_when_asked_for(preserve: bool) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    _, grad = loss_and_grad(dropout_loss, logits)
    torch.manual_seed(1)
    _, recomputed = loss_and_grad(checkpointed(dropout_loss, preserve_rng_state=preserve), logits)
    assert torch.equal(grad, recomputed) is preserve


@pytest.mark.parametrize(
    ("ranks", "early_stop", "of_torch", "runs_whole"),
    [
        *((1, None, True, False), (1, None, False, True), (1, True, True, False), (1, False, True, True)),
        *((2, None, True, True), (2, True, True, False)),
    ],
)
def test_early_stop(ranks: int, early_stop: bool | None, of_torch: bool, runs_whole: bool) -> None:
    """Ranks that stop on different sides of a collective would wait; on one rank torch's setting holds."""
    ends = 0

    def loss_fn(logits: torch.Tensor) -> torch.Tensor:
        nonlocal ends
        loss = logits.square().sum()
        ends += 1
        return loss

    with (
        torch.utils.checkpoint.set_checkpoint_early_stop(of_torch),
        mock.patch.multiple(dist, is_initialized=lambda: True, get_world_size=lambda: ranks),
    ):
        loss_and_grad(checkpointed(loss_fn, early_stop=early_stop), torch.ones(3))
    assert ends == 1 + runs_whole


@pytest.mark.parametrize(("is_ordinary", "by_keyword"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    "use", [lambda x: x.data_ptr(), lambda x: x[0].fill_(1.0), lambda x: x.detach().numpy().fill(1.0)]
)
def test_deferred_logits_that_are_used_before_the_recomputation(
    use: Callable[[torch.Tensor], Any], is_ordinary: bool, by_keyword: bool
) -> None:
    hidden, weight = torch.randn(4, 3).requires_grad_(), torch.randn(7, 3)
    logits, targets = deferred_logits(hidden, weight), torch.arange(4)
    if is_ordinary:
        logits.detach().numpy()
    loss_fn = checkpointed(vocab_parallel_log_probs)
    loss = loss_fn(logits=logits, targets=targets) if by_keyword else loss_fn(logits, targets)
    use(logits)
    expected = torch.log_softmax(hidden @ weight.T, 1).diagonal().sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, hidden) for x in (loss.sum(), expected)))
