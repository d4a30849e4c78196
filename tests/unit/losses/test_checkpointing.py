"""Losses that backward computes again equal plain ones, keep nothing, and run whole on several ranks.

``test_table.py`` has those of deferred logits, also under hooks of saved tensors.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from megatron_rl_patches.losses import checkpointed, deferred_logits, vocab_parallel_log_probs


def loss_and_grad(
    loss_fn: Callable[..., Any], logits: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # Logits of a model are no leaf: losses may overwrite them.
    leaf = logits.clone().requires_grad_()
    loss = loss_fn(leaf * 1, *args)
    return loss.detach(), *torch.autograd.grad(loss, leaf)


def test_loss_and_gradient_are_those_of_the_plain_call_and_nothing_is_kept() -> None:
    logits, targets = torch.randn(6, 13, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    expected = loss_and_grad(cross_entropy, logits, targets)
    for options in ({}, {"early_stop": False, "preserve_rng_state": True}, {"early_stop": True}):
        result = loss_and_grad(checkpointed(cross_entropy, **options), logits, targets)
        assert all(map(torch.equal, expected, result)), options
    logits.requires_grad_()
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in (logits.data_ptr(), targets.data_ptr()):
            saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy(logits, targets)
        assert sum(saved) >= logits.nbytes
        saved.clear()
        checkpointed(cross_entropy)(logits, targets)
    assert not sum(saved)  # torch 2.6 saves an empty tensor for each argument


def test_outputs_as_megatron_wants_them() -> None:
    """Of a function with keyword arguments whose names are options of torch's checkpoint, too."""

    @checkpointed
    def loss_func(output: torch.Tensor, *, debug: float = 2.0, early_stop: float = 3.0) -> Any:
        """Its docstring."""
        loss = (output * debug * early_stop).sum()
        return loss, torch.tensor(6, dtype=torch.int32), {"loss": loss.detach().clone(), "name": "sum"}

    logits = torch.ones(3, requires_grad=True)
    loss, num_tokens, metrics = loss_func(logits, debug=4.0)
    loss /= num_tokens  # in place, as the schedules do
    loss.backward()
    assert logits.grad.tolist() == [2.0] * 3 and metrics == {"loss": 36.0, "name": "sum"}
    assert (loss_func.__name__, loss_func.__doc__) == ("loss_func", "Its docstring.")
    # No overhead where there is nothing to recompute.
    with mock.patch("megatron_rl_patches.losses.checkpointing.checkpoint") as checkpoint, torch.no_grad():
        assert loss_func(logits, early_stop=1.0)[0] == 6.0
    assert checkpointed(cross_entropy, enabled=False) is cross_entropy
    checkpoint.assert_not_called()


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_the_same_only_when_asked_for(preserve: bool) -> None:
    def loss_fn(logits: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.dropout(logits, 0.5) * logits).sum()

    gradients = []
    for loss in (loss_fn, checkpointed(loss_fn, preserve_rng_state=preserve)):
        torch.manual_seed(1)
        gradients.append(loss_and_grad(loss, torch.ones(100))[1])
    assert torch.equal(*gradients) is preserve


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
