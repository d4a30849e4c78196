"""``inference-only`` and ``scheduler-resume`` on unmodified checkouts, as in ``test_real_reentry.py``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.test_inference_roles import TEACHER, _globals
from tests.frameworks.test_real_reentry import prepare

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]


def _policy_and_teacher(framework: str, paths: list[str], folder: Path, patched: bool) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks import real_roles
        from tests.frameworks.role_jobs import live_bytes
        from tests.real import tiny_gpt

        policy, teacher = (
            real_roles.save(framework, str(folder / name), seed)
            for seed, name in enumerate(("policy", "teacher"))
        )
        model = real_roles.framework_model(framework)
        seen: dict[str, Any] = {}
        if patched:
            apply("inference-only", "scheduler-resume")
            seen["states"] = {s.target: s.state for s in status() if s.framework == framework}
        args = real_roles.global_arguments(load=policy)
        *state, seen["policy's iteration"] = model.initialize_model_and_optimizer(args, "actor")
        seen["policy's steps"] = state[2].num_steps
        weights = tiny_gpt.checksum(state[0], state[1])

        if patched:
            args.load = teacher
        else:  # before megatron-core 0.15 a second load asserts that nothing has been consumed
            args = real_roles.global_arguments(load=teacher)
        before = _globals(args)
        [chunk], optimizer, scheduler, iteration = model.initialize_model_and_optimizer(args, TEACHER)
        seen |= {
            "touched": _touched(before, _globals(args)),
            "class": type(chunk).__name__,
            "optimizer, scheduler": (optimizer is not None, scheduler is not None),
            "iteration": iteration,
            "bytes per byte of weights": live_bytes(chunk, optimizer)
            / sum(parameter.nbytes for parameter in chunk.parameters()),
            "policy as before": tiny_gpt.checksum(state[0], state[1]) == weights,
        }
        seen["is the teacher"] = _same(chunk, *_other(real_roles, framework, teacher))
        if patched:
            with pytest.raises(Exception) as caught:
                model.train(**_arguments_of(model.train, model=[chunk]))
            seen["refused"] = f"{type(caught.value).__name__}: {caught.value}"
        return seen


def _touched(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = [name for name in before if name != "arguments" and before[name] != after[name]]
    old, new = before["arguments"], after["arguments"]
    return names + [f"args.{name}" for name in old.keys() | new.keys() if old.get(name) != new.get(name)]


def _other(real_roles: Any, framework: str, folder: str) -> Any:
    """The teacher as the framework loads a policy."""
    args = real_roles.global_arguments(load=folder)
    return real_roles.framework_model(framework).initialize_model_and_optimizer(args, "actor")[0]


def _same(chunk: Any, other: Any) -> bool:
    import torch

    pairs = zip(chunk.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and (not torch.is_tensor(x) or torch.equal(x, y)) for (a, x), (b, y) in pairs)


def _arguments_of(function: Any, **given: Any) -> dict[str, Any]:
    import inspect

    names = inspect.signature(function).parameters
    return {name: given.get(name) for name in names}


@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_unpatched_a_teacher_is_built_for_training(
    framework: str, tmp_path: Path, checkouts: Checkouts
) -> None:
    [seen] = spawn_ranks(
        _policy_and_teacher, 1, framework, checkouts(framework), tmp_path, False, timeout=300
    )
    assert seen["class"] == "DistributedDataParallel"
    assert seen["optimizer, scheduler"] == (True, True)
    # bfloat16 weights; float32 gradients, main parameters and two moments.
    assert seen["bytes per byte of weights"] > 5
    assert seen["is the teacher"]


@pytest.mark.runs("teacher")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("framework", ["slime", "vime", "miles"])
def test_policy_and_teacher_side_by_side(
    framework: str, ranks: int, tmp_path: Path, checkouts: Checkouts
) -> None:
    seen, *others = spawn_ranks(
        _policy_and_teacher, ranks, framework, checkouts(framework), tmp_path, True, timeout=300
    )
    assert all(other == seen for other in others)
    assert set(seen["states"].values()) <= {"applied", "not needed"}
    assert (seen["policy's iteration"], seen["policy's steps"]) == (7, 7 * 4)
    assert seen["touched"] == []
    assert seen["class"] == "Float16Module"
    assert seen["optimizer, scheduler"] == (False, False)
    assert seen["iteration"] == 7
    assert seen["bytes per byte of weights"] == pytest.approx(1, rel=0.01)
    assert seen["policy as before"]
    assert seen["is the teacher"]
    assert seen["refused"].startswith(f"InferenceOnlyError: train: the model of role '{TEACHER}'")


def _evaluation_only(paths: list[str], folder: Path) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.frameworks import real_roles

        policy = real_roles.save("slime", str(folder), 0)
        model = real_roles.framework_model("slime")
        weights = importlib.import_module("slime.backends.megatron_utils.update_weight.common")

        def built() -> tuple[Any, ...]:
            args = real_roles.global_arguments(load=policy, num_rollout=0)
            chunks, *rest = model.initialize_model_and_optimizer(args, "actor")
            names = [name for name, _ in weights.named_params_and_buffers(args, chunks)]
            return type(chunks[0]).__name__, rest, names

        apply("inference-only")
        [state] = [s.state for s in status() if s.target == f"{model.__name__}.setup_model_and_optimizer"]
        patched = built() if state == "applied" else None
        revert()
        return {"state": state, "patched": patched, "unpatched": built() if patched else None}


@pytest.mark.runs("evaluation only", ranks=1)
def test_slime_evaluation_only(tmp_path: Path, checkouts: Checkouts) -> None:
    [seen] = spawn_ranks(_evaluation_only, 1, checkouts("slime"), tmp_path, timeout=300)
    if seen["state"] == "not needed":
        pytest.skip("this release of slime has no evaluation-only branch")
    (patched, *returned), (unpatched, *expected) = seen["patched"], seen["unpatched"]
    assert (patched, unpatched) == ("Float16Module", "DistributedDataParallel")
    assert returned == expected
    assert returned[0] == [None, None, 7]
    assert all(name.startswith("module.module.") for name in returned[1])
