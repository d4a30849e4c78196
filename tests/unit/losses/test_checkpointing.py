"""Recomputed losses equal plain ones, also where reentrant checkpointing is wrong."""

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

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.losses import checkpointed, deferred_logits, vocab_parallel_log_probs
from tests.ranks import on_ranks

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


WRAPS = {
    "plain": checkpointed,
    "called": checkpointed(),
    "options": checkpointed(early_stop=False, preserve_rng_state=True),
    "early stop": checkpointed(early_stop=True),
    "off": checkpointed(enabled=False),
}


@pytest.mark.parametrize("name", WRAPS)
def test_loss_and_gradient_are_those_of_the_plain_call(name: str) -> None:
    logits, targets = logits_and_targets()
    expected = loss_and_grad(nll, logits, targets)
    assert all(map(torch.equal, expected, loss_and_grad(WRAPS[name](nll), logits, targets)))


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


def overwriting_without_grad_mode(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As in OpenClaw-RL: no clone where nothing is to be differentiated, and a kernel that overwrites."""
    log_softmax = logits.log_softmax(dim=-1)
    if not torch.is_grad_enabled():
        logits.copy_(log_softmax.exp())
    return -log_softmax.gather(1, targets[:, None]).mean()


def test_right_where_reentrant_checkpointing_is_wrong() -> None:
    arguments = logits_and_targets()
    loss, grad = expected = loss_and_grad(overwriting_without_grad_mode, *arguments)
    found = loss_and_grad(checkpointed(overwriting_without_grad_mode), *arguments)
    assert all(map(torch.equal, found, expected))
    reentrant = partial(torch.utils.checkpoint.checkpoint, overwriting_without_grad_mode, use_reentrant=True)
    reentrant_loss, reentrant_grad = loss_and_grad(reentrant, *arguments)
    assert torch.equal(reentrant_loss, loss)  # nothing to see in the loss
    assert (reentrant_grad - grad).abs().max() > 0.05


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
    ("early_stop", "of_torch", "runs_whole"),
    [(None, True, False), (None, False, True), (True, True, False), (False, True, True)],
)
def test_early_stop(early_stop: bool | None, of_torch: bool, runs_whole: bool) -> None:
    """The setting of torch itself holds where none is given, on one rank."""
    ends = 0

    def loss_fn(logits: torch.Tensor) -> torch.Tensor:
        nonlocal ends
        loss = logits.square().sum()
        ends += 1
        return loss

    with torch.utils.checkpoint.set_checkpoint_early_stop(of_torch):
        loss_and_grad(checkpointed(loss_fn, early_stop=early_stop), torch.ones(3))
    assert ends == 1 + runs_whole


@pytest.mark.slow
@on_ranks(2, megatron=False)
def test_ranks_stay_together() -> None:
    calls, rank = [], dist.get_rank()

    def uneven_loss(logits: torch.Tensor) -> torch.Tensor:
        """One rank needs a tensor behind the collective, the other does not, and would stop before it."""
        loss = logits.square().sum()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss * total if rank == 0 else loss + 0.0

    all_reduce = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda tensor: (calls.append(1), all_reduce(tensor))):
        loss_and_grad(checkpointed(uneven_loss), torch.ones(3))
        assert len(calls) == 2
        loss = checkpointed(uneven_loss, early_stop=True)(torch.ones(3, requires_grad=True))
    calls.clear()
    with mock.patch.object(dist, "all_reduce", lambda tensor: calls.append(1)):
        loss.backward()
    assert len(calls) == (rank == 0)  # where they would wait for each other


HOOKS = {
    "identity": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "copies": lambda: saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x),
    "in host memory": torch.autograd.graph.save_on_cpu,
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_deferred_logits_go_by_the_hooks_of_saved_tensors(hooks: str) -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 3, dtype=torch.float64).requires_grad_()
    targets = torch.arange(4)
    with HOOKS[hooks]():
        loss = checkpointed(vocab_parallel_log_probs)(deferred_logits(hidden, weight), targets).sum()
    expected = torch.log_softmax(hidden @ weight.T, 1).gather(1, targets[:, None]).sum()
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_deferred_logits_that_are_overwritten_before_the_recomputation_are_refused() -> None:
    hidden, weight = torch.randn(4, 3).requires_grad_(), torch.randn(7, 3)
    logits = deferred_logits(hidden, weight)
    loss = checkpointed(vocab_parallel_log_probs)(logits, torch.arange(4)).sum()
    logits[0] = 1.0
    with pytest.raises(InvalidInputError, match="overwritten after a checkpointed loss"):
        loss.backward()
