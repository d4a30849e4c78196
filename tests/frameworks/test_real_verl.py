"""verl itself: the package of the registry, always, and the checkout in ``VERL_DIR``, where it is given."""

from __future__ import annotations

import importlib

import pytest
import torch

from megatron_rl_patches import Settings, applied, apply
from tests.frameworks import import_stubs
from tests.frameworks.checkouts import Checkouts
from tests.frameworks.packages import Packages
from tests.frameworks.rollouts import NO_SYNC, outcome
from tests.frameworks.test_lean_loss import check_verl
from tests.frameworks.test_real_lean_head import WAYS
from tests.frameworks.test_real_lean_loss import EAGER
from tests.frameworks.test_real_reentry import prepare
from tests.ranks import on_ranks
from tests.recording import installed, ran_on
from tests.unit.losses.logits.sizes import Sizes

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


@pytest.mark.runs("training hooks", ranks=2)
@on_ranks(2, timeout=300)
def test_chunks_that_share_a_config(verl: list[str]) -> None:
    prepare(verl)
    from tests.real import tiny_gpt

    utils = importlib.import_module("verl.utils.megatron_utils")
    assert utils.__file__.startswith(verl[0])
    options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(pp=2, vpp=2), overlap_param_gather=False)
    unpatched = outcome(utils.register_megatron_training_hooks, *tiny_gpt.build(options))
    assert unpatched.startswith(NO_SYNC)
    apply("reentrant-train")
    model, optimizer = tiny_gpt.build(options)
    for _ in range(2):
        utils.register_megatron_training_hooks(model, optimizer)
    config = tiny_gpt.get_model_config(model[0])
    assert config.no_sync_func == [chunk.no_sync for chunk in model]


@pytest.mark.runs("losses")
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks, timeout=300, env=EAGER)
def test_vocab_parallel_losses(verl: list[str], ranks: int) -> None:
    prepare(verl)
    import_stubs.install(["accelerate", "datasets", "pandas", "peft"])
    from tests.frameworks.loss_jobs import VERL, VerlJob, initialize

    initialize(tp=ranks)
    # Its chunks overwrite what each other's backward needs.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        VerlJob().processed(entropy=True, chunks=True)
    assert importlib.import_module(VERL).__file__.startswith(verl[0])
    check_verl(chunks_work_unpatched=False)


@pytest.fixture
def with_tensordict(verl: list[str], packages: Packages) -> list[str]:
    return verl + [str(packages.unpacked(release)) for release in TENSORDICT]


@pytest.mark.runs("lean-head")
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks(lambda ranks: ranks, timeout=300, env=EAGER)
def test_its_engine_never_makes_the_logits(with_tensordict: list[str], ranks: int) -> None:
    importlib.import_module("torch._dynamo")  # tensordict imports it, and it fails with a stub of triton.
    prepare(with_tensordict)
    import_stubs.install(["accelerate", "cloudpickle", "datasets", "pandas", "peft"])
    from tests.frameworks.verl_jobs import EngineJob
    from tests.real import tiny_gpt

    # With these sizes the logits have more than twice the elements of any other tensor.
    tiny_gpt.VOCABULARY, tiny_gpt.SEQUENCE, tiny_gpt.LAYERS, tiny_gpt.HEADS = 2048, 256, 1, 2
    logits = tiny_gpt.SEQUENCE * tiny_gpt.VOCABULARY // ranks
    runs = {}
    for name, patches in WAYS.items():
        settings = Settings(lean_head_tile_bytes=2**17)
        with applied("reentrant-train", *patches, settings=settings), Sizes() as sizes:
            job = EngineJob(tp=ranks)
            runs[name] = [torch.tensor(job.train() + job.train()), *job.scores()]
        assert sizes.largest < logits / 2 if name == "lean-head" else sizes.largest >= logits
    assert job.module.__file__.startswith(with_tensordict[0])
    for name in ("unpatched", "lean-loss"):
        # Two steps of Adam, which divides by gradients next to zero, show the last bits of these.
        torch.testing.assert_close(runs["lean-head"], runs[name], rtol=5e-5, atol=1e-5)
