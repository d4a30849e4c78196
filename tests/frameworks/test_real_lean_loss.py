"""``lean-loss`` on unmodified checkouts of slime, OpenClaw-RL and miles, as in ``test_real_reentry.py``.

Values and gradients against a dense float64 reference, unpatched and patched, through the frameworks' own
``get_log_probs_and_entropy`` and ``loss_function``. Up to slime v0.3.0 and in miles the unpatched gradient is
rounded to bfloat16, by Megatron's fused cross entropy; the patched one is not.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.test_real_reentry import prepare

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

PATCH = "lean-loss"
# Frameworks compile small functions, at the first call.
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
BFLOAT16 = 4e-3
LAYOUTS: list[Any] = [
    pytest.param(1, {}, id="1 rank"),
    pytest.param(2, {"tp": 2}, id="TP 2"),
    pytest.param(2, {"cp": 2}, id="zigzag CP 2"),
    pytest.param(2, {"cp": 2, "allgather_cp": True}, id="all-gather CP 2"),
]


def _scores(framework: str, paths: list[str], tp: int = 1, cp: int = 1, **options: Any) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks.loss_jobs import LossJob, distance, initialize

        initialize(tp=tp, cp=cp)
        seen: dict[str, Any] = {"unpatched": 0.0, "patched": 0.0, "returned": [], "values": 0.0}
        for entropy_coef in (0.0, 0.1):
            for temperature in (1.0, 0.7):
                given = {"entropy_coef": entropy_coef, "rollout_temperature": temperature, **options}
                job = LossJob(framework, **given)
                dense = job.dense(temperature)
                unpatched = job.result()
                apply(PATCH)
                patched = job.result()
                deferred = LossJob(framework, deferred=True, **given).result()
                seen["states"] = {s.target: s.state for s in status() if s.framework == framework}
                revert(PATCH)
                assert job.args.rollout_temperature == temperature
                for name, result in (("unpatched", unpatched), ("patched", patched), ("patched", deferred)):
                    worst = max(distance(result[key], dense[key]) for key in dense)
                    seen[name] = max(seen[name], worst)
                seen.setdefault("made", []).append(deferred["made"])
                for key in ("log_probs", "entropy"):
                    seen["values"] = max(seen["values"], distance(patched[key], unpatched[key], 1.0))
                seen["returned"].append(unpatched["returned"] == patched["returned"])
                seen[f"entropy requires grad at {entropy_coef}"] = patched["requires_grad"][1]
        return seen


@pytest.mark.runs("losses")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_log_probs_and_entropy(
    framework: str, ranks: int, layout: dict[str, Any], checkouts: Checkouts
) -> None:
    paths = _with_layout(framework, checkouts(framework), layout)
    for seen in spawn_ranks(_scores, ranks, framework, paths, timeout=300, env=EAGER, **layout):
        # Of miles, the module of the loss itself is not imported here.
        assert set(seen["states"].values()) <= {"applied", "not needed", "waiting"}
        assert seen["unpatched"] < BFLOAT16
        assert seen["patched"] < 1e-6
        assert seen["values"] < 1e-5
        assert not any(seen["made"])
        assert all(seen["returned"])
        assert seen["entropy requires grad at 0.1"]
        assert not seen["entropy requires grad at 0.0"]


def _with_layout(framework: str, paths: list[str], layout: dict[str, Any]) -> list[str]:
    if layout.get("allgather_cp"):
        text = "".join(path.read_text() for path in Path(paths[0]).glob(f"{framework}/backends/**/*.py"))
        if "allgather_cp_redistribute" not in text:
            pytest.skip("this release has no all-gather CP")
    return paths


def _losses(framework: str, paths: list[str], tp: int = 1, cp: int = 1, **options: Any) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks.loss_jobs import LossJob, distance, initialize

        initialize(tp=tp, cp=cp)
        seen: dict[str, Any] = {"returned": []}
        for entropy_coef in (0.0, 0.1):
            options["entropy_coef"] = entropy_coef
            recomputing = {**options, "recompute_loss_function": True}
            dense = LossJob(framework, **options).loss(dense=True)
            runs = {"unpatched": LossJob(framework, **options).loss()}
            with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
                runs["unpatched, recomputed"] = LossJob(framework, **recomputing).loss()
            apply(PATCH)
            runs["patched"] = LossJob(framework, **options).loss()
            runs["patched, recomputed"] = LossJob(framework, **recomputing).loss()
            runs["deferred"] = LossJob(framework, deferred=True, **options).loss()
            runs["deferred, recomputed"] = LossJob(framework, deferred=True, **recomputing).loss()
            revert(PATCH)
            for name, run in runs.items():
                assert not run["made"], name
                worst = seen.setdefault(name, {"loss": 0.0, "gradient": 0.0, "metrics": 0.0})
                for key in ("loss", "gradient"):
                    worst[key] = max(worst[key], distance(run[key], dense[key]))
                for key, value in dense["metrics"].items():
                    worst["metrics"] = max(worst["metrics"], abs(run["metrics"][key] - value))
            seen["returned"] += [run["returned"] == runs["unpatched"]["returned"] for run in runs.values()]
        return seen


@pytest.mark.runs("losses")
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_policy_loss(framework: str, ranks: int, layout: dict[str, Any], checkouts: Checkouts) -> None:
    paths = _with_layout(framework, checkouts(framework), layout)
    for seen in spawn_ranks(_losses, ranks, framework, paths, timeout=300, env=EAGER, **layout):
        assert all(seen["returned"])
        assert seen["unpatched"]["loss"] < 1e-5
        assert seen["unpatched"]["gradient"] < BFLOAT16
        for name in ("patched", "patched, recomputed", "deferred", "deferred, recomputed"):
            assert max(seen[name].values()) < 1e-5
