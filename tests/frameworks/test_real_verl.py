"""verl itself: the package of the registry, always, and the checkout in ``VERL_DIR``, where it is given."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from megatron_rl_patches import Settings, applied, apply, revert, status
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests.frameworks import import_stubs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.test_real_lean_head import WAYS
from tests.frameworks.test_real_lean_loss import EAGER
from tests.frameworks.test_real_reentry import prepare
from tests.frameworks.test_reentry import FINE, NO_SYNC, outcome
from tests.recording import installed, ran_on

pytestmark = pytest.mark.slow

RELEASE = "verl 0.9.1"
#: What the batches of its engine are made of.
TENSORDICT = ("tensordict 0.15.3", "pyvers 0.2.3")


@pytest.fixture(params=["package", pytest.param("checkout", marks=pytest.mark.frameworks)])
def verl(request: pytest.FixtureRequest, packages: Packages, checkouts: Checkouts) -> list[str]:
    """The folders to import it from."""
    if request.param == "checkout":
        return checkouts("verl")
    ran_on(request, RELEASE, installed("megatron-core"))
    return [str(packages.unpacked(RELEASE))]


def _training_hooks(paths: list[str]) -> dict[str, Any]:
    prepare(paths)
    with cpu_backend():
        from tests.real import tiny_gpt

        verl = importlib.import_module("verl.utils.megatron_utils")
        options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2, vpp=2), overlap_param_gather=False)
        seen: dict[str, Any] = {"file": verl.__file__}
        seen["unpatched"] = outcome(verl.register_megatron_training_hooks, *tiny_gpt.build(options))
        apply("reentrant-train")
        model, optimizer = tiny_gpt.build(options)
        seen["patched"] = outcome(verl.register_megatron_training_hooks, model, optimizer)
        seen["again"] = outcome(verl.register_megatron_training_hooks, model, optimizer)
        config = tiny_gpt.get_model_config(model[0])
        seen["installed"] = config.no_sync_func == [chunk.no_sync for chunk in model]
        return seen


@pytest.mark.runs("training hooks", ranks=2)
def test_chunks_that_share_a_config(verl: list[str]) -> None:
    for seen in spawn_ranks(_training_hooks, 2, verl, timeout=300):
        assert seen["file"].startswith(verl[0])
        assert seen["unpatched"].startswith(NO_SYNC)
        assert seen["patched"] == seen["again"] == FINE
        assert seen["installed"]


def _losses(paths: list[str], tp: int) -> dict[str, Any]:
    prepare(paths)
    import_stubs.install(["accelerate", "datasets", "pandas", "peft"])
    with cpu_backend():
        from tests.frameworks.loss_jobs import VERL, VerlJob, distance, initialize

        initialize(tp=tp)
        seen: dict[str, Any] = {"returned": [], "unpatched": 0.0, "patched": 0.0}
        job = VerlJob()
        with pytest.raises(RuntimeError) as caught:
            job.processed(entropy=True, chunks=True)
        seen["file"] = importlib.import_module(VERL).__file__
        seen["chunks, unpatched"] = str(caught.value)
        for entropy, chunks in ((False, False), (True, False), (True, True)):
            dense = job.dense(entropy)
            unpatched = None if chunks else job.processed(entropy)
            apply("lean-loss")
            patched = job.processed(entropy, chunks)
            deferred = VerlJob(deferred=True).processed(entropy, chunks, squares=False)
            seen["states"] = {s.target: s.state for s in status() if s.framework == "verl"}
            revert("lean-loss")
            for run in (patched, deferred):
                seen["patched"] = max(seen["patched"], *(distance(run[key], dense[key]) for key in dense))
            seen.setdefault("made", []).append(deferred["made"])
            if unpatched:
                seen["unpatched"] = max(
                    seen["unpatched"], *(distance(unpatched[key], dense[key]) for key in dense)
                )
                seen["returned"].append(unpatched["returned"] == patched["returned"])
        return seen


@pytest.mark.runs("losses")
@pytest.mark.parametrize("ranks", [1, 2])
def test_vocab_parallel_losses(verl: list[str], ranks: int) -> None:
    for seen in spawn_ranks(_losses, ranks, verl, ranks, timeout=300, env=EAGER):
        assert seen["file"].startswith(verl[0])
        assert set(seen["states"].values()) <= {"applied", "not needed"}
        assert "applied" in seen["states"].values()
        assert all(seen["returned"])
        assert seen["unpatched"] < 1e-5
        assert seen["patched"] < 1e-6
        assert not any(seen["made"])
        # Its chunks overwrite what each other's backward needs.
        assert "modified by an inplace operation" in seen["chunks, unpatched"]


def _engine(paths: list[str], tp: int) -> dict[str, Any]:
    importlib.import_module("torch._dynamo")  # tensordict imports it, and it fails with a stub of triton.
    prepare(paths)
    import_stubs.install(["accelerate", "cloudpickle", "datasets", "pandas", "peft"])
    with cpu_backend():
        from tests.frameworks.verl_jobs import EngineJob
        from tests.real import tiny_gpt
        from tests.unit.losses.logits.sizes import Sizes

        # With these sizes the logits have more than twice the elements of any other tensor.
        tiny_gpt.VOCABULARY, tiny_gpt.SEQUENCE, tiny_gpt.LAYERS, tiny_gpt.HEADS = 2048, 256, 1, 2
        settings = Settings(lean_head_tile_bytes=2**17)
        seen: dict[str, Any] = {"logits": tiny_gpt.SEQUENCE * tiny_gpt.VOCABULARY // tp}
        for name, patches in WAYS.items():
            with applied("reentrant-train", *patches, settings=settings), Sizes() as sizes:
                job = EngineJob(tp=tp)
                seen[name] = [torch.tensor(job.train() + job.train()), *job.scores()]
            seen[f"{name}, largest"] = sizes.largest
        seen["file"] = importlib.import_module(job.module.__name__).__file__
        return seen


@pytest.mark.runs("lean-head")
@pytest.mark.parametrize("ranks", [1, 2])
def test_its_engine_never_makes_the_logits(verl: list[str], packages: Packages, ranks: int) -> None:
    paths = verl + [str(packages.unpacked(release)) for release in TENSORDICT]
    for seen in spawn_ranks(_engine, ranks, paths, ranks, timeout=300, env=EAGER):
        assert seen["file"].startswith(verl[0])
        for name in ("unpatched", "lean-loss"):
            torch.testing.assert_close(seen["lean-head"], seen[name], rtol=1e-5, atol=1e-5)
            assert seen[f"{name}, largest"] >= seen["logits"]
        assert seen["lean-head, largest"] < seen["logits"] / 2
