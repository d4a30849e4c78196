"""``inference-only`` and ``scheduler-resume`` on stand-ins for frameworks, and real megatron-core.

Every test runs in fresh processes. Unpatched, a teacher has gradient buffers and Adam, loading it leaves
traces, and loading a second model in one process fails; patched, it costs its weights, and the policy beside
it is trained as if it were alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from megatron_rl_patches import Settings, apply, status
from megatron_rl_patches.errors import InferenceOnlyError
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks.test_reentry import FINE, outcome

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "inference-only"
FRAMEWORKS = ("slime", "openclaw", "miles")
TEACHER = "prm_teacher"


def _checkpoints(framework: str, folder: Path) -> tuple[str, str]:
    """Of a former policy and of a teacher."""
    from tests.frameworks import role_jobs

    paths = []
    for seed, name in ((5, "policy"), (6, "teacher")):
        role_jobs.process(seed)
        role_jobs.arguments()
        model, optimizer, scheduler = role_jobs.framework_model(framework).setup_model_and_optimizer(
            role_jobs.arguments()
        )
        # Adam's moments are there from the first step on.
        role_jobs.train(framework, (model, optimizer, scheduler), 1, role_jobs.Batches())
        paths.append(str(role_jobs.save(folder / name, model, optimizer, scheduler, role_jobs.ITERATION)))
    role_jobs.process()
    return paths[0], paths[1]


def _globals(args: Any) -> dict[str, Any]:
    """All that building and loading a second model must leave alone, as comparable values."""
    import random

    import torch
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import checkpointing

    return {
        "arguments": {name: value for name, value in vars(args).items() if name != "model_type"},
        "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "tracker": {name: state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()},
        "global batch": get_current_global_batch_size(),
        "rerun": get_rerun_state_machine().state.name,
        "checkpoint version": checkpointing._CHECKPOINT_VERSION,
    }


# --- unpatched ----------------------------------------------------------------------------------------------


def _unpatched(framework: str, folder: Path) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks import role_jobs

        policy, teacher = _checkpoints(framework, folder)
        args = role_jobs.arguments(load=teacher)
        before = _globals(args)
        model, optimizer, scheduler, iteration = role_jobs.framework_model(
            framework
        ).initialize_model_and_optimizer(args, TEACHER)
        role_jobs.train(framework, (model, optimizer, scheduler), 1, role_jobs.Batches())
        weights = sum(parameter.nbytes for parameter in model[0].parameters())
        after = _globals(args)
        args.load = policy
        return {
            "class": type(model[0]).__name__,
            "bytes per byte of weights": role_jobs.live_bytes(model, optimizer) / weights,
            "iteration": iteration,
            "touched": {name for name in before if before[name] != after[name]},
            "consumed": args.consumed_train_samples,
            "second": outcome(
                role_jobs.framework_model(framework).initialize_model_and_optimizer, args, TEACHER
            ),
        }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_unpatched_a_teacher_is_built_for_training(framework: str, tmp_path: Path) -> None:
    [seen] = spawn_ranks(_unpatched, 1, framework, tmp_path)
    # float32 weights, their gradients, and two moments of Adam.
    assert 3.9 < seen.pop("bytes per byte of weights") < 4.2
    # The global batch, too, where its size depends on the samples consumed.
    assert seen.pop("touched") >= {"arguments", "torch", "tracker", "checkpoint version"}
    assert seen == {
        "class": "DistributedDataParallel",
        "iteration": 7,
        "consumed": 7 * 4,
        "second": "AssertionError: ",
    }


# --- patched: policy and teacher in one process -------------------------------------------------------------


def _policy_alone(framework: str, folder: Path) -> tuple[str, str, str]:
    with cpu_backend():
        import torch.distributed as dist

        from tests.frameworks import role_jobs
        from tests.real import tiny_gpt

        policy, teacher = _checkpoints(framework, folder / str(dist.get_rank()))
        # Of the distributed optimizer's moments, the stand-in's checkpoints tell nothing.
        args = role_jobs.arguments(load=policy, no_load_optim=True)
        *state, _ = role_jobs.framework_model(framework).initialize_model_and_optimizer(args, "actor")
        role_jobs.train(framework, state, 4, role_jobs.Batches())
        return policy, teacher, tiny_gpt.checksum(state[0], state[1])


def _side_by_side(framework: str, checkpoints: list[tuple[str, str]], order: str) -> dict[str, Any]:
    with cpu_backend():
        if order == "before":
            apply(PATCH, "reentrant-train")
        import torch
        from megatron.core.distributed import DistributedDataParallel

        from tests.frameworks import role_jobs
        from tests.real import tiny_gpt

        framework_model = role_jobs.framework_model(framework)
        if order == "after":
            apply(PATCH, "reentrant-train")
        role_jobs.process()
        policy, teacher = checkpoints[torch.distributed.get_rank()]
        args = role_jobs.arguments(load=policy, no_load_optim=True)
        batches = role_jobs.Batches()
        *state, _ = framework_model.initialize_model_and_optimizer(args, "actor")
        seen: dict[str, Any] = {
            "actor": isinstance(state[0][0], DistributedDataParallel) and state[1] is not None
        }
        role_jobs.train(framework, state, 2, batches)

        args.load = teacher
        before = copy.deepcopy(_globals(args))
        teachers = [framework_model.initialize_model_and_optimizer(args, role) for role in (TEACHER, "ref")]
        seen["touched"] = [name for name, value in _globals(args).items() if value != before[name]]
        seen["returned"] = [returned[1:] for returned in teachers]
        models = [returned[0] for returned in teachers]
        saved = torch.load(
            Path(teacher) / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False
        )["model"]
        for [model] in models:
            weights = sum(parameter.nbytes for parameter in model.parameters())
            seen.setdefault("teachers", []).append(
                {
                    "class": type(model).__name__,
                    "bytes per byte of weights": role_jobs.live_bytes(model) / weights,
                    "weights": all(
                        torch.equal(saved[name], value)
                        for name, value in model.state_dict().items()
                        if torch.is_tensor(value)
                    ),
                    "trainable": any(parameter.requires_grad for parameter in model.parameters()),
                    "training": model.training,
                    "role": model.role,
                    "own config": model.config is not state[0][0].config
                    and model.config.no_sync_func is None,
                    "scores": model(**_tokens()).shape,
                }
            )
        role_jobs.train(framework, state, 2, batches)
        seen["policy"] = tiny_gpt.checksum(state[0], state[1])
        seen["refused"] = _refusals(framework, models[0], state)
        seen["states"] = {
            site.state for site in status() if site.framework in (role_jobs.PACKAGES[framework],)
        }
        return seen


def _tokens() -> dict[str, Any]:
    import torch

    from tests.real import tiny_gpt

    positions_bs = torch.arange(tiny_gpt.SEQUENCE)[None]
    mask_ss = torch.ones(1, 1, *positions_bs.shape[-1:] * 2, dtype=torch.bool).triu(1)
    return {"input_ids": positions_bs, "position_ids": positions_bs, "attention_mask": mask_ss}


def _refusals(framework: str, model: Any, state: Any) -> dict[str, str]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.frameworks import role_jobs

    return {
        "train": outcome(role_jobs.train, framework, (model, None, None), 1, role_jobs.Batches()),
        "zero_grad_buffer": outcome(model[0].zero_grad_buffer),
        "no_sync": outcome(model[0].no_sync),
        "requires_grad_": outcome(model[0].requires_grad_),
        "get_megatron_optimizer": outcome(get_megatron_optimizer, OptimizerConfig(), model),
        "freeze": outcome(model[0].requires_grad_, False),
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("order", "ranks"), [("before", 2), ("after", 1)])
def test_policy_and_teachers_side_by_side(framework: str, order: str, ranks: int, tmp_path: Path) -> None:
    alone = spawn_ranks(_policy_alone, ranks, framework, tmp_path)
    checkpoints = [(policy, teacher) for policy, teacher, _ in alone]
    side_by_side = spawn_ranks(_side_by_side, ranks, framework, checkpoints, order)
    for (_, _, policy), seen in zip(alone, side_by_side, strict=True):
        assert seen["actor"]
        assert seen["touched"] == []
        assert seen["returned"] == [(None, None, 7)] * 2
        for teacher, role in zip(seen["teachers"], (TEACHER, "ref"), strict=True):
            assert teacher == {
                "class": "GPTModel",
                "bytes per byte of weights": pytest.approx(1, rel=0.01),
                "weights": True,
                "trainable": False,
                "training": False,
                "role": role,
                "own config": True,
                "scores": (1, 16, 32),
            }
        assert seen["policy"] == policy
        assert seen["refused"].pop("freeze") == FINE
        for what, error in seen["refused"].items():
            assert error.startswith("InferenceOnlyError: "), (what, error)
            assert f"role '{TEACHER}'" in error
            assert "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)" in error
        assert seen["states"] <= {"applied", "not needed"}


# --- what goes wrong ----------------------------------------------------------------------------------------


def _roles(framework: str, folder: Path) -> dict[str, Any]:
    with cpu_backend():
        import torch

        from tests.frameworks import role_jobs

        _, teacher = _checkpoints(framework, folder)

        def built(role: str, **options: Any) -> tuple[str, bool, int]:
            role_jobs.process()
            args = role_jobs.arguments(**({"load": teacher} | options))
            initialize = role_jobs.framework_model(framework).initialize_model_and_optimizer
            model, optimizer, _, iteration = initialize(args, role)
            return type(model[0]).__name__, optimizer is None, iteration

        apply(PATCH, settings=Settings(inference_roles=("judge",)))
        seen = {"named": built("judge"), "default": built("prm_teacher")}
        apply(PATCH)  # says nothing of settings
        seen["still named"] = built("judge")
        apply(PATCH, settings=Settings())
        seen["no longer named"] = built("judge")
        seen["trains"] = built("critic")
        seen["bf16"] = built("ref", bf16=True)
        seen["stateless"] = built("ref", use_stateless_adam=True)
        seen["sharded"] = built("ref", use_torch_fsdp2=True)
        weights = Path(folder) / "hugging_face"
        weights.mkdir()
        torch.save(role_jobs.provider().state_dict(), weights / "weights.pt")
        seen["not Megatron's"] = built("ref", load=str(weights), bf16=True)
        return seen


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_which_roles(framework: str, tmp_path: Path) -> None:
    [seen] = spawn_ranks(_roles, 1, framework, tmp_path)
    frozen, trained = ("GPTModel", True, 7), ("DistributedDataParallel", False, 7)
    assert seen == {
        "named": frozen,
        "default": trained,
        "still named": frozen,
        "no longer named": trained,
        "trains": trained,
        "bf16": ("Float16Module", True, 7),
        "stateless": frozen,
        "sharded": trained,
        "not Megatron's": ("Float16Module", True, 0),
    }


def _evaluation_only(folder: Path) -> dict[str, Any]:
    with cpu_backend():
        from tests.frameworks import role_jobs

        _, teacher = _checkpoints("slime", folder)
        model = role_jobs.framework_model("slime")

        def built(**options: Any) -> Any:
            role_jobs.process()
            args = role_jobs.arguments(load=teacher, num_rollout=0, **options)
            return model.initialize_model_and_optimizer(args, "actor")

        seen: dict[str, Any] = {"unpatched": type(built(bf16=True)[0][0]).__name__}
        apply(PATCH)
        chunks, *rest = built(bf16=True)
        seen["patched"] = type(chunks[0]).__name__, *rest
        # What the weights are sent under has one wrapper at least: see slime's named_params_and_buffers.
        seen["names"] = {name.split(".")[0] for name, _ in chunks[0].named_parameters()}
        seen["float32"] = type(built()[0][0]).__name__
        with pytest.raises(InferenceOnlyError) as caught:
            role_jobs.train("slime", (chunks, None, None), 1, role_jobs.Batches())
        seen["refused"] = "--num-rollout 0" in str(caught.value)
        return seen


def test_slime_evaluation_only(tmp_path: Path) -> None:
    [seen] = spawn_ranks(_evaluation_only, 1, tmp_path)
    assert seen == {
        "unpatched": "DistributedDataParallel",
        "patched": ("Float16Module", None, None, 7),
        "names": {"module"},
        "float32": "DistributedDataParallel",
        "refused": True,
    }


# --- scheduler-resume ---------------------------------------------------------------------------------------


def _resumed(framework: str, folder: Path, patch: bool) -> dict[str, Any]:
    with cpu_backend():
        import torch.distributed as dist

        from tests.frameworks import role_jobs

        policy, _ = _checkpoints(framework, folder / str(dist.get_rank()))
        if patch:
            apply("scheduler-resume")
        seen = {}
        for name, options in {
            "resumed": {},
            "resumed, miles' flag off": {"use_checkpoint_opt_param_scheduler": False},
            "without optimizer state": {"no_load_optim": True},
            "fine-tuned": {"finetune": True},
        }.items():
            role_jobs.process()
            args = role_jobs.arguments(load=policy, **options)
            _, optimizer, scheduler, _ = role_jobs.framework_model(framework).initialize_model_and_optimizer(
                args, "actor"
            )
            seen[name] = scheduler.num_steps, {round(group["lr"], 12) for group in optimizer.param_groups}
        if patch:
            states = {s.target.rpartition(".")[2]: s.state for s in status() if s.state != "waiting"}
            seen["states"] = states
        return seen


# Of 4000 samples 28 have been consumed.
FRESH, ONCE, TWICE = ((n, {round(5e-3 * (1 - n / 4000), 12)}) for n in (0, 28, 56))
UNPATCHED = {
    "slime": (ONCE, ONCE, FRESH, FRESH),
    "openclaw": (TWICE, TWICE, ONCE, FRESH),
    "miles": (ONCE, TWICE, FRESH, FRESH),
}


@pytest.mark.parametrize(
    ("framework", "ranks"), [("slime", 1), ("openclaw", 1), ("openclaw", 2), ("miles", 1)]
)
def test_the_schedule_goes_on_where_the_checkpoint_left_it(
    framework: str, ranks: int, tmp_path: Path
) -> None:
    names = ("resumed", "resumed, miles' flag off", "without optimizer state", "fine-tuned")
    for seen in spawn_ranks(_resumed, ranks, framework, tmp_path / "unpatched", False):
        assert tuple(seen[name] for name in names) == UNPATCHED[framework]
    for seen in spawn_ranks(_resumed, ranks, framework, tmp_path / "patched", True):
        assert tuple(seen[name] for name in names) == (ONCE, ONCE, FRESH, FRESH)
        needed = "not needed" if framework == "slime" else "applied"
        assert seen["states"] == {"initialize_model_and_optimizer": needed, "load_checkpoint": "applied"}


# --- NeMo-RL, AReaL -----------------------------------------------------------------------------------------


def _nemo_rl() -> dict[str, Any]:
    with cpu_backend():
        from types import SimpleNamespace

        import torch
        from megatron.core.distributed import DistributedDataParallelConfig
        from nemo_rl.models.megatron import setup

        from tests.frameworks import role_jobs

        role_jobs.process()
        role_jobs.arguments()
        cfg = SimpleNamespace(
            model=SimpleNamespace(provide=role_jobs.provider),
            ddp=DistributedDataParallelConfig(),
            dist=SimpleNamespace(use_torch_fsdp2=False),
        )
        seen: dict[str, Any] = {}

        def run() -> dict[str, Any]:
            built: list[Any] = []
            role_jobs.process(3)
            state = setup.setup_reference_model_state({"built": built.extend}, cfg)
            classes = {"reference": type(built[0]).__name__}
            for load in (True, False):
                model, _ = setup.setup_model_and_optimizer({"optimizer": object()}, cfg, load_optimizer=load)
                classes[f"load_optimizer={load}"] = type(model[0]).__name__
            return classes | {
                "state": {name: value for name, value in state.items() if torch.is_tensor(value)}
            }

        unpatched = run()
        apply(PATCH)
        patched = run()
        before, after = unpatched.pop("state"), patched.pop("state")
        seen["same state"] = before.keys() == after.keys() and all(
            torch.equal(before[n], after[n]) for n in before
        )
        seen |= {"unpatched": unpatched, "patched": patched}
        cfg.dist.use_torch_fsdp2 = True
        seen["sharded"] = run()["reference"]
        return seen


def test_nemo_rl() -> None:
    [seen] = spawn_ranks(_nemo_rl, 1)
    ddp = "DistributedDataParallel"
    assert seen == {
        "same state": True,
        "unpatched": {"reference": ddp, "load_optimizer=True": ddp, "load_optimizer=False": ddp},
        "patched": {"reference": "GPTModel", "load_optimizer=True": ddp, "load_optimizer=False": "GPTModel"},
        "sharded": ddp,
    }


def _areal() -> dict[str, Any]:
    with cpu_backend():
        from types import SimpleNamespace

        from areal.engine.megatron_engine import MegatronEngine
        from megatron.core.distributed import DistributedDataParallelConfig

        from tests.frameworks import role_jobs

        role_jobs.process()
        role_jobs.arguments()

        def engine(optimizer: Any = None, use_lora: bool = False, **options: Any) -> Any:
            megatron = SimpleNamespace(
                wrap_with_ddp=True,
                ddp=DistributedDataParallelConfig(overlap_grad_reduce=True),
                disable_grad_buffers_cpu_backup=False,
                use_torch_fsdp2=False,
                use_custom_fsdp=False,
            )
            vars(megatron).update(options)
            made = MegatronEngine(
                SimpleNamespace(
                    optimizer=optimizer,
                    megatron=megatron,
                    use_lora=use_lora,
                    model_provider=role_jobs.provider,
                )
            )
            made.initialize(None, None)
            return made

        seen = {"unpatched": type(engine().model[0]).__name__}
        apply(PATCH)
        reference = engine()
        seen["reference"] = type(reference.model[0]).__name__
        seen["flag"] = reference.mcore_config.wrap_with_ddp
        seen["refused"] = outcome(reference.model[0].zero_grad_buffer)
        seen["actor"] = type(engine(optimizer=object()).model[0]).__name__
        seen["adapters"] = type(engine(use_lora=True).model[0]).__name__
        seen["sharded"] = type(engine(use_torch_fsdp2=True).model[0]).__name__
        seen["offloaded"] = type(engine(disable_grad_buffers_cpu_backup=True).model[0]).__name__
        return seen


def test_areal() -> None:
    [seen] = spawn_ranks(_areal, 1)
    assert "the engine's configuration, which has no optimizer" in seen.pop("refused")
    ddp = "DistributedDataParallel"
    assert seen == {
        "unpatched": ddp,
        "reference": "GPTModel",
        "flag": True,
        "actor": ddp,
        "adapters": ddp,
        "sharded": ddp,
        "offloaded": ddp,
    }
