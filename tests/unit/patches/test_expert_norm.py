"""Where ``expert-norm`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.expert_norm import patch

from .judging import assert_judged

LAYERS = "megatron.core.tensor_parallel.layers"
COPY = "copy_tensor_model_parallel_attributes"
OPTIMIZER = "megatron.core.optimizer._get_param_groups"


@pytest.mark.parametrize(
    ("parameters", "state", "state_of_copy"),
    [
        ("param", "fits", "fits"),  # up to 0.15
        ("param, tp_group=None", "fits", "fits"),  # up to 0.18
        ("param, tp_group=None, expert_tp_group=None", "not needed", "not needed"),
        ("p", "drifted", "fits"),
    ],
)
def test_upstream_may_know_the_group_of_experts(parameters: str, state: str, state_of_copy: str) -> None:
    source = f"def param_is_not_tensor_parallel_duplicate({parameters}): ...\n"
    source += f"def {COPY}(destination_tensor, source_tensor): ...\n"
    assert_judged(patch, f"{LAYERS}.param_is_not_tensor_parallel_duplicate", source, state)
    assert_judged(patch, f"{LAYERS}.{COPY}", source, state_of_copy)


@pytest.mark.parametrize(("attribute", "state"), [("tp_group", "fits"), ("expert_tp_group", "not needed")])
def test_optimizers_may_have_that_group(attribute: str, state: str) -> None:
    source = f"""
        def _get_param_groups(model_chunks, config, config_overrides): ...
        def _get_megatron_optimizer_based_on_param_groups(optimizer, group): optimizer.{attribute} = group
    """
    assert_judged(patch, OPTIMIZER, source, state)
