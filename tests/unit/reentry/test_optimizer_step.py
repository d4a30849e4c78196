"""``OptimizerStep`` on mocked DDP: what it refuses, and what a schedule gets; else see ``tests/real``."""

from functools import partial
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InvalidInputError, MegatronRLPatchesError
from megatron_rl_patches.reentry import OptimizerStep
from megatron_rl_patches.testing import MockConfig, MockDDP, MockOptimizer

refuses = partial(pytest.raises, MegatronRLPatchesError)


@pytest.fixture
def model() -> list[Any]:
    config = MockConfig(finalize_model_grads_func=lambda model, tokens: None, param_sync_func=object())
    return [MockDDP(config, overlap_grad_reduce=False, reuse_grad_buf_for_mxfp8_param_ag=True) for _ in "12"]


def test_what_a_schedule_gets(model: list[Any]) -> None:
    """Tensors are divided by the number of the step. The first call alone gathers, as in one call."""
    optimizer, config = MockOptimizer(model), model[0].config
    functions = {**vars(config)}

    def schedule(model: Any, num_microbatches: int) -> tuple[Any, ...]:
        row = torch.full((num_microbatches,), 2.0)
        return (row / num_microbatches)[0], (row * num_microbatches)[0], len(row), config.param_sync_func

    with OptimizerStep(model, optimizer).begin(4) as steps:
        assert optimizer.calls == ["zero_grad", *["prepare_model_params_for_param_sync"] * 2]
        for number, gathers in ((1, functions["param_sync_func"]), (3, None)):
            result = steps.forward_backward(num_microbatches=number, schedule=schedule)
            assert result == (0.5, 2 * number, number, gathers) and vars(config) == functions
        assert steps.step() == optimizer.result


def test_methods_out_of_turn_are_refused_and_leave_the_step_open(model: list[Any]) -> None:
    steps, others = (OptimizerStep(chunks, MockOptimizer(chunks)) for chunks in (model, model[1:]))
    for method in (partial(steps.forward_backward, num_microbatches=1), steps.step):
        with refuses(match=r"no step is open.* call begin\(\) first"):
            method()
    for bad in (None, 0, -1, "4", 2.5, True):
        model[0].config.calculate_per_token_loss = bad is not None  # which needs no number
        with pytest.raises(InvalidInputError, match=f"begin.. is {bad!r}; expected an integer above 0"):
            steps.begin(bad)  # type: ignore[arg-type]
    steps.begin(3)
    for other in (steps, others):
        with refuses(match=r"a step of this model is open: call its step\(\) or abort\(\) first"):
            other.begin(1)
    with refuses(match="0 of 3 microbatches ran"):
        steps.step()
    for number, options in ((4, {}), (0, {}), (1, {"forward_only": True})):
        with refuses(match=f"{number} of 3 microbatches"):
            steps.forward_backward(num_microbatches=number, **options)
    steps.abort()
    with refuses(match=r"the block of begin\(\) ended without step\(\)"), steps.begin(1):
        pass
    for chunks, reason in (torch.nn.Linear(1, 1), "not wrapped"), ([MockDDP(), MockDDP()], "have 2 configs"):
        with refuses(match=reason):
            OptimizerStep(chunks, None)
