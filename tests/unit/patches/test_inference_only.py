"""The judgements of ``inference-only``, on code in the shapes that upstream has or may have."""

from __future__ import annotations

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.inference_only import patch

from .judging import assert_judged

SLIME = "slime.backends.megatron_utils.model"
NEMO_RL = "nemo_rl.models.megatron.setup"
INITIALIZE = """
    def initialize_model_and_optimizer(args, role="actor"):
        model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
"""
OWN_WAY = """
    def _setup_inference_only_model(args, role):
        return get_model(get_model_provider_func(args, role), wrap_with_ddp=False)
"""
WRAPS_ITSELF = """
    def setup_model_and_optimizer(args, role="actor"):
        model = get_model(get_model_provider_func(args, role), wrap_with_ddp=False)
        model = [DDP(config, ddp_config, chunk) for chunk in model]
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (INITIALIZE, "fits"),
        (INITIALIZE + OWN_WAY, "not needed: way of its own"),
        (INITIALIZE + WRAPS_ITSELF, "fits"),
        (
            "def initialize_model_and_optimizer(args): return setup_model_and_optimizer(args)",
            "not needed: it builds one model, and that one trains",
        ),
        (
            "def initialize_model_and_optimizer(args, model_name): ...",
            "drifted: it no longer takes role",
        ),
    ],
)
def test_frameworks_that_build_roles(source: str, expected: str) -> None:
    assert_judged(patch, f"{SLIME}.initialize_model_and_optimizer", source, expected)


ROLE = "args, role='actor'"
DDP = "return get_model(model, ddp{})"
OWN_DDP = DDP.format(", wrap_with_ddp=load_optimizer")
MAKE = "self.model = make_mcore_model(mcore_config=self.mcore_config)"
DECIDES = "self.mcore_config.wrap_with_ddp = self.optimizer_config is not None"


@pytest.mark.parametrize(
    ("target", "parameters", "body", "state"),
    [
        (f"{SLIME}.setup_model_and_optimizer", ROLE, "return None if args.num_rollout == 0 else 1", "fits"),
        (f"{SLIME}.setup_model_and_optimizer", ROLE, "return model", "not needed"),
        *(
            (f"{NEMO_RL}.{function}", "config, load_optimizer=True", body, state)
            for function in ("setup_reference_model_state", "setup_model_and_optimizer")
            for body, state in ((DDP.format(""), "fits"), (OWN_DDP, "not needed"))
        ),
        ("areal.engine.megatron_engine.MegatronEngine.initialize", "self, addr", MAKE, "fits"),
        (
            "areal.engine.megatron_engine.MegatronEngine.initialize",
            "self, addr",
            f"{DECIDES}\n    {MAKE}",
            "not needed",
        ),
    ],
)
def test_frameworks_may_leave_ddp_out_themselves(target: str, parameters: str, body: str, state: str) -> None:
    assert_judged(patch, target, f"def {target.rpartition('.')[2]}({parameters}):\n    {body}", state)


def test_every_role_site_is_there_whatever_the_roles() -> None:
    without_roles = Settings(inference_roles=()).options_of(patch)
    assert patch.sites_for(without_roles) == patch.sites_for(Settings().options_of(patch))
