"""``reentrant-train`` at the sites of the frameworks, driven through stand-ins on real megatron-core.

Every test runs in fresh processes. Patched, calls go through, the weights are those of one call that never
needed the patch, and nothing is left over; reverted, the next call fails with the error that users report.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_rl_patches import apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "reentrant-train"
FRAMEWORKS = ("slime", "miles", "megatron.training")
NO_SYNC = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
KEY_ERROR = "KeyError: GPTModel"  # of the handles, for the first module that has none
TIMER = "AssertionError: timer has already been started"
FINE = "fine"


def outcome(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except KeyError as error:
        return f"KeyError: {type(error.args[0]).__name__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return FINE


# --- patched: train, save, train, save, train ---------------------------------------------------------------


def _rollouts(framework: str, order: str) -> dict[str, Any]:
    with cpu_backend():
        if order == "before":
            apply(PATCH)
        from megatron.core.distributed import DistributedDataParallel as DDP

        from tests.frameworks.jobs import JOBS
        from tests.real.tiny_gpt import counting_overlap

        functions = JOBS[framework].functions()
        uninterrupted = JOBS[framework]()
        uninterrupted.train(6)
        checksum = uninterrupted.checksum()
        originals = {name: getattr(homes[0], name) for name, homes in functions.items()}
        gc.enable()  # unpatched, train() leaves it off
        if order == "after":
            apply(PATCH)

        job = JOBS[framework]()
        seen: dict[str, Any] = {"hooks": [job.hooks_on]}
        with counting_overlap() as overlap:
            for _ in range(3):
                job.train(2)
                seen["hooks"].append(job.hooks_on)
                job.save()
                seen["hooks"].append(job.hooks_on)
        seen |= {
            "same weights": job.checksum() == checksum,
            "gathers, reductions": (overlap.param_gathers > 0, overlap.grad_reduces > 0),
            "saved": job.disk.checksums,
            "hooks while saving": job.disk.hooks_were_on,
            "collecting": gc.isenabled(),
            "states": {
                site.target: site.state for site in status() if site.framework in (framework, "megatron.core")
            },
            "copies": [
                getattr(home, name) is getattr(homes[0], name)
                for name, homes in functions.items()
                for home in homes
            ],
        }

        installed, job.config.no_sync_func = job.config.no_sync_func, nullcontext
        seen["foreign"] = outcome(job.train), job.config.no_sync_func is nullcontext
        job.config.no_sync_func = installed

        # Before was before: what was called then was patched already, and says what it wraps.
        originals = {name: getattr(function, "__wrapped__", function) for name, function in originals.items()}
        revert(PATCH)
        seen["restored"] = [
            getattr(home, name) is originals[name] for name, homes in functions.items() for home in homes
        ]
        seen["restored"].append(not hasattr(DDP.disable_forward_pre_hook, "__wrapped__"))
        seen["after revert"] = outcome(job.train)
        return seen


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "vime"])
@pytest.mark.parametrize(("order", "ranks"), [("before", 2), ("after", 1)])
def test_rollouts_with_saves_between(framework: str, order: str, ranks: int) -> None:
    results = spawn_ranks(_rollouts, ranks, framework, order)
    for seen in results:
        assert seen["same weights"]
        assert seen["gathers, reductions"] == (True, True)
        # On as built; off at the end of train(), and so after a save.
        assert seen["hooks"] == [True] + [False] * 6
        assert seen["hooks while saving"] == [False] * 3
        assert seen["collecting"]
        assert set(seen["states"].values()) == {"applied"}
        assert len(seen["states"]) == 5
        assert all(seen["copies"])
        error, stayed = seen["foreign"]
        assert error.startswith(NO_SYNC)
        assert stayed
        assert all(seen["restored"])
        assert seen["after revert"].startswith(NO_SYNC)
    # What is saved is whole: the same on each replica.
    assert len({tuple(seen["saved"]) for seen in results}) == 1
    assert len(set(results[0]["saved"])) == 3


# --- exceptions ---------------------------------------------------------------------------------------------


def _broken_steps(framework: str) -> dict[str, dict[str, Any]]:
    """A batch breaks: the first or second of a step, in the first or second step of the second call."""
    with cpu_backend():
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        from tests.frameworks.jobs import JOBS, MICROBATCHES, BrokenBatch

        uninterrupted = JOBS[framework]()
        uninterrupted.train(6)
        gc.enable()  # unpatched, train() leaves it off
        apply(PATCH)
        seen = {}
        for step, microbatch in itertools.product((2, 3), range(MICROBATCHES)):
            job = JOBS[framework]()
            job.train(2)
            broken = BrokenBatch()
            job.batches.break_with(broken, at=step * MICROBATCHES + microbatch)
            with pytest.raises(BrokenBatch) as caught:
                job.train(2)
            left = {
                "the exception itself": caught.value is broken,
                "its traceback": caught.traceback[-1].name == "__next__",
                "collecting": gc.isenabled(),
                "training": all(chunk.training for chunk in job.model),
                "rerun": get_rerun_state_machine().state == RerunState.NOT_RUNNING_YET,
                "timers": set(getattr(job, "timers_running", ())) <= {"interval-time"},
            }
            job.resume(step)
            job.train(6 - step)
            left["save"] = outcome(job.save) == FINE
            left["same weights"] = job.checksum() == uninterrupted.checksum()
            seen[f"step {step}, microbatch {microbatch}"] = left
        return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_train_goes_on_where_a_batch_broke(framework: str) -> None:
    for seen in spawn_ranks(_broken_steps, 2, framework):
        for when, left in seen.items():
            assert all(left.values()), (when, left)


def _full_disk(framework: str) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks.jobs import JOBS

        apply(PATCH)
        job = JOBS[framework]()
        job.disk.full = True
        seen: dict[str, Any] = {"before any train": (outcome(job.save), job.hooks_on)}
        job = JOBS[framework]()
        job.train()
        job.disk.full = True
        seen["after train"] = (outcome(job.save), job.hooks_on)
        seen["train"] = (outcome(job.train), job.hooks_on)
        job.disk.full = False
        seen["next save"] = (outcome(job.save), job.hooks_on)
        seen["hooks while saving"] = set(job.disk.hooks_were_on)
        return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_hooks_are_as_found_when_saving_raises(framework: str) -> None:
    [seen] = spawn_ranks(_full_disk, 1, framework)
    full = "OSError: [Errno 28] disk full"
    assert seen == {
        "before any train": (full, True),
        "after train": (full, False),
        "train": (FINE, False),
        "next save": (FINE, False),
        "hooks while saving": {False},
    }


# --- Megatron-LM --------------------------------------------------------------------------------------------


def _broken_evaluation() -> dict[str, Any]:
    with cpu_backend():
        from megatron.core.rerun_state_machine import (
            RerunMode,
            get_rerun_state_machine,
            initialize_rerun_state_machine,
        )

        initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
        from tests.frameworks.jobs import MICROBATCHES, BrokenBatch, MegatronJob

        apply(PATCH)
        job = MegatronJob()
        job.args.eval_interval = job.args.save_interval = 1
        job.train(2)
        seen: dict[str, Any] = {"saves": len(job.disk.checksums)}

        # Two steps and their evaluations take four times two batches; the next breaks in an evaluation.
        job.batches.break_with(BrokenBatch(), at=5 * MICROBATCHES + 1)
        seen["error"] = outcome(job.train)
        machine = get_rerun_state_machine()
        seen |= {
            "training": all(chunk.training for chunk in job.model),
            "rerun": (machine.mode.name, machine.state.name),
            "timers": job.timers_running,
            "timers of the config": job.config.timers is not None,
            "collecting": gc.isenabled(),
        }
        job.steps = 3
        seen["next train"] = outcome(job.train)
        seen["next save"] = outcome(job.save)
        return seen


def test_megatron_recovers_from_a_broken_evaluation() -> None:
    [seen] = spawn_ranks(_broken_evaluation, 1)
    assert seen == {
        "saves": 2,
        "error": "BrokenBatch: ",
        "training": True,
        "rerun": ("VALIDATE_RESULTS", "NOT_RUNNING_YET"),
        "timers": [],
        "timers of the config": True,
        "collecting": True,
        "next train": FINE,
        "next save": FINE,
    }


def _save_without_train() -> tuple[str, str]:
    with cpu_backend():
        from tests.frameworks.jobs import MegatronJob

        unpatched = outcome(MegatronJob().save)
        apply(PATCH)
        return unpatched, outcome(MegatronJob().save)


def test_megatron_saves_before_any_train() -> None:
    [(unpatched, patched)] = spawn_ranks(_save_without_train, 1)
    assert unpatched == "AssertionError: timer is not started"
    assert patched == FINE


# --- Megatron-Bridge and NeMo-RL ----------------------------------------------------------------------------


def _bridge() -> dict[str, Any]:
    with cpu_backend():
        from megatron.bridge.training import pretrain, setup, train
        from nemo_rl.models.megatron import setup as nemo_setup

        from tests.frameworks.jobs import BridgeJob

        seen: dict[str, Any] = {}
        job = BridgeJob()
        seen["first"] = outcome(job.pretrain, 2)
        seen["second setup"] = outcome(job.pretrain, 2)
        job.config.no_sync_func = None
        seen["second train"] = outcome(job.pretrain, 2)
        job.state.timers("interval-time").reset()
        seen["without the timer"] = outcome(job.train, 2)
        uninterrupted = BridgeJob()
        uninterrupted.pretrain(6)

        originals = train.train, setup._update_model_config_funcs
        apply(PATCH)
        seen["states"] = {site.state for site in status() if site.framework == "megatron.bridge"}
        job = BridgeJob()
        for _ in range(3):
            job.pretrain(2)
        seen["same weights"] = job.checksum() == uninterrupted.checksum()
        job.train(2)
        seen["still installed by setup"] = job.config.no_sync_func == job.model[0].no_sync

        # A restart: the config outlives the model that its functions belong to.
        config, job = job.config, BridgeJob()
        nemo = job.state.cfg
        nemo.model = config
        nemo_setup.finalize_megatron_setup(nemo, job.model[0], job.optimizer)
        seen["of the new model"] = config.no_sync_func == job.model[0].no_sync
        config.no_sync_func = nullcontext
        seen["foreign"] = outcome(nemo_setup.finalize_megatron_setup, nemo, job.model[0], job.optimizer)

        seen["copied"] = (
            pretrain.train is train.train,
            nemo_setup._update_model_config_funcs is setup._update_model_config_funcs,
            train.train is not originals[0],
        )
        revert(PATCH)
        seen["restored"] = (
            (pretrain.train, nemo_setup._update_model_config_funcs) == originals,
            (train.train, setup._update_model_config_funcs) == originals,
        )
        return seen


def test_bridge_and_nemo_rl() -> None:
    [seen] = spawn_ranks(_bridge, 1)
    assert seen["first"] == FINE
    assert seen["second setup"].startswith(NO_SYNC)
    assert seen["second train"] == TIMER
    assert seen["without the timer"] == KEY_ERROR
    assert seen["states"] == {"applied"}
    assert seen["same weights"]
    assert seen["still installed by setup"]
    assert seen["of the new model"]
    assert seen["foreign"].startswith(NO_SYNC)
    assert all(seen["copied"])
    assert all(seen["restored"])


# --- verl ---------------------------------------------------------------------------------------------------


def _verl(order: str) -> dict[str, Any]:
    """Two pipeline stages of two chunks each, which share one config."""
    with cpu_backend():
        from tests.frameworks.jobs import MICROBATCHES
        from tests.real import tiny_gpt

        options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2, vpp=2), overlap_param_gather=False)
        schedule = {
            "num_microbatches": MICROBATCHES,
            "seq_length": tiny_gpt.SEQUENCE,
            "micro_batch_size": tiny_gpt.BATCH,
        }
        if order == "before":
            apply(PATCH)
        from verl.utils import megatron_utils
        from verl.workers.engine.megatron import transformer_impl

        model, optimizer = tiny_gpt.build(options)
        data = tiny_gpt.data_iterators(options)
        tiny_gpt.train(model, optimizer, data, [MICROBATCHES] * 2, options)
        uninterrupted = tiny_gpt.checksum(model, optimizer)

        engine = transformer_impl.MegatronEngine(*tiny_gpt.build(options))
        seen: dict[str, Any] = {"first call": outcome(engine.initialize)}
        if order == "after":
            apply(PATCH)
            engine = transformer_impl.MegatronEngine(*tiny_gpt.build(options))
            seen["patched"] = outcome(engine.initialize)
        config = tiny_gpt.get_model_config(engine.module[0])
        for _ in range(2):  # built again on the same chunks: the functions are replaced, not doubled
            engine.initialize()
            seen["installed"] = (
                config.no_sync_func == [chunk.no_sync for chunk in engine.module],
                config.grad_sync_func == [chunk.start_grad_sync for chunk in engine.module],
            )
        data = tiny_gpt.data_iterators(options)
        for _ in range(2):
            engine.train_batch(tiny_gpt.forward_step, data, **schedule)
        seen["same weights"] = tiny_gpt.checksum(engine.module, engine.optimizer) == uninterrupted
        config.no_sync_func = nullcontext
        seen["foreign"] = outcome(engine.initialize)
        revert(PATCH)
        seen["restored"] = (
            transformer_impl.register_megatron_training_hooks
            is megatron_utils.register_megatron_training_hooks,
            not hasattr(megatron_utils.register_megatron_training_hooks, "__wrapped__"),
        )
        return seen


@pytest.mark.parametrize("order", ["before", "after"])
def test_verl_with_chunks_that_share_a_config(order: str) -> None:
    for seen in spawn_ranks(_verl, 2, order):
        if order == "after":
            assert seen["first call"].startswith(NO_SYNC)
            assert seen["patched"] == FINE
        else:
            assert seen["first call"] == FINE
        assert seen["installed"] == (True, True)
        assert seen["same weights"]
        assert seen["foreign"].startswith(NO_SYNC)
        assert seen["restored"] == (True, True)
