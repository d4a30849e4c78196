"""Where ``router-replay`` has work to do."""

from __future__ import annotations

import pytest

from megatron_rl_patches.patches.router_replay import patch

from .judging import assert_judged

SLIME = "slime.backends.megatron_utils.actor.MegatronTrainRayActor.train_actor"
ROUTER = "megatron.core.transformer.moe.router.TopKRouter.__init__"
CLEARS = "RoutingReplay.clear_all()"


TRAIN = "def train_actor(self, rollout_id):\n    "


@pytest.mark.parametrize(
    ("target", "source", "state"),
    [
        (SLIME, f"{TRAIN}train(self.model)\n    {CLEARS}", "fits"),
        (SLIME, f"{TRAIN}try: train(self.model)\n    finally: {CLEARS}", "not needed"),
        (SLIME, f"{TRAIN}train(self.model)", "not needed"),
        # A slime without replay needs no function that clears routes.
        (SLIME, f"def train(self, rollout_id): {CLEARS}", "missing"),
        (SLIME, "def train(self, rollout_id): ...", "not needed"),
        # Old routers replay nothing.
        (ROUTER, "def __init__(self, config): self.router_replay = None", "fits"),
        (ROUTER, "def __init__(self, config): self.topk = None", "not needed"),
    ],
)
def test_judgements(target: str, source: str, state: str) -> None:
    assert_judged(patch, target, source, state)
