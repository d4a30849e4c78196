"""The judgements of ``inference-only``, on code in the shapes that upstream has or may have."""

from __future__ import annotations

from functools import partial

import pytest

from megatron_rl_patches import Settings
from megatron_rl_patches.patches.inference_only import patch

from .judging import judged

verdict = partial(judged, patch)

MODEL = "slime.backends.megatron_utils.model"


INITIALIZE = """
    def initialize_model_and_optimizer(args, role="actor"):
        model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
        return model, optimizer, opt_param_scheduler, 0
"""


def test_a_framework_that_builds_all_roles_alike_needs_it() -> None:
    assert verdict(f"{MODEL}.initialize_model_and_optimizer", INITIALIZE)[0] == "fits"


def test_a_framework_with_a_way_of_its_own_does_not() -> None:
    own = """
    def _setup_inference_only_model(args, role):
        return get_model(get_model_provider_func(args, role), wrap_with_ddp=False)
    """
    state, reason = verdict(f"{MODEL}.initialize_model_and_optimizer", INITIALIZE + own)
    assert (state, "way of its own" in reason) == ("not needed", True)


def test_a_framework_that_wraps_in_ddp_itself_has_no_such_way() -> None:
    own = """
    def setup_model_and_optimizer(args, role="actor"):
        model = get_model(get_model_provider_func(args, role), wrap_with_ddp=False)
        model = [DDP(config, ddp_config, chunk) for chunk in model]
    """
    assert verdict(f"{MODEL}.initialize_model_and_optimizer", INITIALIZE + own)[0] == "fits"


def test_a_framework_with_one_model_needs_nothing() -> None:
    source = "def initialize_model_and_optimizer(args): return setup_model_and_optimizer(args)"
    state, reason = verdict(f"{MODEL}.initialize_model_and_optimizer", source)
    assert (state, reason) == ("not needed", "it builds one model, and that one trains")


def test_a_framework_that_names_roles_otherwise_has_drifted() -> None:
    source = "def initialize_model_and_optimizer(args, model_name): ..."
    assert verdict(f"{MODEL}.initialize_model_and_optimizer", source) == (
        "drifted",
        "it no longer takes role",
    )


@pytest.mark.parametrize(
    ("body", "state"),
    [("if args.num_rollout == 0: return model, None, None", "fits"), ("return model", "not needed")],
)
def test_evaluation_only(body: str, state: str) -> None:
    source = f"def setup_model_and_optimizer(args, role='actor'):\n    {body}"
    assert verdict(f"{MODEL}.setup_model_and_optimizer", source)[0] == state


@pytest.mark.parametrize(
    ("call", "state"),
    [
        ("get_model(model, ddp)", "fits"),
        ("get_model(model, ddp, wrap_with_ddp=load_optimizer)", "not needed"),
    ],
)
@pytest.mark.parametrize("function", ["setup_reference_model_state", "setup_model_and_optimizer"])
def test_nemo_rl(function: str, call: str, state: str) -> None:
    source = f"def {function}(config, load_optimizer=True):\n    model = {call}"
    assert verdict(f"nemo_rl.models.megatron.setup.{function}", source)[0] == state


def test_areal() -> None:
    target = "areal.engine.megatron_engine.MegatronEngine.initialize"
    body = "self.model = make_mcore_model(mcore_config=self.mcore_config)"
    assert verdict(target, f"def initialize(self, addr):\n    {body}")[0] == "fits"
    decides = f"self.mcore_config.wrap_with_ddp = self.optimizer_config is not None\n    {body}"
    assert verdict(target, f"def initialize(self, addr):\n    {decides}")[0] == "not needed"


def test_every_role_site_is_there_whatever_the_roles() -> None:
    without_roles = Settings(inference_roles=()).options_of(patch)
    assert patch.sites_for(without_roles) == patch.sites_for(Settings().options_of(patch))
