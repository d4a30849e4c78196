"""``inference-only`` and ``scheduler-resume`` on unmodified checkouts, as in ``test_real_reentry.py``."""

import importlib
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import applied, apply, revert, status
from megatron_rl_patches.errors import InferenceOnlyError
from tests.frameworks.import_stubs import prepare
from tests.frameworks.rollouts import check_layers, with_layers
from tests.frameworks.test_inference_roles import DDP, TEACHER
from tests.ranks import everywhere, on_ranks
from tests.references.live_bytes import reachable_bytes

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

of_each = pytest.mark.parametrize("framework", ["slime", "vime", "miles"])


@with_layers("teacher")
@pytest.mark.parametrize("ranks", [1, 2])
@of_each
@on_ranks(lambda ranks: ranks, timeout=300)
def test_policy_and_teacher_side_by_side(
    framework: str, layers: str, ranks: int, tmp_path: Path, paths: list[str]
) -> None:
    """Unpatched, the teacher is built for training."""
    prepare(paths)
    from tests.frameworks import jobs, real_jobs
    from tests.references import tiny_gpt

    policy, teacher = (
        real_jobs.save(framework, str(tmp_path / name), seed, layers=layers)
        for seed, name in enumerate(("policy", "teacher"))
    )
    model, bytes_before = real_jobs.model_of(framework), reachable_bytes()
    args = real_jobs.role_arguments(framework, {"layers": layers}, load=teacher)
    [other], *trains, _ = model.initialize_model_and_optimizer(args, TEACHER)
    assert type(other).__name__ == DDP and None not in trains
    # bfloat16 weights; float32 gradients, main parameters and two moments.
    assert reachable_bytes() - bytes_before > 5 * sum(parameter.nbytes for parameter in other.parameters())

    apply("inference-only", "scheduler-resume")
    states = {site.state for site in status() if site.framework == framework}
    assert states <= {"applied", "not needed"}
    args = real_jobs.role_arguments(framework, {"layers": layers}, load=policy)
    *state, iteration = model.initialize_model_and_optimizer(args, "actor")
    assert (iteration, state[2].num_steps) == (7, 7 * 4)
    weights = tiny_gpt.checksum(state[0], state[1])

    args = real_jobs.role_arguments(framework, {"layers": layers}, load=teacher)
    chunk = jobs.build_teacher(model.initialize_model_and_optimizer, args, TEACHER)
    assert type(chunk).__name__ == "Float16Module"
    assert tiny_gpt.checksum(state[0], state[1]) == weights
    # Ranks have the same parameters, and their own shards of the optimizer's copies.
    assert len(set(everywhere(tiny_gpt.checksum(state[0], mock.Mock(param_groups=[]))))) == 1
    assert jobs.has_weights(chunk, other.state_dict())
    arguments = dict.fromkeys(inspect.signature(model.train).parameters) | {"model": [chunk]}
    with pytest.raises(InferenceOnlyError, match=f"^train: the model of role '{TEACHER}'"):
        model.train(**arguments)


@with_layers("MoE teacher", ranks=2)
@of_each
@on_ranks(2, timeout=300)
def test_a_mixture_of_experts_as_teacher(
    framework: str, layers: str, tmp_path: Path, paths: list[str]
) -> None:
    prepare(paths)
    from tests.frameworks import jobs, real_jobs
    from tests.references import tiny_gpt

    experts: dict[str, Any] = {"kind": "moe", "ep": 2, "layers": layers}
    teacher = real_jobs.save(framework, str(tmp_path), 1, **experts)
    model = real_jobs.model_of(framework)
    apply("inference-only")
    args = real_jobs.role_arguments(framework, experts, load=teacher)
    [policy], *_ = model.initialize_model_and_optimizer(args, "actor")
    chunk = jobs.build_teacher(model.initialize_model_and_optimizer, args, TEACHER)
    assert jobs.has_weights(chunk, policy.state_dict())
    check_layers([chunk], tiny_gpt.TinyModel(**experts))
    weights = {n: v for n, v in chunk.state_dict().items() if ".experts." in n and "fc1.weight" in n}
    assert len(weights) == 2 * tiny_gpt.LAYERS
    # Each rank has its own half of the experts.
    assert len(set(everywhere(str([weight.tolist() for weight in weights.values()])))) == 2


@pytest.mark.runs("evaluation only", ranks=1)
@pytest.mark.parametrize("framework", ["slime", "miles"])
@on_ranks(1, timeout=300)
def test_evaluation_only(framework: str, tmp_path: Path, paths: list[str]) -> None:
    prepare(paths)
    from tests.frameworks import real_jobs

    policy = real_jobs.save(framework, str(tmp_path), 0)
    model = real_jobs.model_of(framework)
    weights = importlib.import_module(f"{framework}.backends.megatron_utils.update_weight.common")

    def built() -> tuple[str, list[Any], list[str]]:
        args = real_jobs.role_arguments(framework, {}, load=policy, num_rollout=0)
        chunks, *rest = model.initialize_model_and_optimizer(args, "actor")
        names = [name for name, _ in weights.named_params_and_buffers(args, chunks)]
        return type(chunks[0]).__name__, rest, names

    apply("inference-only")
    [state] = [s.state for s in status() if s.target == f"{model.__name__}.setup_model_and_optimizer"]
    if state == "not needed":
        pytest.skip("this release has no evaluation-only branch")
    kind, rest, names = built()
    assert (kind, rest) == ("Float16Module", [None, None, 7])
    assert all(name.startswith("module.module.") for name in names)
    revert()
    assert built() == (DDP, rest, names)


@pytest.mark.parametrize("kind", ["GPT", "Hybrid"])
@pytest.mark.parametrize("framework", ["megatron.training"])
@on_ranks(1, timeout=300)
def test_a_role_that_a_model_builder_of_megatron_builds(framework: str, kind: str, paths: list[str]) -> None:
    """A builder wraps its model by default. A role that only scores gets none of what training needs."""
    prepare(paths)
    from megatron.core import optimizer as optimizers
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_rl_patches.frameworks.inference_roles import NullOptimizer, freeze_role, inference_role
    from megatron_rl_patches.testing import TinyModel
    from tests.frameworks import real_jobs
    from tests.references.tiny_hybrid import TinyHybrid

    try:
        models = importlib.import_module(f"megatron.training.models.{kind.lower()}")
    except ModuleNotFoundError:
        pytest.skip("this Megatron-LM has no such builder")
    of = {"GPT": TinyModel, "Hybrid": TinyHybrid}[kind](kind="moe", bf16=True)
    of.initialize()
    real_jobs.role_arguments(framework, {"bf16": True})
    config = getattr(models, f"{kind}ModelConfig")(transformer=of.transformer_config())
    builder_class = config.get_builder_cls()
    # Its own layers are those of TransformerEngine.
    builder_class.build_model = lambda *unused, **options: of.provider(config=config.transformer)
    ddp = DistributedDataParallelConfig()

    def build(**options: Any) -> Any:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        [chunk] = builder_class(config).build_distributed_models(groups, ddp, **options)
        return chunk

    with applied("inference-only"):
        assert type(build()).__name__ == DDP
        bytes_before = reachable_bytes()
        with inference_role(TEACHER) as role:
            chunk = build()
            optimizer = optimizers.get_megatron_optimizer(optimizers.OptimizerConfig(), [chunk])
        assert isinstance(optimizer, NullOptimizer) and role.ddp_skipped
        assert type(chunk).__name__ == "Float16Module"
        weights = sum(parameter.nbytes for parameter in chunk.parameters())
        assert reachable_bytes() - bytes_before < 1.2 * weights
        freeze_role([chunk], TEACHER)
        with pytest.raises(InferenceOnlyError, match=f"the model of role '{TEACHER}' only scores"):
            optimizers.get_megatron_optimizer(optimizers.OptimizerConfig(), [chunk])
        with inference_role(TEACHER) as role:
            assert type(build(wrap_with_ddp=True)).__name__ == DDP
        assert role.reason_skipped == "the framework passes wrap_with_ddp itself"
