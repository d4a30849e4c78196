"""Where ``router-replay`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.router_replay import patch

from .judging import judged

SLIME = "slime.backends.megatron_utils.actor.MegatronTrainRayActor.train_actor"
ROUTER = "megatron.core.transformer.moe.router.TopKRouter.__init__"


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ("train(self.model)\n    RoutingReplay.clear_all()", "fits"),
        ("try:\n        train(self.model)\n    finally:\n        RoutingReplay.clear_all()", "not needed"),
        ("train(self.model)", "not needed"),
    ],
)
def test_slime_may_clear_its_routes_when_it_raises(body: str, state: str) -> None:
    assert judged(patch, SLIME, f"def train_actor(self, rollout_id):\n    {body}")[0] == state


@pytest.mark.parametrize(("body", "state"), [("RoutingReplay.clear_all()", "missing"), ("...", "not needed")])
def test_slime_without_replay_needs_no_function_that_clears_routes(body: str, state: str) -> None:
    assert judged(patch, SLIME, f"def train(self, rollout_id):\n    {body}")[0] == state


@pytest.mark.parametrize(("attribute", "state"), [("router_replay", "fits"), ("topk", "not needed")])
def test_old_routers_replay_nothing(attribute: str, state: str) -> None:
    assert judged(patch, ROUTER, f"def __init__(self, config):\n    self.{attribute} = None")[0] == state
