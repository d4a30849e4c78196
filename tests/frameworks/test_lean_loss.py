"""``lean-loss`` at the sites of the frameworks, on stand-ins and real megatron-core.

Every test runs in processes of its own. Unpatched, the stand-ins keep copies of the logits, lose gradients
under reentrant checkpointing, or hang; patched, they return the same things in the same shapes, with the
values and gradients of a dense float64 reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import RanksFailed, cpu_backend, spawn_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "lean-loss"
FRAMEWORKS = ("slime", "openclaw", "miles")
BFLOAT16 = 4e-3  # what Megatron's fused cross entropy rounds gradients to


def _eager(function: Callable[..., Any], *args: Any) -> Any:
    """Megatron compiles parts of its cross entropy, which takes longer than all of the test."""
    torch.compiler.set_stance("force_eager")
    return function(*args)


def _names(package: str) -> dict[str, Any]:
    """Objects under all names of the framework's modules that are imported."""
    import sys

    return {
        f"{module}.{name}": value
        for module, home in sorted(sys.modules.items())
        if module.partition(".")[0] == package
        for name, value in vars(home).items()
        if callable(value)
    }


# --- slime, OpenClaw-RL, miles: values and gradients --------------------------------------------------------


def _scores(framework: str, order: str, tp: int) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks.loss_jobs import LOSSES, PACKAGES, SCORES, LossJob, distance, initialize

        initialize(tp=tp)
        package = PACKAGES.get(framework, framework)
        if order == "before":
            apply(PATCH)
            revert_first = None
        else:
            for home in (SCORES, LOSSES):
                importlib.import_module(home[package])
            revert_first = _names(package)
        seen: dict[str, Any] = {"returned": [], "temperature": []}
        seen.update(dict.fromkeys(("unpatched", "patched", "deferred"), 0.0))
        for entropy_coef in (0.0, 0.1):
            for temperature in (1.0, 0.7):
                job = LossJob(framework, entropy_coef=entropy_coef, rollout_temperature=temperature)
                apply(PATCH)
                options = {"entropy_coef": entropy_coef, "rollout_temperature": temperature}
                runs = {
                    "patched": job.result(),
                    "deferred": LossJob(framework, deferred=True, **options).result(),
                }
                seen.setdefault("made", []).append(runs["deferred"]["made"])
                seen.setdefault("entropy requires grad", []).append(runs["patched"]["requires_grad"][1])
                seen["temperature"].append(job.args.rollout_temperature)
                seen["states"] = {s.state for s in status() if s.framework == package}
                revert(PATCH)
                runs["unpatched"] = job.result()
                dense = job.dense(temperature)
                for name, run in runs.items():
                    seen[name] = max(seen[name], *(distance(run[key], dense[key]) for key in dense))
                seen["returned"].append(runs["patched"]["returned"] == runs["unpatched"]["returned"])
        if revert_first:
            now = _names(package)
            seen["restored"] = all(now[name] is value for name, value in revert_first.items())
        return seen


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
@pytest.mark.parametrize("framework", [*FRAMEWORKS, "vime"])
def test_values_and_gradients(framework: str, order: str, tp: int) -> None:
    for seen in spawn_ranks(_eager, tp, _scores, framework, order, tp):
        assert seen["states"] <= {"applied", "not needed", "waiting"}
        assert all(seen["returned"])
        assert max(seen["patched"], seen["deferred"]) < 1e-6
        assert not any(seen["made"])
        assert 1e-4 < seen["unpatched"] < BFLOAT16
        assert seen["entropy requires grad"] == [False, False, True, True]
        assert seen["temperature"] == [1.0, 0.7, 1.0, 0.7]
        assert seen.get("restored", True)


def _true_on_policy() -> bool:
    with cpu_backend():
        from tests.frameworks.loss_jobs import LossJob, initialize

        initialize()
        job = LossJob("miles", entropy_coef=0.1, rollout_temperature=0.7, true_on_policy_mode=True)
        unpatched = job.result()
        apply(PATCH)
        patched = job.result()
        return all((patched[key] == unpatched[key]).all() for key in ("log_probs", "entropy", "gradient"))


def test_miles_keeps_the_bits_of_its_engine() -> None:
    assert spawn_ranks(_eager, 1, _true_on_policy) == [True]


# --- recomputation ------------------------------------------------------------------------------------------


def _recomputed(framework: str) -> dict[str, Any]:
    with cpu_backend():
        import warnings

        from tests.frameworks import loss_jobs
        from tests.frameworks.loss_jobs import LossJob, distance, initialize

        initialize()
        options = {"entropy_coef": 0.1}
        dense = LossJob(framework, **options).loss(dense=True)
        with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
            unpatched = LossJob(framework, recompute_loss_function=True, **options).loss()
        apply(PATCH)
        job = LossJob(framework, recompute_loss_function=True, **options)
        with mock.patch.object(loss_jobs, "policy_loss", wraps=loss_jobs.policy_loss) as policy_loss:
            patched = job.loss()
        return {
            "unpatched": distance(unpatched["gradient"], dense["gradient"]),
            "patched": max(distance(patched[key], dense[key]) for key in ("loss", "gradient")),
            "returned": patched["returned"] == unpatched["returned"],
            "passes": policy_loss.call_count,
            "option": job.args.recompute_loss_function,
        }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_recomputed_loss(framework: str) -> None:
    [seen] = spawn_ranks(_eager, 1, _recomputed, framework)
    if framework == "openclaw":  # reentrant: its first pass, without grad mode, overwrites the logits
        assert seen["unpatched"] > 0.1
    else:
        assert seen["unpatched"] < BFLOAT16
    assert seen["patched"] < 1e-6
    assert seen["returned"]
    assert seen["passes"] == 2
    assert seen["option"] is True


def _top_k() -> list[float]:
    with cpu_backend():
        import torch
        from megatron.core import parallel_state

        from tests.frameworks.loss_jobs import LossJob, initialize

        initialize()
        apply(PATCH)
        from slime.utils.ppo_utils import compute_log_probs

        logits = LossJob("openclaw").logits()[0].detach()
        expected = logits.log_softmax(-1)
        group = parallel_state.get_tensor_model_parallel_group()
        errors = []
        for candidate in (3, 5, 7):
            tokens = torch.full((len(logits),), candidate)
            found = compute_log_probs(logits, tokens, group)
            errors.append((found - expected[:, [candidate]]).abs().max().item())
        return errors


def test_openclaw_candidates_of_a_top_k_loss() -> None:
    [errors] = spawn_ranks(_eager, 1, _top_k)
    assert max(errors) < 1e-6


# --- all-gather context parallelism: a gradient on some ranks only ------------------------------------------


def _redistributed(framework: str, patched: bool, backward: bool) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks.loss_jobs import LossJob, distance, initialize

        initialize(cp=2)
        if patched:
            apply(PATCH)
        seen: dict[str, Any] = {"requires grad": {}, "error": 0.0}
        # In the first layout one rank has the whole response, in the second each lacks one of the samples.
        for layout in ({"totals": (24,), "responses": (6,)}, {}):
            for entropy_coef in (0.0, 0.1):
                # miles says of the entropy that it is a metric; slime's era knows it itself.
                options = {"entropy_requires_grad": entropy_coef != 0} if framework == "miles" else {}
                job = LossJob(framework, allgather_cp=True, entropy_coef=entropy_coef, **layout)
                result = job.result(backward, **options)
                seen["requires grad"][len(job.totals), entropy_coef] = result["requires_grad"]
                if backward:
                    dense = job.dense()
                    seen["error"] = max(seen["error"], *(distance(result[key], dense[key]) for key in dense))
        return seen


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_unpatched_all_gather_cp_has_a_backward_on_some_ranks_only(framework: str) -> None:
    without, with_response = spawn_ranks(_eager, 2, _redistributed, framework, False, False)
    assert without["requires grad"][1, 0.0] == [True, True]
    assert with_response["requires grad"][1, 0.0] == [True, False]
    # The other one waits for it, or, as here, finds it gone.
    with pytest.raises(RanksFailed, match="rank 0"):
        spawn_ranks(_eager, 2, _redistributed, framework, False, True, timeout=30)


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_all_gather_cp(framework: str) -> None:
    for seen in spawn_ranks(_eager, 2, _redistributed, framework, True, True):
        assert seen["requires grad"] == {
            (samples, entropy_coef): [True, entropy_coef != 0]
            for samples in (1, 3)
            for entropy_coef in (0.0, 0.1)
        }
        assert seen["error"] < 1e-6


# --- memory -------------------------------------------------------------------------------------------------


def _extra_memory(framework: str) -> dict[str, float]:
    """Peak of a policy loss's forward and backward beyond the logits, in units of the logits."""
    with cpu_backend():
        from tests.frameworks.loss_jobs import LossJob, initialize
        from tests.unit.losses.live_bytes import live_bytes

        initialize()
        sizes = {"totals": (64,) * 8, "responses": (56,) * 8, "vocabulary": 8192}

        def extra() -> float:
            job = LossJob(framework, entropy_coef=0.1, rollout_temperature=0.7, **sizes)
            logits = job.logits()
            with mock.patch.object(job, "logits", lambda: logits):
                return live_bytes(job.result).peak / logits.nbytes

        seen = {"unpatched": extra()}
        apply(PATCH)
        return {**seen, "patched": extra()}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_memory_beyond_the_logits(framework: str) -> None:
    [seen] = spawn_ranks(_eager, 1, _extra_memory, framework)
    assert seen["unpatched"] > 4
    # The gradient of the logits, and the one that the test reads at its leaf.
    assert seen["patched"] < 2.05


# --- verl ---------------------------------------------------------------------------------------------------


def _verl(order: str, tp: int) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks.loss_jobs import VERL, VERL_ENGINE, VerlJob, distance, initialize

        initialize(tp=tp)
        if order == "before":
            apply(PATCH)
        importlib.import_module(VERL_ENGINE)
        job = VerlJob()
        seen: dict[str, Any] = {"returned": [], "distillation": []}
        seen.update(dict.fromkeys(("unpatched", "patched", "deferred"), 0.0))
        for entropy, chunks in ((False, False), (True, False), (True, True)):
            dense = job.dense(entropy)
            apply(PATCH)
            runs = {
                "patched": job.processed(entropy, chunks),
                "deferred": VerlJob(deferred=True).processed(entropy, chunks, squares=False),
            }
            seen["made"] = seen.get("made", False) or runs["deferred"]["made"]
            with_distillation = [job.processed(entropy, chunks, distillation=True)]
            seen["states"] = {s.state for s in status() if s.framework == "verl"}
            revert(PATCH)
            runs["unpatched"] = job.processed(entropy, chunks)
            for name, run in runs.items():
                seen[name] = max(seen[name], *(distance(run[key], dense[key]) for key in dense))
            seen["returned"].append(runs["patched"]["returned"] == runs["unpatched"]["returned"])
            seen["distillation"].append(
                all(
                    distance(run[key], dense[key]) < 1e-6
                    for run in with_distillation
                    for key in dense
                    if key != "gradient"
                )
            )
        apply(PATCH)
        engine = importlib.import_module(VERL_ENGINE)
        foreign = importlib.import_module(VERL).vocab_parallel_log_probs_from_logits.__wrapped__
        with mock.patch.object(engine, "vocab_parallel_log_probs_from_logits", foreign):
            seen["foreign"] = job.processed(True)["returned"] == runs["unpatched"]["returned"]
        return seen


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
def test_verl(order: str, tp: int) -> None:
    for seen in spawn_ranks(_eager, tp, _verl, order, tp):
        assert seen["states"] == {"applied"}
        assert all(seen["returned"])
        assert all(seen["distillation"])
        assert max(seen["patched"], seen["deferred"]) < 1e-6
        assert not seen["made"]
        assert seen["unpatched"] < 1e-5
        assert seen["foreign"]


def _verl_memory() -> dict[str, Any]:
    with cpu_backend():
        import torch

        from tests.frameworks.loss_jobs import VERL, VerlJob, initialize
        from tests.unit.losses.live_bytes import live_bytes

        initialize()

        def extra() -> float:
            job = VerlJob(rows=512, vocabulary=8192)
            logits = job.logits()
            with mock.patch.object(job, "logits", lambda: logits):
                return live_bytes(lambda: job.processed(True, squares=False)).peak / logits.nbytes

        seen: dict[str, Any] = {"unpatched": extra()}
        apply(PATCH)
        job = VerlJob()
        logits = job.logits()
        log_probs = importlib.import_module(VERL).vocab_parallel_log_probs_from_logits(logits, job.labels)
        [gradient] = torch.autograd.grad(log_probs.sum(), logits)
        return {**seen, "patched": extra(), "in place": gradient.data_ptr() == logits.data_ptr()}


def test_memory_beyond_the_logits_verl() -> None:
    [seen] = spawn_ranks(_eager, 1, _verl_memory)
    assert seen["unpatched"] > 3.9
    # The gradients that the division by the temperature and the test's own product hand on.
    assert seen["patched"] < 2.05
    assert seen["in place"]
