"""verl itself: the package of the registry, always, and the checkout in ``VERL_DIR``, where it is given."""

import importlib
import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_rl_patches import Settings, applied, apply, revert
from megatron_rl_patches.reentry import training_warnings
from tests.frameworks.import_stubs import prepare
from tests.frameworks.rollouts import (
    NO_SYNC,
    TRANSFORMER_ENGINE,
    outcome,
    spoil_forward,
    states_of,
    with_layers,
)
from tests.frameworks.test_lean_loss import PATCH
from tests.frameworks.test_real_lean_head import WAYS
from tests.ranks import on_ranks
from tests.references.live_bytes import live_bytes
from tests.unit.losses.vocab.sizes import Sizes

pytestmark = pytest.mark.slow
with_each_tp = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])


@pytest.mark.runs("training hooks", ranks=2)
@on_ranks(2, timeout=300)
def test_chunks_that_share_a_config(verl: list[str]) -> None:
    """Two pipeline stages of two chunks each; the hook is verl's ``external_lib``."""
    prepare(verl)
    from tests.references import tiny_gpt

    utils = importlib.import_module("verl.utils.megatron_utils")
    assert utils.__file__.startswith(verl[0])
    options = tiny_gpt.TinyModel(pp=2, vpp=2, overlap_param_gather=False)
    model, optimizer = options.build()
    tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(options), [2, 2], options)
    uninterrupted = tiny_gpt.checksum(model, optimizer)

    unpatched = outcome(utils.register_megatron_training_hooks, *options.build())
    assert unpatched.startswith(NO_SYNC)
    original = utils.register_megatron_training_hooks
    import_utils = importlib.import_module("verl.utils.import_utils")
    import_utils.import_external_libs("megatron_rl_patches.hooks.verl")
    model, optimizer = options.build()
    config = tiny_gpt.get_model_config(model[0])
    for _ in range(3):  # the functions are replaced, not doubled
        utils.register_megatron_training_hooks(model, optimizer)
        assert config.no_sync_func == [chunk.no_sync for chunk in model]
        assert config.grad_sync_func == [chunk.start_grad_sync for chunk in model]
    data = tiny_gpt.data_iterators(options)
    for _ in range(2):
        tiny_gpt.train_step(model, optimizer, data, 2)
    assert tiny_gpt.checksum(model, optimizer) == uninterrupted
    config.no_sync_func = nullcontext
    assert outcome(utils.register_megatron_training_hooks, model, optimizer).startswith(NO_SYNC)
    revert()
    assert utils.register_megatron_training_hooks is original


@on_ranks(1, timeout=300)
def test_workers_whose_rollouts_sample_from_a_part_of_the_vocabulary(verl: list[str]) -> None:
    """verl's own worker and its own command line, without a cluster and without a model."""
    prepare(verl)
    from tests.frameworks.verl_jobs import read

    workers = importlib.import_module("verl.workers.engine_workers")
    assert workers.__file__ is not None and workers.__file__.startswith(verl[0])

    def reported(*words: str) -> list[str]:
        training_warnings.messages.clear()
        worker = workers.ActorRolloutRefWorker(read(*words).actor_rollout_ref, "actor_rollout")
        worker.actor = SimpleNamespace(train_mini_batch=mock.Mock(return_value=None))
        worker.update_actor(mock.sentinel.data)
        worker.actor.train_mini_batch.assert_called_once_with(data=mock.sentinel.data)
        return training_warnings.reported()

    dispatch = vars(workers.ActorRolloutRefWorker.update_actor)  # where verl says how a group calls it
    with mock.patch.object(workers.Worker, "__init__", lambda self: setattr(self, "_rank", 0)):
        with applied("reentrant-train"):
            assert dispatch.items() <= vars(workers.ActorRolloutRefWorker.update_actor).items()
            assert reported() == []
            [message] = reported("actor_rollout_ref.rollout.top_k=20")
        assert message.startswith("actor_rollout_ref.rollout.top_p=1, actor_rollout_ref.rollout.top_k=20: ")
        assert reported("actor_rollout_ref.rollout.top_k=20") == []


@pytest.mark.runs("losses")
@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_vocab_parallel_losses(verl: list[str], ranks: int) -> None:
    prepare(verl)
    functions = importlib.import_module("verl.utils.megatron.tensor_parallel")
    assert functions.__file__ is not None and functions.__file__.startswith(verl[0])
    from tests.frameworks.loss_jobs import distance, initialize
    from tests.frameworks.verl_jobs import VERL_ENGINE, LogitsJob

    initialize(tp=ranks)
    job = LogitsJob()
    # Its chunks overwrite what each other's backward needs.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        job.processed(entropy=True, chunks=True)
    for entropy, chunks in ((False, False), (True, False), (True, True)):
        dense = job.dense(entropy)
        unpatched = None if chunks else job.processed(entropy)
        with applied(PATCH):
            patched = job.processed(entropy, chunks)
            deferred = LogitsJob(deferred=True).processed(entropy, chunks, squares=False)
            states = set(states_of("verl", patch=PATCH).values())
        assert "applied" in states <= {"applied", "not needed"}
        assert not deferred["made"]
        for key, value in dense.items():
            assert max(distance(run[key], value) for run in (patched, deferred)) < 1e-6
            assert unpatched is None or distance(unpatched[key], value) < 1e-5
        assert unpatched is None or unpatched["returned"] == patched["returned"]

    unpatched = job.processed(entropy=True)
    engine = importlib.import_module(VERL_ENGINE)
    with applied(PATCH):
        foreign = functions.vocab_parallel_log_probs_from_logits.__wrapped__
        with mock.patch.object(engine, "vocab_parallel_log_probs_from_logits", foreign):
            assert job.processed(entropy=True)["returned"] == unpatched["returned"]


@on_ranks(1, timeout=300)
def test_importance_weights(verl: list[str]) -> None:
    """And the rejection of responses by the geometric mean, with weights by token."""
    prepare(verl)
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    from tests.frameworks.loss_jobs import MASKS, SAMPLED, TRAINED, importance_weights

    log_ratios = [*map(torch.sub, TRAINED, SAMPLED)]
    log_ratio, mask = (pad_sequence(values, batch_first=True) for values in (log_ratios, MASKS))
    counts_n, bounds = torch.cat(MASKS).bool(), {"tis_clip": 1.2, "tis_clip_low": 0.9}
    for level, threshold in itertools.product(("token", "sequence"), (1.2, "0.9_1.2")):  # or IcePop
        options = {"tis_clip": 1.2} if threshold == 1.2 else {**bounds, "tis_mask_level": level}
        expected, _ = helper.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
        weights = importance_weights(**options, tis_level=level)[counts_n]
        torch.testing.assert_close(weights, expected[mask.bool()])
    reject, limits = helper.compute_rollout_rejection_mask, f"{1 / 1.2}_{1 / 0.9}"
    accepted, _ = reject(log_ratio, mask, "seq_mean_k1", limits)
    weights = importance_weights(**bounds, tis_mask_level="geometric")[counts_n]
    torch.testing.assert_close(weights, (log_ratio.exp() * accepted)[mask.bool()])


@on_ranks(1, timeout=300)
def test_memory_beyond_the_logits(verl: list[str]) -> None:
    prepare(verl)
    functions = importlib.import_module("verl.utils.megatron.tensor_parallel")
    from tests.frameworks.loss_jobs import initialize
    from tests.frameworks.verl_jobs import LogitsJob

    initialize()
    job = LogitsJob(rows=512, vocabulary=8192)

    def peak() -> float:
        """Return that of forward and backward beyond the logits, in units of the logits."""
        logits = job.logits()
        with mock.patch.object(job, "logits", lambda: logits):
            return live_bytes(lambda: job.processed(True, squares=False)).peak / logits.nbytes

    assert peak() > 2.9
    apply(PATCH)
    # The gradients that the division by the temperature and the test's own product hand on.
    assert peak() < 2.05
    logits = job.logits()
    log_probs = functions.vocab_parallel_log_probs_from_logits(logits, job.labels)
    [gradient] = torch.autograd.grad(log_probs.sum(), logits)
    assert gradient.data_ptr() == logits.data_ptr()


def largest_tensors(**options: Any) -> dict[str, int]:
    """Train and score in each way, with the same results; return the most elements that a tensor has."""
    from tests.frameworks.verl_jobs import EngineJob

    runs, largest = {}, {}
    for name, patches in WAYS.items():
        settings = Settings(lean_head_tile_bytes=2**16)
        with applied("reentrant-train", *patches, settings=settings), Sizes() as sizes:
            job = EngineJob(**options)
            first, gradient = torch.tensor(job.train()), job.gradient
            runs[name] = first, gradient, torch.tensor(job.train())
            scores = job.scores()
        largest[name] = sizes.largest
        log_probs, entropies = (error.abs().max() for error in job.errors(scores))
        # Each way rounds the logits to bfloat16. They are below 1 before the temperature divides them.
        assert log_probs < 4e-3 and entropies < 2e-4
    first, gradient, second = runs["lean-head"]
    for name in ("unpatched", "lean-loss"):
        torch.testing.assert_close(first, runs[name][0], rtol=5e-4, atol=1e-6)
        # Gradients of activations are rounded to bfloat16, in another order.
        for mine, expected in zip(gradient, runs[name][1], strict=True):
            assert (mine - expected).norm() <= 1.5e-2 * expected.norm()
        # Adam, which divides by gradients next to zero, shows what is rounded.
        torch.testing.assert_close(second, runs[name][2], rtol=2e-2, atol=1e-4)
    return largest


def check_rollouts(**options: Any) -> None:
    """Check that three rollouts end at the same weights with patches and without, bit for bit."""
    from tests.frameworks.verl_jobs import EngineJob

    def weights() -> list[torch.Tensor]:
        job = EngineJob(**options)
        for _ in range(3):
            job.train()
        return job.weights()

    unpatched = weights()
    with applied("reentrant-train", "finite-step"):
        assert all(map(torch.equal, weights(), unpatched))


@with_layers("lean-head")
@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_its_engine_never_makes_the_logits(verl: list[str], layers: str, ranks: int) -> None:
    prepare(verl)
    from tests.frameworks.verl_jobs import sizes_of_large_logits

    sizes, logits = sizes_of_large_logits(ranks)
    check_rollouts(layers=layers, **sizes)
    largest = largest_tensors(layers=layers, **sizes)
    assert largest.pop("lean-head") < logits / 2 and min(largest.values()) >= logits


@pytest.mark.nightly
@with_layers("MoE", ranks=2)
@on_ranks(2, timeout=300)
def test_its_engine_trains_a_mixture_of_experts(verl: list[str], layers: str) -> None:
    """Each rank has half of the experts; losses, gradient norms and scores are those without patches."""
    prepare(verl)
    check_rollouts(layers=layers, kind="moe", ep=2)
    largest_tensors(layers=layers, kind="moe", ep=2)


@pytest.mark.parametrize("layers", [TRANSFORMER_ENGINE])
@on_ranks(1, timeout=300)
def test_its_engine_skips_a_step_with_a_norm_that_is_not_finite(verl: list[str], layers: str) -> None:
    """A NaN in one microbatch of the second rollout of three equals that rollout left out.

    Its own engine builds the model, whose gradients Megatron does not check unless verl is asked to.
    """
    prepare(verl)
    from tests.frameworks.verl_jobs import SAMPLES, EngineJob

    def rollouts(bad: bool) -> tuple[list[torch.Tensor], int, list[float]]:
        job, norms, steps = EngineJob(layers=layers), [], []
        job.engine.lr_scheduler = SimpleNamespace(step=steps.append)
        [chunk] = job.engine.module
        spoil_forward(chunk, SAMPLES + 2 if bad else 0)
        for number in range(3):
            if number == 1 and not bad:
                job.data()
                continue
            norms.append(job.train()[-1])
            job.engine.lr_scheduler_step()
        return job.weights(), sum(steps), norms

    with applied("reentrant-train"):
        assert any(parameter.isnan().any() for parameter in rollouts(bad=True)[0])
        with applied("finite-step"):
            skipped, steps, norms = rollouts(bad=True)
            expected, expected_steps, _ = rollouts(bad=False)
    assert all(map(torch.equal, skipped, expected))
    assert steps == expected_steps == 2
    assert [math.isnan(norm) for norm in norms] == [False, True, False]
