"""``reentrant-train`` at the sites of the frameworks, driven through stand-ins on real megatron-core.

Every test runs in fresh processes. Patched, calls go through, the weights are those of one call that never
needed the patch, and nothing is left over; reverted, the next call fails with the error that users report.
"""

import os
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.common import messages
from megatron_rl_patches.engine.settings import VARIABLE, variable_of
from megatron_rl_patches.hooks import on_megatron_init
from tests.frameworks import rollouts
from tests.frameworks.conftest import STAND_INS
from tests.frameworks.rollouts import FINE, NO_SYNC, PATCH, check_rollouts, outcome, states_of
from tests.frameworks.verdicts import judge
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")


@pytest.mark.parametrize(
    ("framework", "order", "ranks"),
    [("slime", "before", 2), ("slime", "after", 1), ("megatron.training", "before", 2)],
)
@on_ranks(lambda ranks: ranks)
def test_rollouts_with_saves_between(framework: str, order: str, ranks: int) -> None:
    if order == "before":
        apply(PATCH)
    from tests.frameworks.jobs import JOBS

    measures = order == "after"
    os.environ[variable_of("memory_phases")] = str(int(measures))
    with mock.patch.object(messages.log, "log") as log:
        check_rollouts(JOBS[framework], framework)
    assert len(states_of(framework, "megatron.core")) == 4 + measures  # that which scores
    lines = [line for line in map(str, log.mock_calls) if "peak memory by phase until the end" in line]
    phases = [re.findall(r'"([a-z ]+)": \d', line) for line in lines]
    assert phases == [["other", "forward", "loss and backward", "step"], ["save"]] * 3 * measures


#: Files of ``miles.backends.training_utils``, before and after September 2026, and files of slime like them.
OF_MILES = {
    "data.py": "backends/megatron_utils/data.py",
    "loss.py": "backends/megatron_utils/loss.py",
    "cp_utils.py": "backends/megatron_utils/loss.py",
    "loss_hub/logit_processors.py": "backends/megatron_utils/loss.py",
    "loss_hub/losses.py": "backends/megatron_utils/loss.py",
    "loss_hub/math_utils.py": "utils/ppo_utils.py",
}
MOVED = {
    "data.py": "data/rollout.py",
    "loss.py": "loss/objective.py",
    "cp_utils.py": "data/context_parallel.py",
}


@pytest.mark.parametrize("clone", ["vime", "miles", "newest miles"])
def test_clones_of_slime_have_its_sites(clone: str, tmp_path: Path) -> None:
    """Under a name of their own; some that miles has are elsewhere."""
    framework = clone.split()[-1]
    folder = tmp_path / framework
    shutil.copytree(STAND_INS / "slime", folder)
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text().replace("slime", framework))
    for place, of_slime in OF_MILES.items() if framework == "miles" else ():
        place = MOVED.get(place, place.replace("_hub", "/hub")) if clone == "newest miles" else place
        file = folder / "backends" / "training_utils" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((folder / of_slime).read_text().replace("_allgather_cp", "allgather_cp"))

    def verdicts(folder: Path, framework: str) -> set[tuple[str, str, str]]:
        """Return patch, function and verdict, by the names of slime."""
        of_patches = judge(str(folder))[framework].items()
        judged = [(patch, *site) for patch, sites in of_patches for site in sites.items()]
        return {
            (patch, site.split(".")[-1].lstrip("_").replace(framework, "slime"), verdict)
            for patch, site, verdict in judged
        }

    missing = verdicts(STAND_INS, "slime") - verdicts(tmp_path, framework)
    assert missing == ({("lean-loss", "compute_log_probs", "fits")} if framework == "miles" else set())


@pytest.mark.slow
@on_ranks(1)
def test_megatron_saves_before_any_train() -> None:
    from tests.frameworks.jobs import MegatronJob

    assert outcome(MegatronJob().save) == "AssertionError: timer is not started"
    apply(PATCH)
    assert outcome(MegatronJob().save) == FINE


@on_ranks(1)
def test_bridge_and_nemo_rl() -> None:
    from megatron.bridge.training import setup, train
    from nemo_rl.models.megatron import setup as nemo_setup

    from tests.frameworks.jobs import BridgeJob

    job = BridgeJob()
    assert outcome(job.pretrain, 2) == FINE
    assert outcome(job.pretrain, 2).startswith(NO_SYNC)
    job.config.no_sync_func = None
    assert outcome(job.pretrain, 2) == rollouts.TIMER
    uninterrupted = BridgeJob()
    uninterrupted.pretrain(6)

    originals = train.train, setup._update_model_config_funcs
    apply(PATCH)
    assert set(states_of("megatron.bridge").values()) == {"applied"}
    job = BridgeJob()
    for _ in range(3):
        job.pretrain(2)
    assert job.checksum() == uninterrupted.checksum()
    job.train(2)
    assert job.config.no_sync_func == job.model[0].no_sync, "setup installs it, train does not"

    # A restart: the config outlives the model that its functions belong to.
    config, job = job.config, BridgeJob()
    nemo = job.global_state.cfg
    nemo.model = config
    nemo_setup.finalize_megatron_setup(nemo, job.model[0], job.optimizer)
    assert config.no_sync_func == job.model[0].no_sync

    assert nemo_setup._update_model_config_funcs is setup._update_model_config_funcs
    revert(PATCH)
    assert nemo_setup._update_model_config_funcs is originals[1]
    assert (train.train, setup._update_model_config_funcs) == originals


# --- switched on by hooks, in stand-ins whose functions have been copied already, as in a worker

DEFAULT = {"reentrant-train", "inference-only"}


@pytest.mark.parametrize(("value", "patches"), [(None, DEFAULT), ("lean-head", {"lean-head"}), ("0", set())])
@on_ranks(1)
def test_the_variable_decides_where_it_is_set(value: str, patches: set[str]) -> None:
    from tests.frameworks.jobs import SlimeJob

    os.environ.pop(VARIABLE, None)
    job = SlimeJob()  # the actor holds copies of train() and save()
    with mock.patch.dict(os.environ, {VARIABLE: value} if value else {}):
        on_megatron_init(job.args)
    job = SlimeJob()
    applied = {site.patch for site in status() if site.state == "applied"}
    assert (applied >= patches and "lean-head" not in applied) if not value else applied == patches
    outcomes = [outcome(job.train), outcome(job.train), outcome(job.save)]
    assert outcomes == [FINE] * 3 if "reentrant-train" in patches else outcomes[1].startswith(NO_SYNC)


@on_ranks(1)
def test_train_goes_on_after_a_forward_that_raised() -> None:
    """With Megatron's own rerun state machine and timers."""
    from tests.frameworks.jobs import JOBS

    uninterrupted = JOBS["megatron.training"]()
    uninterrupted.train(4)
    apply(PATCH)
    job = JOBS["megatron.training"]()
    job.train(2)
    handle = job.model[0].module.register_forward_hook(lambda *unused: 1 / 0)
    assert "ZeroDivisionError" in outcome(job.train, 2)
    handle.remove()
    job.resume(2)
    job.train(2)
    assert job.checksum() == uninterrupted.checksum()
