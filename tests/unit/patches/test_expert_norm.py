"""Where ``expert-norm`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.expert_norm import patch

from .judging import judged

LAYERS = "megatron.core.tensor_parallel.layers"
OPTIMIZER = "megatron.core.optimizer._get_param_groups"
FIXED = "upstream itself counts experts by their own tensor-parallel group"


@pytest.mark.parametrize(
    ("parameters", "state"),
    [
        ("param", "fits"),  # up to 0.15
        ("param, tp_group=None", "fits"),  # up to 0.18
        ("param, tp_group=None, expert_tp_group=None", "not needed"),
        ("p", "drifted"),
    ],
)
def test_upstream_may_know_the_group_of_experts(parameters: str, state: str) -> None:
    function = f"def param_is_not_tensor_parallel_duplicate({parameters}): ...\n"
    copy = "def copy_tensor_model_parallel_attributes(destination_tensor, source_tensor): ...\n"
    for name in ("param_is_not_tensor_parallel_duplicate", "copy_tensor_model_parallel_attributes"):
        drifts = state == "drifted" and name.startswith("copy")
        assert judged(patch, f"{LAYERS}.{name}", function + copy)[0] == ("fits" if drifts else state)


@pytest.mark.parametrize(("attribute", "state"), [("tp_group", "fits"), ("expert_tp_group", "not needed")])
def test_optimizers_may_have_that_group(attribute: str, state: str) -> None:
    source = f"""
        def _get_param_groups(model_chunks, config, config_overrides):
            return []

        def _get_megatron_optimizer_based_on_param_groups(optimizer, group):
            optimizer.{attribute} = group
    """
    assert judged(patch, OPTIMIZER, source)[0] == state
