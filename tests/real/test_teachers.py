"""``TeacherPool`` on real megatron-core: scores, bytes, checkpoints."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_patches.errors import InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import (
    TeacherPool,
    estimate_memory,
    forward_hidden_states,
    forward_log_probs,
    load_inference_checkpoint,
    memory_report,
    output_head,
)
from megatron_rl_patches.inference.models.frozen import freeze
from megatron_rl_patches.testing import TinyModel
from tests.ranks import by_speed, on_ranks
from tests.real import checkpoints, matrix
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes
from tests.worlds.passes import fill_at_random
from tests.worlds.scoring import scores_of

TEACHERS = ("a", "b", "c")


def _bits(model: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    return [parameter.view(torch.uint8).clone() for chunk in model for parameter in chunk.parameters()]


@on_ranks(2, timeout=180)
def test_pooled_teachers_score_as_they_do_alone(tmp_path: Path) -> None:
    """On other layouts, see ``test_models.py``."""
    options = TinyModel(pp=2, vpp=2, bf16=True, seed=7)
    options.initialize()
    alone = tiny_gpt.inference_model(options)
    expected, states = {}, {}
    for seed, name in enumerate(TEACHERS):
        fill_at_random(alone, seed)
        expected[name] = scores_of(alone), _bits(alone)
        states[name] = [copy.deepcopy(chunk.module.state_dict()) for chunk in alone]
    checkpoints.save_torch_dist(alone, None, tmp_path, 3)

    bytes_without = reachable_bytes()
    pool: Any = TeacherPool(tiny_gpt.inference_model(options))
    model_bytes = reachable_bytes() - bytes_without
    weights = [parameter for chunk in pool.model for parameter in chunk.parameters()]
    assert model_bytes == sum(weight.nbytes for weight in weights)
    addresses = [weight.data_ptr() for weight in weights]
    for chunk, state in zip(pool.model, states["a"], strict=True):
        for key, weight in chunk.module.named_parameters():  # as loaders of Hugging Face weights do it
            weight.data.copy_(state[key])
    for name, source in (("a", None), ("b", states["b"]), ("c", tmp_path)):
        pool.add(name, source)
    assert reachable_bytes() - bytes_without == (1 + len(TEACHERS)) * model_bytes
    assert [weight.data_ptr() for weight in weights] == addresses

    for name in (*TEACHERS, *reversed(TEACHERS)):
        with pool.use(name) as model:
            assert all(map(torch.equal, scores_of(model), expected[name][0]))
            assert all(map(torch.equal, _bits(model), expected[name][1]))
    before = reachable_bytes()
    heads = {name: pool.head(name) for name in TEACHERS}
    assert reachable_bytes() - before == pool.head_bytes
    [estimated] = estimate_memory(pool.model, teachers=len(pool), teacher_heads=True).stages
    reported: Any = memory_report(pool=pool).teachers
    accounts = pool.host_bytes, pool.head_bytes
    assert (estimated.with_teachers.host, estimated.with_teachers.teacher_heads) == accounts
    assert (reported.weights, reported.heads) == accounts
    for name, head in heads.items():
        with pool.use(name) as model:
            own = output_head(model)
        assert (own is None) == (head is None)  # only the last stage has one
        assert own is None or torch.equal(own.weight, head.weight)
    pool.remove("b")
    del heads["b"]
    assert pool.head_bytes == sum(head.nbytes for head in heads.values() if head is not None)
    load_inference_checkpoint(pool.model, tmp_path)
    assert pool.resident is None, "weights that a loader brought were taken for a teacher's"
    with pool.use("a") as model:
        assert all(map(torch.equal, _bits(model), expected["a"][1]))
    assert all(map(torch.equal, _bits(pool.model), expected["c"][1]))


@pytest.mark.parametrize("kind", by_speed(("dense", "moe", "mla", "mtp", "hybrid"), fast=("dense",)))
@on_ranks(1)
def test_a_teacher_that_is_deleted_frees_its_memory_at_once(kind: str) -> None:
    options = matrix.tiny(kind, bf16=True)
    options.initialize()
    batch = {"tokens": torch.zeros(1, 8, dtype=torch.int64), "lengths": [8]}
    tiny_gpt.inference_model(options)  # Megatron's classes keep what the first model of a process makes
    gc.collect()
    gc.disable()
    try:
        model = tiny_gpt.inference_model(options)
        fill_at_random(model)
        freed = [weakref.ref(parameter) for parameter in model[0].parameters()]
        pool = TeacherPool(model)
        pool.add("math")
        with pool.use("math"):
            scores = forward_log_probs(model, [batch], progress=False)
            hidden = forward_hidden_states(model, [batch], progress=False)
        head = pool.head("math")
        freed += map(weakref.ref, (pool, head.weight, hidden[0], scores.log_probs[0]))
        with pytest.raises(InvalidInputError, match="do not fit"):
            forward_log_probs(model, [{**batch, "lengths": [9]}], progress=False)
        assert model[0].requires_grad_(False) is model[0]
        del model, pool, scores, hidden, head
        assert [tensor() for tensor in freed if tensor() is not None] == []
    finally:
        gc.enable()
    layer = torch.nn.Linear(2, 2)
    freeze([layer], "teacher", "a test")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    with pytest.raises(InferenceOnlyError, match=r"requires_grad_\(True\)"):
        copied.requires_grad_()
    assert copied.requires_grad_(False) is copied
