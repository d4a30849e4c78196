"""``distillation`` on unmodified checkouts, on a CPU: ``SLIME_DIR``, ``MILES_DIR``, ``MEGATRON_LM_DIR``.

The framework's own ``forward_only``, ``get_batch``, ``DataIterator``, ``train`` and ``loss_function``; the
actor, which needs Ray, is replaced by one that swaps weights as it does.
"""

from pathlib import Path

import pytest
import torch

from megatron_rl_patches import Settings, apply
from tests.frameworks.import_stubs import job_of
from tests.frameworks.rollouts import results_of, states_of
from tests.ranks import on_ranks
from tests.worlds.actors import Actor

pytestmark = [pytest.mark.frameworks, pytest.mark.slow]

NAME = "distillation"


@pytest.mark.parametrize("framework", ["slime", "miles"])
@pytest.mark.parametrize(
    ("top_k", "combine"),
    [
        pytest.param(8, "mixture", marks=pytest.mark.runs("top-k distillation", ranks=1)),
        pytest.param("full", "mixture", marks=pytest.mark.runs("exact distillation", ranks=1)),
        pytest.param("full", "average", marks=pytest.mark.runs("exact distillation", ranks=1)),
    ],
)
@on_ranks(1, timeout=300)
def test_the_student_approaches_its_teachers(
    framework: str, paths: list[str], tmp_path: Path, top_k: int | str, combine: str
) -> None:
    job_type = job_of(framework, paths)
    folders = {name: str(tmp_path / name) for name in ("math", "code")}
    for folder in map(Path, folders.values()):
        folder.mkdir()
    settings = Settings(opd_top_k=top_k, opd_combine=combine, opd_teachers=folders)
    apply(NAME, "reentrant-train", settings=settings)
    job = job_type({"loss_type": "opd_loss"})
    # Where the checkout's Megatron has been put on the path.
    from megatron.core.utils import unwrap_model

    generator = torch.Generator().manual_seed(3)
    for folder in map(Path, folders.values()):
        weights = {name: p.detach().clone() for name, p in unwrap_model(job.model[0]).named_parameters()}
        head = weights["output_layer.weight"]
        head += 0.3 * torch.randn(head.shape, generator=generator)
        torch.save(weights, folder / "weights.pt")
    from megatron_rl_patches.frameworks import distillation_loss
    from megatron_rl_patches.frameworks.distillation_teachers import TeacherScorer, scorer

    actor = Actor(job.args, job.model)
    with results_of(distillation_loss, "opd_loss") as results:
        for _ in range(12):
            with scorer.enter(TeacherScorer(actor)):
                job.train()
            actor.weights_backuper.backup("actor")
    states = states_of(framework, patch=NAME)
    # miles has moved `get_batch`, and the patch has a site for either module.
    applied = [target.rpartition(".")[2] for target, state in states.items() if state == "applied"]
    of_arguments = [f"get_{framework}_extra_args_provider", f"{framework}_validate_args"]
    assert sorted(applied) == sorted(["get_batch", "train", *of_arguments])
    assert "missing" not in states.values()
    losses = [float(metrics["loss"]) for _, metrics in results]
    assert all(loss >= 0 for loss in losses)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
