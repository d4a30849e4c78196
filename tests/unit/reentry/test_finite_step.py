"""The core of ``finite-step`` on a mocked optimizer, and what callers see of a step that was skipped."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import LogCaptureFixture

from megatron_rl_patches.errors import NonFiniteGradients
from megatron_rl_patches.reentry import finite_step
from megatron_rl_patches.testing import MockDDP, MockOptimizer


class Optimizer(MockOptimizer):
    """Has the shape of Megatron's ``step``."""

    norms: tuple[float, ...] = ()
    grad_norms_by_group: dict[str, float]

    def step(self) -> Any:
        norm, *self.norms = self.norms
        self.result = True, norm, None
        self.get_grad_norm()
        return self.step_with_ready_grads(), norm, None


@pytest.fixture
def optimizer() -> Optimizer:
    made = Optimizer([MockDDP()])
    made.grad_norms_by_group = {}
    return made


def test_bad_norms_are_skipped_and_the_limit_counts_them_in_a_row(optimizer: Optimizer) -> None:
    nan, inf = math.nan, math.inf
    optimizer.norms = (1.0, nan, 2.0, inf, nan, nan)
    results = [finite_step.step(optimizer, limit=2) for _ in range(4)]
    assert [result[0] for result in results] == [True, False, True, False]
    assert str([result[1] for result in results]) == "[1.0, nan, 2.0, inf]"
    assert optimizer.calls == ["step_with_ready_grads"] * 2
    with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
        finite_step.step(optimizer, limit=2)
    assert not finite_step.step(optimizer, limit=0)[0]
    assert "get_grad_norm" not in vars(optimizer)


@pytest.mark.parametrize("clip_grad", [None, 0.0, 1.0])
def test_the_norm_of_a_group_counts(optimizer: Optimizer, clip_grad: float | None) -> None:
    """Megatron computes it for clipping alone; ``None``: there is a norm, whoever has computed it."""
    computed: list[bool] = []
    norms = {"mtp": math.nan}

    def compute() -> dict[str, float]:
        computed.append(True)
        optimizer.grad_norms_by_group = norms
        return norms

    optimizer.norms = (1.0,)
    if clip_grad is None:
        optimizer.grad_norms_by_group = norms
    else:
        optimizer.config.clip_grad = clip_grad
        vars(optimizer).update(_compute_grad_norms_by_group=compute)
    assert finite_step.step(optimizer)[0] is (clip_grad == 1.0)
    assert computed == [True] * (clip_grad == 0.0)
    assert optimizer.grad_norms_by_group == (norms if clip_grad is None else {})


def test_names_are_those_of_bad_gradients(optimizer: Optimizer, caplog: LogCaptureFixture) -> None:
    [chunk] = optimizer.model_chunks
    name, parameter = list(chunk.named_parameters())[1]
    parameter.main_grad.fill_(math.nan)
    optimizer.norms = (math.nan, math.nan)
    finite_step.step(optimizer)
    skipped, named = caplog.messages
    assert "step 1 skipped: the norm of its gradients is nan" in skipped
    assert f"are not finite: {name.removeprefix('module.')}. " in named
    finite_step.history_of(optimizer).chunks = [object()]  # looking fails, and the step goes on
    assert not finite_step.step(optimizer)[0]
    assert "unknown, as looking for them raised AttributeError" in caplog.messages[-1]


def test_for_callers_that_assert_success_the_schedule_waits(optimizer: Optimizer) -> None:
    advanced: list[int] = []
    scheduler = SimpleNamespace(step=lambda increment: advanced.append(increment))
    step, nan = optimizer.step, math.nan
    optimizer.norms = (1.0, nan, nan, 1.0, nan)
    vars(optimizer)["step"] = lambda: finite_step.step(optimizer, step)
    with finite_step.skips_as_successes(optimizer), finite_step.schedule_waits(scheduler, optimizer):
        scheduler.step(0)  # nothing was skipped yet
        results = []
        for number in range(1, 4):
            results.append(optimizer.step())
            scheduler.step(number)
        optimizer.step()
        optimizer.step()  # one of two steps since was taken
        scheduler.step(4)
    assert [result[0] for result in results] == [True] * 3
    assert [math.isnan(result[1]) for result in results] == [False, True, True]
    assert advanced == [0, 1, 4]


def test_a_bad_norm_that_the_caller_asks_for_is_a_skipped_step(optimizer: Optimizer) -> None:
    """slime and miles do not call ``step`` then."""
    step, history = optimizer.step, finite_step.history_of(optimizer)
    vars(optimizer)["step"] = lambda: finite_step.step(optimizer, step)
    with finite_step.skips_as_successes(optimizer, limit=2):
        optimizer.result, optimizer.norms = (True, math.nan, None), (1.0,)
        assert optimizer.get_grad_norm() is math.nan
        assert optimizer.step()[:2] == (True, 1.0)
        assert (history.taken, history.skipped, history.in_row) == (1, 1, 0)
        optimizer.result = True, math.inf, None
        optimizer.get_grad_norm()
        with pytest.raises(NonFiniteGradients, match="2 steps in a row"):
            optimizer.get_grad_norm()
    assert "get_grad_norm" not in vars(optimizer)
