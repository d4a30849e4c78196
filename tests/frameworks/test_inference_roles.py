"""``inference-only`` and ``scheduler-resume`` on stand-ins for frameworks, and real megatron-core.

Every test runs in fresh processes. A patched framework's teacher costs its weights, and leaves the policy
beside it and all globals as they were. What it costs unpatched is in ``test_real_inference_roles.py``.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches import apply, status
from megatron_rl_patches.errors import InferenceOnlyError
from tests.frameworks.rollouts import outcome, states_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "inference-only"
TEACHER = "prm_teacher"
DDP = "DistributedDataParallel"


@on_ranks(1)
def test_policy_and_teachers_side_by_side(tmp_path: Path) -> None:
    from megatron.core import optimizer

    from tests.frameworks import jobs
    from tests.references import tiny_gpt

    policy, teacher = jobs.checkpoints(tmp_path)
    slime, batches = jobs.slime_model(), jobs.Batches()
    apply(PATCH, "reentrant-train")
    args = jobs.global_arguments(load=policy)
    state = slime.initialize_model_and_optimizer(args, "actor")[:3]
    assert type(state[0][0]).__name__ == DDP and state[1] is not None
    jobs.train(state, 2, batches)
    trained = tiny_gpt.checksum(state[0], state[1])
    args.load = teacher
    saved = torch.load(Path(teacher) / jobs.WEIGHTS, weights_only=False)["model"]
    teachers = []
    for role in (TEACHER, "ref"):
        chunk = jobs.build_teacher(slime.initialize_model_and_optimizer, args, role)
        assert type(chunk).__name__ == "GPTModel" and chunk.role == role
        assert jobs.has_weights(chunk, saved)
        assert chunk.config is not state[0][0].config and chunk.config.no_sync_func is None
        assert slime.logits_of(chunk, torch.arange(16)[None]).shape == (1, 16, 32)
        teachers.append([chunk])
    assert tiny_gpt.checksum(state[0], state[1]) == trained
    jobs.train(state, 1, batches)
    for error in (
        outcome(jobs.train, (teachers[0], None, None), 1, jobs.Batches()),
        outcome(optimizer.get_megatron_optimizer, optimizer.OptimizerConfig(), teachers[0]),
    ):
        assert error.startswith("InferenceOnlyError: ")
        assert f"role '{TEACHER}'" in error
        assert "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)" in error
    assert {site.state for site in status() if site.framework == "slime"} <= {"applied", "not needed"}


@on_ranks(1)
def test_which_models_and_schedules_are_built(tmp_path: Path) -> None:
    """Of slime that only evaluates, of a sharded teacher, and of a policy that goes on with a schedule."""
    from tests.frameworks import jobs

    policy, _ = jobs.checkpoints(tmp_path)

    def built(role: str = "actor", **options: Any) -> Any:
        jobs.process()
        args = jobs.global_arguments(load=policy, **options)
        return jobs.slime_model().initialize_model_and_optimizer(args, role)

    def kind(*role: str, **options: Any) -> str:
        return type(built(*role, **options)[0][0]).__name__

    evaluates = {"num_rollout": 0, "bf16": True}
    assert kind(**evaluates) == DDP
    apply(PATCH)
    chunks, *rest = built(**evaluates)
    assert (type(chunks[0]).__name__, *rest) == ("Float16Module", None, None, 7)
    # What the weights are sent under has one wrapper at least: see slime's named_params_and_buffers.
    assert {name.split(".")[0] for name, _ in chunks[0].named_parameters()} == {"module"}
    assert kind(num_rollout=0) == DDP
    with pytest.raises(InferenceOnlyError, match="--num-rollout 0"):
        jobs.train((chunks, None, None), 1, jobs.Batches())
    assert kind("ref", bf16=True) == "Float16Module"
    assert kind("ref", use_torch_fsdp2=True) == DDP

    def resumed(**options: bool) -> tuple[int, set[float]]:
        _, optimizer, scheduler, _ = built(**options)
        return scheduler.num_steps, {round(group["lr"], 12) for group in optimizer.param_groups}

    # Of 4000 samples 28 have been consumed.
    fresh, once, twice = ((n, {round(5e-3 * (1 - n / 4000), 12)}) for n in (0, 28, 56))
    assert [resumed(), resumed(no_load_optim=True), resumed(finetune=True)] == [twice, once, fresh]
    apply("scheduler-resume")
    assert [resumed(), resumed(no_load_optim=True), resumed(finetune=True)] == [once, fresh, fresh]
    assert set(states_of("slime", patch="scheduler-resume").values()) == {"applied"}


@on_ranks(1)
def test_nemo_rl() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo_rl.models.megatron import setup

    from tests.frameworks import jobs

    jobs.global_arguments()
    cfg = SimpleNamespace(
        model=SimpleNamespace(provide=jobs.provider),
        ddp=DistributedDataParallelConfig(),
        dist=SimpleNamespace(use_torch_fsdp2=False),
    )

    def run() -> tuple[dict[str, Any], list[str]]:
        """State of the reference model, and classes: of it, and of models with and without optimizer."""
        built: list[Any] = []
        jobs.process(3)
        state = setup.setup_reference_model_state({"built": built.extend}, cfg)
        for load in (True, False):
            model, _ = setup.setup_model_and_optimizer({"optimizer": object()}, cfg, load_optimizer=load)
            built.append(model[0])
        return state, [type(chunk).__name__ for chunk in built]

    unpatched, classes = run()
    assert classes == [DDP] * 3
    apply(PATCH)
    patched, classes = run()
    assert classes == ["GPTModel", DDP, "GPTModel"]
    assert unpatched.keys() == patched.keys()
    assert all(torch.equal(unpatched[name], patched[name]) for name in unpatched)
    cfg.dist.use_torch_fsdp2 = True
    assert run()[1][0] == DDP


@on_ranks(1)
def test_areal() -> None:
    from areal.engine.megatron_engine import MegatronEngine
    from megatron.core.distributed import DistributedDataParallelConfig

    from tests.frameworks import jobs
    from tests.frameworks.loss_jobs import Arguments

    jobs.process()
    jobs.global_arguments()

    def built(optimizer: Any = None, use_lora: bool = False, **options: Any) -> tuple[str, Any]:
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
        megatron = Arguments(wrap_with_ddp=True, ddp=ddp, **options)
        config = {"optimizer": optimizer, "megatron": megatron, "use_lora": use_lora}
        engine = MegatronEngine(SimpleNamespace(**config, model_provider=jobs.provider))
        engine.initialize(None, None)
        return type(engine.model[0]).__name__, engine

    assert built()[0] == DDP
    apply(PATCH)
    name, reference = built()
    assert name == "GPTModel" and reference.mcore_config.wrap_with_ddp is True
    refused = outcome(reference.model[0].zero_grad_buffer)
    assert "the engine's configuration, which has no optimizer" in refused
    for option in ("optimizer", "use_lora", "use_torch_fsdp2", "disable_grad_buffers_cpu_backup"):
        assert built(**{option: True})[0] == DDP, option
