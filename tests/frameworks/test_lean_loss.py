"""``lean-loss`` at the sites of the frameworks, on stand-ins and real megatron-core.

Every test runs in processes of its own. Unpatched, the stand-ins keep copies of the logits, lose gradients
under reentrant checkpointing, or hang; patched, they return the same things in the same shapes, with the
values and gradients of a dense float64 reference.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import apply, revert
from megatron_rl_patches.testing import RanksFailed
from tests.frameworks.rollouts import states_of
from tests.ranks import on_ranks
from tests.unit.losses.live_bytes import live_bytes

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "lean-loss"
FRAMEWORKS = ("slime", "openclaw", "miles")
BFLOAT16 = 4e-3  # what Megatron's fused cross entropy rounds gradients to


def _names(package: str) -> dict[str, Any]:
    """Objects under all names of the framework's modules that are imported."""
    return {
        f"{module}.{name}": value
        for module, home in sorted(sys.modules.items())
        if module.partition(".")[0] == package
        for name, value in vars(home).items()
        if callable(value)
    }


# --- slime, OpenClaw-RL, miles: values and gradients --------------------------------------------------------


def check_scores(framework: str, package: str, **options: Any) -> float:
    """Compare a framework's scores and gradients with the dense ones; return the error of unpatched ones."""
    from tests.frameworks.loss_jobs import LossJob, distance

    worst = 0.0
    for entropy_coef in (0.0, 0.1):
        for temperature in (1.0, 0.7):
            both = {"entropy_coef": entropy_coef, "rollout_temperature": temperature, **options}
            job = LossJob(framework, **both)
            apply(PATCH)
            patched = job.result()
            deferred = LossJob(framework, deferred=True, **both).result()
            assert set(states_of(package, patch=PATCH).values()) <= {"applied", "not needed", "waiting"}
            revert(PATCH)
            unpatched = job.result()
            dense = job.dense(temperature)
            for run in (patched, deferred):
                assert all(distance(run[key], dense[key]) < 1e-6 for key in dense)
            for key in ("log_probs", "entropy"):
                assert distance(patched[key], unpatched[key], 1.0) < 1e-5
            worst = max(worst, *(distance(unpatched[key], dense[key]) for key in dense))
            assert not deferred["made"]
            assert patched["returned"] == unpatched["returned"]
            assert patched["requires_grad"][1] == (entropy_coef != 0)
            assert job.args.rollout_temperature == temperature
    return worst


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
@pytest.mark.parametrize("framework", [*FRAMEWORKS, "vime"])
@on_ranks(lambda tp: tp)
def test_values_and_gradients(framework: str, order: str, tp: int) -> None:
    from tests.frameworks.loss_jobs import LOSSES, PACKAGES, SCORES, initialize

    initialize(tp=tp)
    package = PACKAGES.get(framework, framework)
    if order == "before":
        apply(PATCH)
    else:
        for home in (SCORES, LOSSES):
            importlib.import_module(home[package])
    names = _names(package)
    assert 1e-4 < check_scores(framework, package) < BFLOAT16
    if order == "after":
        now = _names(package)
        assert all(now[name] is value for name, value in names.items())


@on_ranks(1)
def test_miles_keeps_the_bits_of_its_engine() -> None:
    from tests.frameworks.loss_jobs import LossJob, initialize

    initialize()
    job = LossJob("miles", entropy_coef=0.1, rollout_temperature=0.7, true_on_policy_mode=True)
    unpatched = job.result()
    apply(PATCH)
    patched = job.result()
    assert all((patched[key] == unpatched[key]).all() for key in ("log_probs", "entropy", "gradient"))


# --- recomputation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@on_ranks(1)
def test_recomputed_loss(framework: str) -> None:
    from tests.frameworks import loss_jobs
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize()
    options = {"entropy_coef": 0.1}
    dense = LossJob(framework, **options).loss(dense=True)
    with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
        unpatched = LossJob(framework, recompute_loss_function=True, **options).loss()
    error = distance(unpatched["gradient"], dense["gradient"])
    if framework == "openclaw":  # reentrant: its first pass, without grad mode, overwrites the logits
        assert error > 0.1
    else:
        assert error < BFLOAT16
    apply(PATCH)
    job = LossJob(framework, recompute_loss_function=True, **options)
    with mock.patch.object(loss_jobs, "policy_loss", wraps=loss_jobs.policy_loss) as policy_loss:
        patched = job.loss()
    assert policy_loss.call_count == 2
    assert max(distance(patched[key], dense[key]) for key in ("loss", "gradient")) < 1e-6
    assert patched["returned"] == unpatched["returned"]
    assert job.args.recompute_loss_function is True


@on_ranks(1)
def test_openclaw_candidates_of_a_top_k_loss() -> None:
    from megatron.core import parallel_state

    from tests.frameworks.loss_jobs import LossJob, initialize

    initialize()
    apply(PATCH)
    from slime.utils.ppo_utils import compute_log_probs

    logits = LossJob("openclaw").logits()[0].detach()
    expected = logits.log_softmax(-1)
    group = parallel_state.get_tensor_model_parallel_group()
    for candidate in (3, 5, 7):
        log_probs = compute_log_probs(logits, torch.full((len(logits),), candidate), group)
        assert (log_probs - expected[:, [candidate]]).abs().max() < 1e-6


# --- all-gather context parallelism: a gradient on some ranks only ------------------------------------------


def _redistributed(framework: str, backward: bool) -> dict[tuple[int, float], list[bool]]:
    """Return by number of samples and entropy coefficient which values require grad on this rank."""
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize(cp=2)
    requires_grad = {}
    # In the first layout one rank has the whole response, in the second each lacks one of the samples.
    for layout in ({"totals": (24,), "responses": (6,)}, {}):
        for entropy_coef in (0.0, 0.1):
            # miles says of the entropy that it is a metric; slime's era knows it itself.
            options = {"entropy_requires_grad": entropy_coef != 0} if framework == "miles" else {}
            job = LossJob(framework, allgather_cp=True, entropy_coef=entropy_coef, **layout)
            result = job.result(backward, **options)
            requires_grad[len(job.totals), entropy_coef] = result["requires_grad"]
            if backward:
                dense = job.dense()
                assert all(distance(result[key], dense[key]) < 1e-6 for key in dense)
    return requires_grad


@on_ranks(2, timeout=30)
def _unpatched(framework: str, backward: bool) -> None:
    requires_grad = _redistributed(framework, backward)
    without_response = torch.distributed.get_rank() == 0
    assert requires_grad[1, 0.0] == [True, without_response]


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_unpatched_all_gather_cp_has_a_backward_on_some_ranks_only(framework: str) -> None:
    _unpatched(framework=framework, backward=False)
    # The other one waits for it, or, as here, finds it gone.
    with pytest.raises(RanksFailed, match="rank 0"):
        _unpatched(framework=framework, backward=True)


@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(2)
def test_all_gather_cp(framework: str) -> None:
    apply(PATCH)
    for (_, entropy_coef), requires_grad in _redistributed(framework, backward=True).items():
        assert requires_grad == [True, entropy_coef != 0]


# --- memory -------------------------------------------------------------------------------------------------


def _extra_memory(job: Any, call: Callable[[], object]) -> float:
    """Peak of a policy loss's forward and backward beyond the logits, in units of the logits."""
    logits = job.logits()
    with mock.patch.object(job, "logits", lambda: logits):
        return live_bytes(call).peak / logits.nbytes


@pytest.mark.parametrize("framework", FRAMEWORKS)
@on_ranks(1)
def test_memory_beyond_the_logits(framework: str) -> None:
    from tests.frameworks.loss_jobs import LossJob, initialize

    initialize()
    options: dict[str, Any] = {"entropy_coef": 0.1, "rollout_temperature": 0.7, "vocabulary": 8192}
    job = LossJob(framework, totals=(64,) * 8, responses=(56,) * 8, **options)
    assert _extra_memory(job, job.result) > 4
    apply(PATCH)
    # The gradient of the logits, and the one that the test reads at its leaf.
    assert _extra_memory(job, job.result) < 2.05


# --- verl ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
@on_ranks(lambda tp: tp)
def test_verl(order: str, tp: int) -> None:
    from tests.frameworks.loss_jobs import VERL, VERL_ENGINE, VerlJob, distance, initialize

    initialize(tp=tp)
    if order == "before":
        apply(PATCH)
    engine = importlib.import_module(VERL_ENGINE)
    job = VerlJob()
    for entropy, chunks in ((False, False), (True, False), (True, True)):
        dense = job.dense(entropy)
        apply(PATCH)
        patched = job.processed(entropy, chunks)
        deferred = VerlJob(deferred=True).processed(entropy, chunks, squares=False)
        with_distillation = job.processed(entropy, chunks, distillation=True)
        assert set(states_of("verl", patch=PATCH).values()) == {"applied"}
        revert(PATCH)
        unpatched = job.processed(entropy, chunks)
        for key, value in dense.items():
            assert distance(unpatched[key], value) < 1e-5
            assert max(distance(run[key], value) for run in (patched, deferred)) < 1e-6
            assert key == "gradient" or distance(with_distillation[key], value) < 1e-6
        assert not deferred["made"]
        assert patched["returned"] == unpatched["returned"]
    apply(PATCH)
    foreign = importlib.import_module(VERL).vocab_parallel_log_probs_from_logits.__wrapped__
    with mock.patch.object(engine, "vocab_parallel_log_probs_from_logits", foreign):
        assert job.processed(True)["returned"] == unpatched["returned"]


@on_ranks(1)
def test_memory_beyond_the_logits_verl() -> None:
    from tests.frameworks.loss_jobs import VERL, VerlJob, initialize

    initialize()
    large, job = VerlJob(rows=512, vocabulary=8192), VerlJob()
    assert _extra_memory(large, lambda: large.processed(True, squares=False)) > 3.9
    apply(PATCH)
    # The gradients that the division by the temperature and the test's own product hand on.
    assert _extra_memory(large, lambda: large.processed(True, squares=False)) < 2.05
    logits = job.logits()
    log_probs = importlib.import_module(VERL).vocab_parallel_log_probs_from_logits(logits, job.labels)
    [gradient] = torch.autograd.grad(log_probs.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()
