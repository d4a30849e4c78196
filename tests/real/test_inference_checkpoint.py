"""Checkpoints of a model that trains, loaded into models that only score, on real megatron-core."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import everywhere, on_ranks
from tests.real import checkpoints

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

ITERATION, EARLIER = 40, 20
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 1": {},
    "TP 2": {"tp": 2},
    "PP 2": {"pp": 2},
    "PP 2, VPP 2": {"pp": 2, "vpp": 2},
}


def _options(
    layout: str, bf16: bool = False, kind: str = "dense", ep: int = 1, vocab_size: int = 32, **config: Any
) -> TinyModel:
    """``config`` are further fields of Megatron's."""
    return tiny_model(kind, **LAYOUTS[layout], ep=ep, bf16=bf16, vocab_size=vocab_size, config=config)


def _on_rank_0(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    dist.barrier()
    value = function(*args, **kwargs) if dist.get_rank() == 0 else None
    dist.barrier()
    return value


# ---------------------------------------------------------------------------- what loads


@pytest.mark.parametrize(
    ("saved", "bf16"),
    [
        ("TP 2", True),
        pytest.param("TP 1", False, marks=pytest.mark.slow),
        pytest.param("PP 2, VPP 2", False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_any_layout_loads_bit_for_bit_without_the_optimizer(saved: str, bf16: bool, tmp_path: Path) -> None:
    model, optimizer = checkpoints.trained(_options(saved, bf16, gated_linear_unit=True))
    folder = checkpoints.save_torch_dist(model, optimizer, tmp_path, ITERATION)
    reference = checkpoints.whole_weights(model)
    overwritten = _on_rank_0(checkpoints.overwrite, folder, "optimizer.")
    assert overwritten != 0, "there was optimizer state, and loading does without it"
    for layout in LAYOUTS:
        chunks = checkpoints.scoring(_options(layout, bf16, gated_linear_unit=True))
        assert not checkpoints.equal(checkpoints.whole_weights(chunks), reference)
        addresses = [parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()]
        generators = random.getstate(), torch.get_rng_state()
        assert load_inference_checkpoint(chunks, tmp_path) == ITERATION
        assert checkpoints.equal(checkpoints.whole_weights(chunks), reference)
        assert addresses == [p.data_ptr() for chunk in chunks for p in chunk.parameters()]
        assert not any(p.requires_grad for chunk in chunks for p in chunk.parameters())
        assert not any(module.training for chunk in chunks for module in chunk.modules())
        assert generators[0] == random.getstate() and torch.equal(generators[1], torch.get_rng_state())


@pytest.mark.slow
@on_ranks(2)
def test_experts_move_between_ranks(tmp_path: Path) -> None:
    config = {"moe_ffn_hidden_size": 48, "gated_linear_unit": True}
    model, optimizer = checkpoints.trained(_options("TP 1", kind="moe", ep=2, **config))
    checkpoints.save_torch_dist(model, optimizer, tmp_path, ITERATION)
    reference = checkpoints.whole_weights(model)
    assert sum("experts.3.linear_fc1.weight" in name for name in reference) == 4
    for expert_parallel, layout in ((2, "TP 1"), (1, "TP 1"), (1, "PP 2")):
        chunks = checkpoints.scoring(_options(layout, kind="moe", ep=expert_parallel, **config))
        load_inference_checkpoint(chunks, tmp_path)
        assert checkpoints.equal(checkpoints.whole_weights(chunks), reference)


@pytest.mark.slow
@on_ranks(2)
def test_another_dtype_and_a_padded_vocabulary_load(tmp_path: Path) -> None:
    """Which folder a path leads to is tested in tests/unit/inference/checkpoints."""
    model, optimizer = checkpoints.trained(_options("TP 2", bf16=True))
    checkpoints.save_torch_dist(model, optimizer, tmp_path, ITERATION)
    saved = checkpoints.whole_weights(model)
    wide = checkpoints.scoring(_options("PP 2"))
    load_inference_checkpoint(wide, tmp_path)
    as_float32 = {name: tensor.float() for name, tensor in saved.items()}
    assert checkpoints.equal(checkpoints.whole_weights(wide), as_float32)
    padded = checkpoints.scoring(_options("TP 1", bf16=True, vocab_size=40))
    load_inference_checkpoint(padded, tmp_path)
    weight = padded[0].module.embedding.word_embeddings.weight
    assert torch.equal(weight[:32], saved["embedding.word_embeddings.weight"])
    assert len(weight) == 40 and (weight[32:] == 0).all()


# ---------------------------------------------------------------------------- what does not


def _first_file(folder: Path) -> Path:
    return min(folder.glob("*.distcp"))


def _cut_the_first_shard(folder: Path) -> None:
    checkpoints.cut(folder, _first_file(folder).name, "decoder.")


def _spoil_what_rank_1_reads(folder: Path) -> None:
    assert checkpoints.overwrite(folder, "linear_proj.weight", only_rank=1) > 0


# What is done to the folder of an iteration -> what the error says. Tests of one rank have hostile files.
DAMAGES: dict[Callable[[Path], object], str] = {
    lambda folder: (folder / "metadata.json").unlink(): "every rank: .*a part of a torch_dist checkpoint",
    lambda folder: (folder / ".metadata").unlink(): ".metadata is missing",
    lambda folder: _first_file(folder).unlink(): r"1 missing \(__0_0.distcp\)",
    _cut_the_first_shard: r"1 truncated \(__0_0.distcp\)",
    _spoil_what_rank_1_reads: r"cannot read .*__1_\d\.distcp is corrupt",
}


def refused(expected: str, path: Path, chunks: list[Any], *, alike: bool = True, **options: Any) -> None:
    before = checkpoints.whole_weights(chunks)
    with pytest.raises(CheckpointError) as raised:
        load_inference_checkpoint(chunks, path, **options)
    text = str(raised.value)
    assert re.search(expected, text, re.DOTALL), (expected, text)
    assert checkpoints.equal(before, checkpoints.whole_weights(chunks)), f"{text}: the weights have changed"
    assert text.endswith("Nothing was loaded; the weights are as before.")
    first, second = everywhere(text)
    assert (first == second) == alike


@pytest.mark.slow
@on_ranks(2)
def test_what_is_broken_says_so_on_every_rank_and_leaves_the_weights(tmp_path: Path) -> None:
    healthy = tmp_path / "healthy"
    model, optimizer = checkpoints.trained(_options("TP 2"))
    checkpoints.save_torch_dist(model, optimizer, healthy, EARLIER)
    folder = checkpoints.save_torch_dist(model, optimizer, healthy, ITERATION)
    trained = checkpoints.whole_weights(model)
    chunks = checkpoints.scoring(_options("TP 2"))
    damages = dict(DAMAGES)
    if (folder / "common.pt").exists():  # megatron-core 0.19 keeps the common state elsewhere
        damages[lambda folder: (folder / "common.pt").unlink()] = "common.pt is missing"
    for number, (damage, expected) in enumerate(damages.items()):
        broken = tmp_path / str(number)
        _on_rank_0(shutil.copytree, healthy, broken)
        _on_rank_0(damage, broken / folder.name)
        refused(expected, broken, chunks)

    # Refused before any collective: the other rank is not there.
    if dist.get_rank() == 0:
        for wrong, text in (
            ([], "model has no chunks"),
            ([*chunks, torch.nn.Linear(2, 2, device="meta")], "chunk 1 is on the meta device"),
        ):
            with pytest.raises(InvalidInputError, match=text):
                load_inference_checkpoint(wrong, healthy)

    apart = folder if dist.get_rank() == 0 else healthy / f"iter_{EARLIER:07d}"
    refused("rank 0: iter_0000040, rank 1: iter_0000020", apart, chunks)
    # Each rank quotes the path that it was given.
    nowhere = folder if dist.get_rank() == 0 else tmp_path / "nowhere"
    refused("rank 1: .*nowhere: no such folder", nowhere, chunks, alike=False)
    # After all those errors the ranks are still in step.
    assert load_inference_checkpoint(chunks, healthy) == ITERATION
    assert checkpoints.equal(checkpoints.whole_weights(chunks), trained)

    unbiased = {"add_bias_linear": False}
    without_bias = checkpoints.scoring(_options("PP 2", **unbiased))
    refused(r"every rank: .*unexpected in the checkpoint \(4\): decoder\.layers\.", healthy, without_bias)
    model, optimizer = checkpoints.trained(_options("TP 2", **unbiased))
    checkpoints.save_torch_dist(model, optimizer, tmp_path / "unbiased", 1)
    missing = r"every rank: .*tensors missing in the checkpoint \(4\): decoder\.layers\.mlp\.linear_"
    refused(missing, tmp_path / "unbiased", checkpoints.scoring(_options("PP 2")))
    uncovered = checkpoints.scoring(_options("TP 2"))
    uncovered[0].decoder.layers[0].mlp.extra = torch.nn.Parameter(torch.ones(2))
    refused(r"missing in the checkpoint \(1\): decoder\.layers\.0\.mlp\.extra", healthy, uncovered)
    shorter = checkpoints.scoring(_options("PP 2", ffn_hidden_size=48))
    refused(r"of another shape \(3\): .*fc1\.weight is \[4, 128, 32\] .* \[4, 48, 32\]", healthy, shorter)
    padded, padded_bf16 = (
        checkpoints.scoring(_options("TP 2", bf16, vocab_size=40)) for bf16 in (False, True)
    )
    refused(r"shape \(2\): embedding\..*weight is \[32, 32\] .* \[40, 32\]", healthy, padded, exact=True)
    other_dtype = r"of another dtype .* is torch.float32 in the checkpoint and torch.bfloat16 in"
    refused(other_dtype, healthy, padded_bf16, exact=True)
    wide = checkpoints.scoring(_options("TP 2", vocab_size=32 + 2048))
    refused(r"of another shape \(2\): embedding\..*weight is \[32, 32\] in", healthy, wide)
