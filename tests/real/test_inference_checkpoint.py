"""Checkpoints of a model that trains, loaded into models that only score, on real megatron-core."""

import logging
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.errors import CheckpointError, InferenceOnlyError, InvalidInputError
from megatron_rl_patches.inference import TeacherPool, build_inference_model, load_inference_checkpoint
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import by_speed, everywhere, on_ranks
from tests.worlds.model import World, critic, equal, on_rank_0, save, scores_of, scoring, whole_weights

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

ITERATION, EARLIER = 40, 20
TP: dict[str, Any] = {"tp": 2}
PP: dict[str, Any] = {"pp": 2}
VPP: dict[str, Any] = {"pp": 2, "vpp": 2}
EXPERTS = {"kind": "moe", "config": {"moe_ffn_hidden_size": 48}}
#: Options of a model that is saved, of both models, and of those that load it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "TP 2, bf16": (TP, {"bf16": True}, [TP, VPP]),
    "PP 2, VPP 2": (VPP, {}, [{}, TP, PP]),
    "EP 2": ({"ep": 2}, EXPERTS, [{"ep": 2}, {}, PP]),
}


def _options(kind: str = "dense", config: Any = None, **sizes: Any) -> TinyModel:
    return tiny_model(kind, config={"gated_linear_unit": True, **(config or {})}, **sizes)


def _saved(options: TinyModel, root: Path, iteration: int = ITERATION) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint of a trained model, and its weights."""
    world = World(options)
    world.train(2)
    return world.save(root, iteration), whole_weights(world.model)


def overwrite(folder: Path, part_of_name: str, files: str = "") -> int:
    """Destroy the pieces of such entries in files with this prefix; return their bytes."""
    pieces = [
        piece
        for index, piece in FileSystemReader(folder).read_metadata().storage_data.items()
        # Names of optimizer state end in those of weights.
        if part_of_name in index.fqn and ("optimizer." in index.fqn) == ("optimizer." in part_of_name)
        if piece.relative_path.startswith(files)
    ]
    for piece in pieces:
        with (folder / piece.relative_path).open("r+b") as file:
            file.seek(piece.offset)
            file.write(b"\xff" * piece.length)
    return sum(piece.length for piece in pieces)


@pytest.mark.parametrize("case", by_speed(CASES, fast=("TP 2, bf16",), nightly=("PP 2, VPP 2",)))
@on_ranks(2)
def test_any_layout_loads_bit_for_bit_without_the_optimizer(case: str, tmp_path: Path) -> None:
    sizes, common, layouts = CASES[case]
    folder, reference = _saved(_options(**common, **sizes), tmp_path)
    overwritten = on_rank_0(overwrite, folder, "optimizer.")
    assert overwritten != 0, "there was optimizer state, and loading does without it"
    for layout in layouts:
        chunks = scoring(_options(**common, **layout))
        assert not equal(whole_weights(chunks), reference)
        addresses = [parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()]
        generators = random.getstate(), torch.get_rng_state()
        assert load_inference_checkpoint(chunks, tmp_path) == ITERATION
        assert equal(whole_weights(chunks), reference)
        assert addresses == [p.data_ptr() for chunk in chunks for p in chunk.parameters()]
        assert not any(p.requires_grad for chunk in chunks for p in chunk.parameters())
        assert not any(module.training for chunk in chunks for module in chunk.modules())
        assert generators[0] == random.getstate() and torch.equal(generators[1], torch.get_rng_state())
    if case == "EP 2":
        assert sum("experts.3.linear_fc1.weight" in name for name in reference) == 4
    if case == "TP 2, bf16":
        wide = scoring(_options(**PP))
        load_inference_checkpoint(wide, tmp_path)
        assert equal(whole_weights(wide), {name: tensor.float() for name, tensor in reference.items()})
        padded = scoring(_options(bf16=True, vocab_size=40))
        load_inference_checkpoint(padded, tmp_path)
        weight = padded[0].module.embedding.word_embeddings.weight
        assert torch.equal(weight[:32], reference["embedding.word_embeddings.weight"])
        assert len(weight) == 40 and (weight[32:] == 0).all()


def refused(expected: str, path: Path, chunks: list[Any], *, alike: bool = True, **options: Any) -> None:
    before = whole_weights(chunks)
    with pytest.raises(CheckpointError) as raised:
        load_inference_checkpoint(chunks, path, **options)
    text = str(raised.value)
    assert re.search(expected, text, re.DOTALL), (expected, text)
    assert equal(before, whole_weights(chunks)), f"{text}: the weights have changed"
    assert text.endswith("Nothing was loaded; the weights are as before.")
    first, second = everywhere(text)
    assert (first == second) == alike


@pytest.mark.slow
@on_ranks(2)
def test_what_is_broken_says_so_on_every_rank_and_leaves_the_weights(tmp_path: Path) -> None:
    healthy = tmp_path / "healthy"
    _saved(_options(**TP), healthy, EARLIER)
    folder, trained = _saved(_options(**TP), healthy)
    chunks = scoring(_options(**TP))
    # What rank 1 alone reads. Tests of one rank have hostile files.
    broken = tmp_path / "broken"
    on_rank_0(shutil.copytree, healthy, broken)
    on_rank_0(overwrite, broken / folder.name, "linear_proj.weight", "__1_")
    refused(r"cannot load .*__1_\d\.distcp is corrupt", broken, chunks)

    # Refused before any collective: the other rank is not there.
    if dist.get_rank() == 0:
        on_meta = [*chunks, torch.nn.Linear(2, 2, device="meta")]
        for wrong, text in (([], "model has no chunks"), (on_meta, "chunk 1: weight is on the meta device")):
            with pytest.raises(InvalidInputError, match=text):
                load_inference_checkpoint(wrong, healthy)

    apart = folder if dist.get_rank() == 0 else healthy / f"iter_{EARLIER:07d}"
    refused("rank 0: iter_0000040, rank 1: iter_0000020", apart, chunks)
    # Each rank quotes the path that it was given.
    nowhere = folder if dist.get_rank() == 0 else tmp_path / "nowhere"
    refused("rank 1: .*nowhere: no such folder", nowhere, chunks, alike=False)
    # After all those errors the ranks are still in step.
    assert load_inference_checkpoint(chunks, healthy) == ITERATION
    assert equal(whole_weights(chunks), trained)

    uncovered = scoring(_options(**TP))
    uncovered[0].decoder.layers[0].mlp.extra = torch.nn.Parameter(torch.ones(2))
    refused(r"missing in the checkpoint \(1\): decoder\.layers\.0\.mlp\.extra", healthy, uncovered)
    for expected, options, exact in (
        (r"every rank: .*unexpected .* \(4\): decoder\.", {"config": {"add_bias_linear": False}}, False),
        (r"of another shape \(2\): embedding\..*weight is \[32, 32\] in", {"vocab_size": 32 + 2048}, False),
        (r"shape \(2\): embedding\..*weight is \[32, 32\] .* \[40, 32\]", {"vocab_size": 40}, True),
        (r"of another dtype .* torch.float32 in the checkpoint and torch.bfloat16 in", {"bf16": True}, True),
    ):
        refused(expected, healthy, scoring(_options(**TP, **options)), exact=exact)


@pytest.mark.slow
@on_ranks(1)
def test_layers_of_multi_token_prediction_are_loaded_on_demand(tmp_path: Path) -> None:
    messages: list[str] = []
    logger = logging.getLogger("megatron_rl_patches")
    handler = mock.Mock(level=logging.INFO, handle=lambda record: messages.append(record.getMessage()))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    policy = World(kind="mtp")
    tiny, [chunk] = policy.options, policy.model
    expected = policy.scores()
    # As before it was scored: it goes on training.
    assert unwrap(chunk).config.mtp_num_layers == 1 and unwrap(chunk).mtp_process
    policy.save(tmp_path)
    for with_mtp in (False, True):
        config = tiny.transformer_config()
        teacher: Any = build_inference_model(tiny.provider, config, dtype="fp32", with_mtp=with_mtp)
        assert any(name.startswith("mtp.") for name in teacher[0].state_dict()) is with_mtp
        assert load_inference_checkpoint(teacher, tmp_path) == 3
        assert all(map(torch.equal, scores_of(teacher), expected))
    [line] = [message for message in messages if "mtp." in message]
    assert "multi-token prediction (mtp.*) are not loaded" in line


@on_ranks(2)
def test_a_head_of_another_kind_is_no_padding_and_can_be_left_out(tmp_path: Path) -> None:
    """With pipeline stages, the rank that has the head has no embeddings to compare it with."""
    models: dict[str, Callable[[], Any]] = {}
    for name, tiny in {"untied": _options(**PP), "tied": _options(tied=True)}.items():
        models |= {name: partial(scoring, tiny), f"critic, {name}": partial(critic, tiny)}
    stored = {}
    for name, build in models.items():
        save(chunks := build(), tmp_path / name, ITERATION)
        stored[name] = whole_weights(chunks)
    for source, target, reason in (
        ("untied", "critic, untied", r"another kind \(1\): output_layer.weight has 32 rows in .* and 1 in"),
        ("critic, untied", "untied", "output_layer.weight has 1 rows in the checkpoint and 32 in the model"),
        ("tied", "critic, tied", r"missing in the checkpoint \(1\): output_layer.weight"),
        ("critic, tied", "tied", r"unexpected in the checkpoint \(1\): output_layer.weight"),
    ):
        chunks = models[target]()
        refused(f"every rank: .*{reason}.*pass with_output_head=False", tmp_path / source, chunks)
        before = whole_weights(chunks)
        assert load_inference_checkpoint(chunks, tmp_path / source, with_output_head=False) == ITERATION
        after = whole_weights(chunks)
        head = "output_layer.weight"
        expected = {name: stored[source].get(name) for name in after if name != head}
        assert equal({name: after[name] for name in expected}, expected)
        # The last stage of a tied model has a copy of the embeddings under the name of a head.
        own = stored[source]["embedding.word_embeddings.weight"] if target == "tied" else before.get(head)
        assert head not in after or torch.equal(after[head], own)
    assert load_inference_checkpoint(models["critic, tied"](), tmp_path / "critic, untied") == ITERATION


@on_ranks(1)
def test_weights_that_an_optimizer_would_put_back_are_not_loaded(tmp_path: Path) -> None:
    for sharded in (True, False):
        world = World(_options(bf16=True, use_distributed_optimizer=sharded, overlap_param_gather=False))
        if sharded:
            save(world.model, tmp_path, ITERATION)
        with pytest.raises(CheckpointError, match=r"has a main par.*optimizer\.reload_model_params\(\)"):
            load_inference_checkpoint(world.model, tmp_path)
        unwrap(world.model[0]).requires_grad_(False)
        with pytest.raises(InferenceOnlyError, match="has a main parameter: a pool overwrites"):
            TeacherPool(world.model)
    # The optimizer updates the weights themselves.
    assert load_inference_checkpoint(World(_options()).model, tmp_path) == ITERATION
