"""The models that people train: each promise on each model and layout, on real megatron-core.

``docs/compatibility.md`` shows as a table what passed here: ``tests/real/models.json``, which
``--record-models`` writes, with local layers and with ``--layers transformer_engine``. Dense models have
tests of their own besides, with more cases and layouts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_patches import applied
from megatron_rl_patches.inference import TeacherPool, load_inference_checkpoint
from tests.ranks import everywhere, on_ranks
from tests.real import matrix
from tests.real.test_interruption import run
from tests.real.test_lean_head import CASES, Layout, check_gradients
from tests.real.test_reentry import SETTINGS, check_rollouts
from tests.references import tiny_gpt
from tests.worlds.model import World, save, scores_of, scoring


@pytest.mark.promise("train() again")
@matrix.cells(matrix.HALVES[0], always={"MoE, EP 2"})
@on_ranks(lambda ranks: ranks)
def test_rollouts_equal_one_uninterrupted_run(ranks: int, model: dict[str, Any]) -> None:
    check_rollouts(matrix.tiny(**model))


@pytest.mark.promise("after an exception")
# Where ranks wait for each other: test_interruption.py.
@matrix.cells(matrix.HALVES[1], leave_out={"PP 2", "PP 2, VPP 2"})
@on_ranks(lambda ranks: ranks)
def test_after_an_exception_the_next_call_trains_right(ranks: int, model: dict[str, Any]) -> None:
    options = matrix.tiny(**model)
    with applied("reentrant-train", settings=SETTINGS):
        undisturbed = run(options, "", (0, 0))
        for stage in ("forward 1", "backward 1"):
            assert run(options, stage, (1, 1))[::2] == undisturbed[::2], stage


@pytest.mark.promise("scoring")
@matrix.cells(matrix.HALVES[0] | {"MoE, EP 2"}, always={"hybrid, 1 rank"})
@on_ranks(lambda ranks: ranks)
def test_scores_of_a_model_built_and_loaded_for_it(ranks: int, model: dict[str, Any], tmp_path: Path) -> None:
    options = matrix.tiny(**model)
    policy = World(options)
    policy.train(2)
    expected = policy.scores()
    save(policy.model, tmp_path)
    teacher = scoring(options)
    others = scores_of(teacher)
    pool = TeacherPool(teacher)
    pool.add("other")
    pool.add("saved", lambda chunks: load_inference_checkpoint(chunks, tmp_path))
    for name, scores in (("saved", expected), ("other", others), ("saved", expected)):
        with pool.use(name):
            torch.testing.assert_close(scores_of(teacher), scores, rtol=0, atol=0)
    # Only the last stage of a pipeline has scores.
    assert any(everywhere(len(expected) == 4 and not torch.equal(expected[0], others[0])))


@pytest.mark.promise("deferred output layer")
@matrix.cells(matrix.HALVES[1] | {"MoE, EP 2"})
@on_ranks(lambda ranks: ranks, timeout=240)
def test_gradients_of_deferred_logits(ranks: int, model: dict[str, Any]) -> None:
    options = matrix.tiny(**model)
    if options.transformer_config().mtp_num_layers and not tiny_gpt.trains_mtp_without_labels():
        pytest.skip("this release trains multi-token prediction with labels only")
    check_gradients("", Layout(ranks, flags=model), {"entropy bonus": CASES["entropy bonus"]})
