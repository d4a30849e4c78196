"""Routes of slime's real ``train_actor`` and ``train()``: three rollouts, of which the second breaks off.

Megatron of slime's image has a function of slime around the choice of experts; here it is put there through
core's own replay.
"""

import contextlib
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import applied
from tests.frameworks.import_stubs import job_of
from tests.ranks import on_ranks

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.parametrize("framework", ["slime"])]


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def imported(name: str) -> Any:
    """Import a module, with mocks for the packages that it needs and that are not here."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            assert missing.name is not None and not name.startswith(missing.name)
            sys.modules[missing.name] = mock.MagicMock()


def make_job(job_type: Any, folder: Path, **flags: Any) -> tuple[Any, list[Any]]:
    """Return a job of slime, and a list of what its routers record and read."""
    (folder / "core.yaml").write_text("moe_enable_routing_replay: true")
    flags |= RECOMPUTE | {"use_routing_replay": True, "custom_config_path": folder / "core.yaml"}
    job = job_type(flags, kind="moe", overlap_param_gather=False)
    replay = imported("slime.utils.routing_replay")
    replay.RoutingReplay.all_routing_replays.clear()
    seen: list[Any] = []

    def choose(scores: Any, topk: int, groups: Any, group_topk: Any, default: Any) -> Any:
        result = replay.get_routing_replay_compute_topk(default)(scores, topk)
        seen.append((os.environ["ROUTING_REPLAY_STAGE"], result[1].tolist()))
        return result

    for module in job.model[0].modules():
        if getattr(module, "router_replay", None) is not None:
            replay.register_routing_replay(module)
            module.router_replay.get_replay_topk = choose
    return job, seen


def actor_of(job: Any) -> Any:
    """Return slime's actor around the job, without what is neither routes nor training."""
    module = imported("slime.backends.megatron_utils.actor")
    for name in ("compute_advantages_and_returns", "train_metric_utils", "train_data_utils"):
        setattr(module, name, mock.Mock())
    module.get_data_iterator = lambda rollout: None
    module.train = lambda *unused: job.train(1)
    module.timer = module.inverse_timer = lambda name: contextlib.nullcontext()
    actor = object.__new__(module.MegatronTrainRayActor)
    vars(actor).update(
        args=job.args,
        model=job.model,
        optimizer=job.optimizer,
        opt_param_scheduler=job.scheduler,
        prof=mock.Mock(),
        weight_updater=mock.Mock(),
        weights_backuper=SimpleNamespace(backup_tags=(), backup=lambda tag: None),
        _switch_model=lambda tag: None,
        _active_model_tag="actor",
        rollout_data_postprocess=None,
        compute_log_prob=lambda *unused, **options: job.log_probs() and {},
    )
    return actor


def break_off(*unused: Any) -> None:
    """End the step after the first forward pass of training."""
    if os.environ["ROUTING_REPLAY_STAGE"] == "replay_forward":
        raise ArithmeticError


def three_rollouts(job_type: Any, folder: Path) -> list[bool]:
    """Return for the first and the third rollout whether the routes that were read are those recorded."""
    os.environ.update(ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="fallthrough")
    job, seen = make_job(job_type, folder)
    actor = actor_of(job)
    outcomes = []
    for number in range(3):
        seen.clear()
        rollout = {"num_microbatches": [2], "global_batch_sizes": [2]}
        if number == 1:
            handle = job.model[0].module.register_forward_hook(break_off)
            with pytest.raises(ArithmeticError):
                actor.train_actor(number, rollout)
            handle.remove()
            job.steps += 1  # the third rollout has other data
            continue
        actor.train_actor(number, rollout)
        stages = ("record", "replay_forward", "replay_backward")
        recorded, forward, backward = ([routes for at, routes in seen if at == stage] for stage in stages)
        assert len(recorded) == len(forward) == len(backward) > 0
        outcomes.append(recorded == forward and sorted(map(str, recorded)) == sorted(map(str, backward)))
    return outcomes


@on_ranks(1, timeout=400)
def test_routes_read_are_routes_recorded(framework: str, tmp_path: Path, paths: list[str]) -> None:
    job_type = job_of(framework, paths)
    with mock.patch("torch.Tensor.is_pinned", lambda tensor: True), applied("reentrant-train"):
        module = imported("slime.backends.megatron_utils.actor")
        if hasattr(module, "log_rollout_data"):
            pytest.skip("slime up to v0.2.4: this actor asks more of a rollout than the job has")
        # The third reads what the second has recorded.
        assert three_rollouts(job_type, tmp_path) == [True, False]
        with applied("router-replay"):
            assert three_rollouts(job_type, tmp_path) == [True, True]
