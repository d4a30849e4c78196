"""``inference-only`` and ``scheduler-resume`` on stand-ins for frameworks, and real megatron-core.

Every test runs in fresh processes. A patched framework's teacher costs its weights, and the policy beside it
is trained as if it were alone. What a teacher costs unpatched is in ``test_real_inference_roles.py``.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import Settings, apply, status
from megatron_rl_patches.errors import InferenceOnlyError
from tests.frameworks.rollouts import outcome
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "inference-only"
TEACHER = "prm_teacher"
DDP = "DistributedDataParallel"


@pytest.mark.parametrize(("framework", "ranks"), [("slime", 2), ("miles", 1)])
@on_ranks(lambda ranks: ranks)
def test_policy_and_teachers_side_by_side(framework: str, ranks: int, tmp_path: Path) -> None:
    import rl_framework
    from megatron.core import optimizer

    from tests.frameworks import role_jobs
    from tests.references import tiny_gpt

    policy, teacher = role_jobs.checkpoints(framework, tmp_path / str(dist.get_rank()))
    model = role_jobs.framework_model(framework)

    def policy_and_batches() -> Any:
        role_jobs.process()
        # Of the distributed optimizer's moments, the stand-in's checkpoints tell nothing.
        args = role_jobs.arguments(load=policy, no_load_optim=True)
        return args, model.initialize_model_and_optimizer(args, "actor")[:3], role_jobs.Batches()

    _, state, batches = policy_and_batches()
    role_jobs.train(framework, state, 4, batches)
    alone = tiny_gpt.checksum(state[0], state[1])

    apply(PATCH, "reentrant-train")
    args, state, batches = policy_and_batches()
    assert type(state[0][0]).__name__ == DDP and state[1] is not None
    role_jobs.train(framework, state, 2, batches)
    args.load = teacher
    saved = torch.load(Path(teacher) / role_jobs.WEIGHTS, weights_only=False)["model"]
    teachers = []
    for role in (TEACHER, "ref"):
        chunk = role_jobs.build_teacher(model.initialize_model_and_optimizer, args, role)
        assert type(chunk).__name__ == "GPTModel" and chunk.role == role
        assert role_jobs.has_weights(chunk, saved)
        assert chunk.config is not state[0][0].config and chunk.config.no_sync_func is None
        assert rl_framework.logits_of(chunk, torch.arange(16)[None]).shape == (1, 16, 32)
        teachers.append([chunk])
    role_jobs.train(framework, state, 2, batches)
    assert tiny_gpt.checksum(state[0], state[1]) == alone
    for error in (
        outcome(role_jobs.train, framework, (teachers[0], None, None), 1, role_jobs.Batches()),
        outcome(optimizer.get_megatron_optimizer, optimizer.OptimizerConfig(), teachers[0]),
    ):
        assert error.startswith("InferenceOnlyError: ")
        assert f"role '{TEACHER}'" in error
        assert "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)" in error
    assert {site.state for site in status() if site.framework == framework} <= {"applied", "not needed"}


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(1)
def test_which_roles(framework: str, tmp_path: Path) -> None:
    from tests.frameworks import role_jobs

    _, teacher = role_jobs.checkpoints(framework, tmp_path)
    module = role_jobs.framework_model(framework)

    def built(role: str, **options: Any) -> tuple[str, bool, int]:
        role_jobs.process()
        args = role_jobs.arguments(**({"load": teacher} | options))
        model, optimizer, _, iteration = module.initialize_model_and_optimizer(args, role)
        return type(model[0]).__name__, optimizer is None, iteration

    frozen, trained = ("GPTModel", True, 7), (DDP, False, 7)
    apply(PATCH, settings=Settings(inference_roles=("judge",)))
    assert built("judge") == frozen
    assert built("prm_teacher") == trained
    apply(PATCH)  # says nothing of settings
    assert built("judge") == frozen
    apply(PATCH, settings=Settings())
    assert built("judge") == trained
    assert built("ref", bf16=True) == ("Float16Module", True, 7)
    assert built("ref", use_stateless_adam=True) == frozen
    assert built("ref", use_torch_fsdp2=True) == trained
    weights = tmp_path / "hugging_face"
    weights.mkdir()
    torch.save(role_jobs.provider().state_dict(), weights / "weights.pt")
    assert built("ref", load=str(weights), bf16=True) == ("Float16Module", True, 0)


@pytest.mark.slow
@on_ranks(1)
def test_slime_evaluation_only(tmp_path: Path) -> None:
    from tests.frameworks import role_jobs

    _, teacher = role_jobs.checkpoints("slime", tmp_path)
    model = role_jobs.framework_model("slime")

    def built(**options: Any) -> Any:
        role_jobs.process()
        args = role_jobs.arguments(load=teacher, num_rollout=0, **options)
        return model.initialize_model_and_optimizer(args, "actor")

    assert type(built(bf16=True)[0][0]).__name__ == DDP
    apply(PATCH)
    chunks, *rest = built(bf16=True)
    assert (type(chunks[0]).__name__, *rest) == ("Float16Module", None, None, 7)
    # What the weights are sent under has one wrapper at least: see slime's named_params_and_buffers.
    assert {name.split(".")[0] for name, _ in chunks[0].named_parameters()} == {"module"}
    assert type(built()[0][0]).__name__ == DDP
    with pytest.raises(InferenceOnlyError, match="--num-rollout 0"):
        role_jobs.train("slime", (chunks, None, None), 1, role_jobs.Batches())


# Of 4000 samples 28 have been consumed.
FRESH, ONCE, TWICE = ((n, {round(5e-3 * (1 - n / 4000), 12)}) for n in (0, 28, 56))
RESUMED: list[dict[str, bool]] = [
    {},
    {"use_checkpoint_opt_param_scheduler": False},  # miles' flag
    {"no_load_optim": True},
    {"finetune": True},
]


@pytest.mark.parametrize(
    ("framework", "ranks", "flag_off", "state"),
    [
        pytest.param("slime", 1, ONCE, "not needed", marks=pytest.mark.slow),
        ("miles", 2, TWICE, "applied"),
    ],
)
@on_ranks(lambda ranks: ranks)
def test_the_schedule_goes_on_where_the_checkpoint_left_it(
    framework: str, ranks: int, flag_off: Any, state: str, tmp_path: Path
) -> None:
    from tests.frameworks import role_jobs

    policy, _ = role_jobs.checkpoints(framework, tmp_path / str(dist.get_rank()))
    model = role_jobs.framework_model(framework)

    def resumed(options: dict[str, bool]) -> tuple[int, set[float]]:
        role_jobs.process()
        args = role_jobs.arguments(load=policy, **options)
        _, optimizer, scheduler, _ = model.initialize_model_and_optimizer(args, "actor")
        return scheduler.num_steps, {round(group["lr"], 12) for group in optimizer.param_groups}

    assert list(map(resumed, RESUMED)) == [ONCE, flag_off, FRESH, FRESH]
    apply("scheduler-resume")
    assert list(map(resumed, RESUMED)) == [ONCE, ONCE, FRESH, FRESH]
    states = {s.target.rpartition(".")[2]: s.state for s in status() if s.state not in ("waiting", "absent")}
    assert states == {"initialize_model_and_optimizer": state, "load_checkpoint": state}


@on_ranks(1)
def test_nemo_rl() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from nemo_rl.models.megatron import setup

    from tests.frameworks import role_jobs

    role_jobs.arguments()
    cfg = SimpleNamespace(
        model=SimpleNamespace(provide=role_jobs.provider),
        ddp=DistributedDataParallelConfig(),
        dist=SimpleNamespace(use_torch_fsdp2=False),
    )

    def run() -> tuple[dict[str, Any], list[str]]:
        """State of the reference model, and classes: of it, and of models with and without optimizer."""
        built: list[Any] = []
        role_jobs.process(3)
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

    from tests.frameworks import role_jobs
    from tests.frameworks.loss_jobs import Arguments

    role_jobs.process()
    role_jobs.arguments()

    def built(optimizer: Any = None, use_lora: bool = False, **options: Any) -> tuple[str, Any]:
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
        megatron = Arguments(wrap_with_ddp=True, ddp=ddp, **options)
        config = {"optimizer": optimizer, "megatron": megatron, "use_lora": use_lora}
        engine = MegatronEngine(SimpleNamespace(**config, model_provider=role_jobs.provider))
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
