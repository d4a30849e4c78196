"""Checkpoints of a model that trains, loaded into models that only score, on real megatron-core."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

pytestmark = pytest.mark.runs("inference-only", ranks=[1, 2])

ITERATION, EARLIER = 40, 20
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 1": {},
    "TP 2": {"tp": 2},
    "PP 2": {"pp": 2},
    "PP 2, VPP 2": {"pp": 2, "vpp": 2},
}


@contextmanager
def _megatron(**changes: Any) -> Iterator[None]:
    """Megatron on the CPU; changes to the tiny GPT's configuration, and to constants where in capitals."""
    with cpu_backend():
        from tests.real import tiny_gpt

        plain = tiny_gpt._transformer_config

        def changed(options: Any) -> Any:
            config = plain(options)
            for name, value in changes.items():
                setattr(config, name, value)
            return config

        constants = {name: changes.pop(name) for name in list(changes) if name.isupper()}
        with mock.patch.multiple(tiny_gpt, _transformer_config=changed, **constants):
            yield


def _options(layout: str, **flags: Any) -> Any:
    from tests.real.tiny_gpt import Options, Parallelism

    return Options(parallelism=Parallelism(**LAYOUTS[layout]), **flags)


def _on_rank_0(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    dist.barrier()
    value = function(*args, **kwargs) if dist.get_rank() == 0 else None
    dist.barrier()
    return value


# ---------------------------------------------------------------------------- what loads


def _load_into_every_layout(saved: str, bf16: bool, root: str) -> dict[str, Any]:
    with _megatron(gated_linear_unit=True):
        from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint
        from tests.real import checkpoints

        model, optimizer = checkpoints.trained(_options(saved, bf16=bf16))
        folder = checkpoints.save_torch_dist(model, optimizer, Path(root), ITERATION)
        reference = checkpoints.whole_weights(model)
        results: dict[str, Any] = {"overwritten": _on_rank_0(checkpoints.overwrite, folder, "optimizer.")}
        for layout in LAYOUTS:
            chunks = checkpoints.scoring(_options(layout, bf16=bf16))
            before = checkpoints.whole_weights(chunks)
            addresses = [parameter.data_ptr() for chunk in chunks for parameter in chunk.parameters()]
            generators = random.getstate(), torch.get_rng_state()
            iteration = load_inference_checkpoint(chunks, root)
            results[layout] = {
                "iteration": iteration == ITERATION,
                "new weights": not checkpoints.equal(before, reference),
                "weights": checkpoints.equal(checkpoints.whole_weights(chunks), reference),
                "in place": addresses == [p.data_ptr() for chunk in chunks for p in chunk.parameters()],
                "frozen": not any(p.requires_grad for chunk in chunks for p in chunk.parameters()),
                "eval": not any(module.training for chunk in chunks for module in chunk.modules()),
                "generators": generators[0] == random.getstate()
                and torch.equal(generators[1], torch.get_rng_state()),
            }
        return results


@pytest.mark.parametrize(
    ("saved", "bf16"),
    [
        ("TP 2", True),
        pytest.param("TP 1", False, marks=pytest.mark.slow),
        pytest.param("PP 2, VPP 2", False, marks=pytest.mark.slow),
    ],
)
def test_any_layout_loads_bit_for_bit_without_the_optimizer(saved: str, bf16: bool, tmp_path: Path) -> None:
    for rank, results in enumerate(spawn_ranks(_load_into_every_layout, 2, saved, bf16, str(tmp_path))):
        overwritten = results.pop("overwritten")
        if rank == 0:
            assert overwritten > 0, "there was optimizer state, and loading did without it"
        for layout, result in results.items():
            assert all(result.values()), (layout, result)


@contextmanager
def _mixture_of_experts(expert_parallel: int) -> Iterator[None]:
    from functools import partial

    sizes: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 48,
        "expert_model_parallel_size": expert_parallel,
    }
    with _megatron(**sizes, gated_linear_unit=True, add_bias_linear=False):
        from megatron.core import parallel_state

        from tests.real import tiny_gpt

        groups = partial(parallel_state.initialize_model_parallel, expert_model_parallel_size=expert_parallel)
        layer = partial(tiny_gpt.get_gpt_layer_local_spec, num_experts=4, moe_grouped_gemm=False)
        with (
            mock.patch.object(parallel_state, "initialize_model_parallel", groups),
            mock.patch.object(tiny_gpt, "get_gpt_layer_local_spec", layer),
        ):
            yield


def _load_experts(root: str) -> dict[str, bool]:
    with _mixture_of_experts(2):
        from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint
        from tests.real import checkpoints

        model, optimizer = checkpoints.trained(_options("TP 1"))
        checkpoints.save_torch_dist(model, optimizer, Path(root), ITERATION)
        reference = checkpoints.whole_weights(model)
    results = {"all experts": sum("experts.3.linear_fc1.weight" in name for name in reference) == 4}
    for expert_parallel, layout in ((2, "TP 1"), (1, "TP 1"), (1, "PP 2")):
        with _mixture_of_experts(expert_parallel):
            chunks = checkpoints.scoring(_options(layout))
            load_inference_checkpoint(chunks, root)
            weights = checkpoints.whole_weights(chunks)
            results[f"EP {expert_parallel}, {layout}"] = checkpoints.equal(weights, reference)
    return results


@pytest.mark.slow
def test_experts_move_between_ranks(tmp_path: Path) -> None:
    for results in spawn_ranks(_load_experts, 2, str(tmp_path)):
        assert all(results.values()), results


def _load_into_another_dtype_and_vocabulary(root: str) -> dict[str, Any]:
    with _megatron():
        from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint
        from tests.real import checkpoints

        model, optimizer = checkpoints.trained(_options("TP 2", bf16=True))
        checkpoints.save_torch_dist(model, optimizer, Path(root), ITERATION)
        saved = checkpoints.whole_weights(model)
        wide = checkpoints.scoring(_options("PP 2"))
        load_inference_checkpoint(wide, root)
        as_float32 = {name: tensor.float() for name, tensor in saved.items()}
        results: dict[str, Any] = {
            "bf16 into fp32": checkpoints.equal(checkpoints.whole_weights(wide), as_float32)
        }
    with _megatron(VOCABULARY=40):
        padded = checkpoints.scoring(_options("TP 1", bf16=True))
        load_inference_checkpoint(padded, root)
        weight = padded[0].module.embedding.word_embeddings.weight
        results["padding"] = (
            torch.equal(weight[:32], saved["embedding.word_embeddings.weight"]),
            bool((weight[32:] == 0).all()),
        )
    return results


@pytest.mark.slow
def test_another_dtype_and_a_padded_vocabulary_load(tmp_path: Path) -> None:
    """Which folder a path leads to is tested in tests/unit/inference/checkpoints."""
    for results in spawn_ranks(_load_into_another_dtype_and_vocabulary, 2, str(tmp_path)):
        assert results == {"bf16 into fp32": True, "padding": (True, True)}


# ---------------------------------------------------------------------------- what does not


def _truncate(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _first_file(folder: Path) -> Path:
    return min(folder.glob("*.distcp"))


def _cut_the_first_shard(folder: Path) -> None:
    from tests.real import checkpoints

    checkpoints.cut(folder, _first_file(folder).name, "decoder.")


def _spoil_what_rank_1_reads(folder: Path) -> None:
    from tests.real import checkpoints

    assert checkpoints.overwrite(folder, "linear_proj.weight", only_rank=1) > 0


_METADATA = r"\.metadata is corrupt, truncated or not safe to load"
# What is done to the folder of an iteration -> what the error says.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "metadata.json gone": (_remove("metadata.json"), "every rank: .*a part of a torch_dist checkpoint"),
    ".metadata gone": (_remove(".metadata"), ".metadata is missing"),
    ".metadata hostile": (
        _write(".metadata", b"cos\nsystem\n(Vtouch ran\ntR."),
        r"every rank: .*\.metadata is corrupt, .*it names os\.system, which does not belong",
    ),
    ".metadata cut": (lambda folder: _truncate(folder / ".metadata"), _METADATA),
    "shard gone": (lambda folder: _first_file(folder).unlink(), r"1 missing \(__0_0.distcp\)"),
    "shard cut": (_cut_the_first_shard, r"1 truncated \(__0_0.distcp\)"),
    "shard garbage": (_spoil_what_rank_1_reads, r"cannot read .*: rank 1: .*__1_\d\.distcp is corrupt"),
}
# megatron-core 0.19 keeps the common state elsewhere.
COMMON_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "common.pt gone": (_remove("common.pt"), "common.pt is missing"),
    "common.pt garbage": (_write("common.pt", b"garbage"), "common.pt is corrupt or truncated"),
}


def _load_what_is_broken(root_name: str) -> dict[str, Any]:
    root = Path(root_name)
    with _megatron():
        from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint
        from tests.real import checkpoints

        model, optimizer = checkpoints.trained(_options("TP 2"))
        checkpoints.save_torch_dist(model, optimizer, root / "healthy", EARLIER)
        folder = checkpoints.save_torch_dist(model, optimizer, root / "healthy", ITERATION)
        trained = checkpoints.whole_weights(model)
        chunks = checkpoints.scoring(_options("TP 2"))
        errors: dict[str, Any] = {}

        def load(name: str, path: Path, chunks: list[Any] = chunks, **kwargs: Any) -> None:
            before = checkpoints.whole_weights(chunks)
            try:
                load_inference_checkpoint(chunks, path, **kwargs)
                errors[name] = "no error"
            except CheckpointError as error:
                errors[name] = str(error)
            if not checkpoints.equal(before, checkpoints.whole_weights(chunks)):
                errors[name] += ", and the weights have changed"

        damages = DAMAGES | (COMMON_DAMAGES if (folder / "common.pt").exists() else {})
        for number, (name, (damage, _)) in enumerate(damages.items()):
            broken = root / str(number)
            _on_rank_0(shutil.copytree, root / "healthy", broken)
            _on_rank_0(damage, broken / folder.name)
            load(name, broken)

        # Refused before any collective: the other rank is not there.
        if dist.get_rank() == 0:
            for refused, kwargs, text in (
                (chunks, {"format": "zarr"}, "format='zarr': expected 'auto', 'torch_dist' or 'torch'"),
                ([], {}, "model has no chunks"),
                ([*chunks, torch.nn.Linear(2, 2, device="meta")], {}, "chunk 1 is on the meta device"),
            ):
                with pytest.raises(InvalidInputError, match=text):
                    load_inference_checkpoint(refused, root / "healthy", **kwargs)

        load("ranks apart", folder if dist.get_rank() == 0 else root / "healthy" / f"iter_{EARLIER:07d}")
        load("on one rank", folder if dist.get_rank() == 0 else root / "nowhere")
        load("other format", root / "healthy", format="torch")
        load("no such step", root / "healthy", ckpt_step=7)
        # After all those errors the ranks are still in step.
        assert load_inference_checkpoint(chunks, root / "healthy") == ITERATION
        assert checkpoints.equal(checkpoints.whole_weights(chunks), trained)

    with _megatron(add_bias_linear=False):
        unbiased = checkpoints.scoring(_options("PP 2"))
        load("other keys", root / "healthy", unbiased)
        checkpoints.save_torch_dist(*checkpoints.trained(_options("TP 2")), root / "unbiased", 1)
    with _megatron():
        load("fewer keys", root / "unbiased", checkpoints.scoring(_options("PP 2")))
        uncovered = checkpoints.scoring(_options("TP 2"))
        uncovered[0].decoder.layers[0].mlp.extra = torch.nn.Parameter(torch.ones(2))
        load("uncovered", root / "healthy", uncovered)
    with _megatron(ffn_hidden_size=48):
        load("other shapes", root / "healthy", checkpoints.scoring(_options("PP 2")))
    with _megatron(VOCABULARY=40):
        load("padding, exact", root / "healthy", checkpoints.scoring(_options("TP 2")), exact=True)
        bf16 = checkpoints.scoring(_options("TP 2", bf16=True))
        load("dtype, exact", root / "healthy", bf16, exact=True)
    with _megatron(VOCABULARY=32 + 2048):
        load("another vocabulary", root / "healthy", checkpoints.scoring(_options("TP 2")))
    return errors


@pytest.mark.slow
def test_what_is_broken_says_so_on_every_rank_and_leaves_the_weights(tmp_path: Path) -> None:
    expected = {name: text for name, (_, text) in (DAMAGES | COMMON_DAMAGES).items()} | {
        "ranks apart": "rank 0: iter_0000040, rank 1: iter_0000020",
        "on one rank": "rank 1: .*nowhere: no such folder",
        "other format": "is in the format torch_dist, not torch",
        "no such step": "ckpt_step=7 asks for iter_0000007, .*it has iter_0000040, iter_0000020",
        "other keys": r"every rank: .*tensors unexpected in the checkpoint \(4\): decoder\.layers\.",
        "fewer keys": r"every rank: .*tensors missing in the checkpoint \(4\): decoder\.layers\.mlp\.linear_",
        "uncovered": r"tensors missing in the checkpoint \(1\): decoder\.layers\.0\.mlp\.extra",
        "padding, exact": r"of another shape \(2\): embedding\..*weight is \[32, 32\] .* \[40, 32\]",
        "dtype, exact": r"of another dtype .* is torch.float32 in the checkpoint and torch.bfloat16 in",
        "another vocabulary": r"of another shape \(2\): embedding\..*weight is \[32, 32\] in",
        "other shapes": r"of another shape \(3\): .*fc1\.weight is \[4, 128, 32\] .* \[4, 48, 32\]",
    }
    ranks = spawn_ranks(_load_what_is_broken, 2, str(tmp_path))
    for errors in ranks:
        for name, text in errors.items():
            assert _matches(expected[name], text), (name, text)
            assert text.endswith("Nothing was loaded; the weights are as before.")
    # Each rank quotes the path that it was given.
    ranks[0].pop("on one rank"), ranks[1].pop("on one rank")
    assert ranks[0] == ranks[1]


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text, re.DOTALL) is not None


# ---------------------------------------------------------------------------- the legacy format


def _load_legacy(root_name: str) -> dict[str, Any]:
    root = Path(root_name)
    with _megatron():
        from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint, read_iteration
        from tests.real import checkpoints

        results: dict[str, Any] = {}
        for layout in ("TP 1", "TP 2", "PP 2", "PP 2, VPP 2"):
            model, optimizer = checkpoints.trained(_options(layout, bf16=True))
            folder = checkpoints.save_torch(model, optimizer, root / layout, ITERATION)
            saved = checkpoints.whole_weights(model)
            chunks = checkpoints.scoring(_options(layout, bf16=True))
            iteration = load_inference_checkpoint(chunks, root / layout)
            loaded = checkpoints.equal(checkpoints.whole_weights(chunks), saved)
            results[layout] = (iteration, read_iteration(folder), loaded)

        def error(path: Path, chunks: list[Any]) -> str:
            before = checkpoints.whole_weights(chunks)
            with pytest.raises(CheckpointError) as raised:
                load_inference_checkpoint(chunks, path)
            assert checkpoints.equal(before, checkpoints.whole_weights(chunks))
            return str(raised.value)

        results["TP 2 into PP 2"] = error(root / "TP 2", checkpoints.scoring(_options("PP 2")))
        results["TP 2 into TP 1"] = error(root / "TP 2", checkpoints.scoring(_options("TP 1")))
        chunks = checkpoints.scoring(_options("TP 2"))
        file = root / "TP 2" / folder.name / "mp_rank_01" / "model_optim_rng.pt"
        content = _on_rank_0(torch.load, file, weights_only=False)
        if content:
            content["model"].pop("decoder.final_layernorm.bias")
            content["model"]["odd"] = torch.ones(1)
            torch.save(content, file)
        dist.barrier()
        results["other keys"] = error(root / "TP 2", chunks)
        _on_rank_0(_truncate, file)
        results["cut"] = error(root / "TP 2", chunks)
        _on_rank_0(file.unlink)
        results["gone"] = error(root / "TP 2", chunks)
        return results


def test_legacy_checkpoints_load_into_their_own_layout_only(tmp_path: Path) -> None:
    sizes = (
        r"has mp_rank_00, mp_rank_01; this model \(TP {}, PP {}, EP 1\) needs {}\. .*save it as torch_dist"
    )
    expected = {
        "TP 2 into PP 2": sizes.format(1, 2, "mp_rank_00_000, mp_rank_00_001"),
        "TP 2 into TP 1": sizes.format(1, 1, "mp_rank_00"),
        "other keys": r"rank 1: .*missing in the checkpoint \(1\): decoder\.final_layernorm\.bias; "
        r"tensors unexpected in the checkpoint \(1\): odd",
        "cut": r"rank 1: .*mp_rank_01.* is corrupt or truncated",
        "gone": r"rank 1: .*model_optim_rng\.pt is missing",
    }
    for results in spawn_ranks(_load_legacy, 2, str(tmp_path)):
        for name, result in results.items():
            if name in LAYOUTS:
                assert result == (ITERATION, ITERATION, True), name
            else:
                assert _matches(expected[name], result), (name, result)
