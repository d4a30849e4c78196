"""``distillation`` in verl's own engine and worker: the package of the registry, and ``VERL_DIR``."""

import importlib
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.errors import InvalidInputError
from tests.frameworks import import_stubs
from tests.ranks import on_ranks
from tests.references.dense import buckets, dense_divergence
from tests.unit.losses.vocab.sizes import Sizes

pytestmark = [pytest.mark.slow, pytest.mark.runs("top-k distillation")]
with_each_tp = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])

VOCABULARY, K = 64, 4


def prepare(paths: list[str]) -> Any:
    """Make verl importable, and return the module of the jobs."""
    import_stubs.prepare(paths)
    return importlib.import_module("tests.frameworks.verl_jobs")


def with_tail(name: str, k: int = K, **options: float) -> Callable[..., Tensor]:
    """Return a divergence over the teacher's top-k and one bucket for all other ids."""

    def compare(student: Tensor, teacher: Tensor, *old: Tensor) -> Tensor:
        ids = teacher.topk(k, 1).indices
        return dense_divergence(name, *(buckets(one, ids) for one in (student, teacher, *old)), **options)

    return compare


def truncated(student: Tensor, teacher: Tensor) -> Tensor:
    """What verl computes without the patch, and then clamps at zero."""
    log_q, ids = teacher.topk(K, 1)
    return dense_divergence("forward_kl", student.gather(1, ids), log_q)


@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_forward_kl_counts_the_tail(verl: list[str], ranks: int) -> None:
    """Without the patch it is truncated and clamped.

    Its gradient at TP 2 is then that of the formula, which leaves out tokens: verl#7856.
    """
    jobs = prepare(verl)
    from tests.frameworks.loss_jobs import distance

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_rl_patches").addHandler(handler)
    table, sizes = jobs.teacher_table(VOCABULARY), {"tp": ranks, "vocab_size": VOCABULARY}
    for packed, policy in itertools.product((True, False), (False, True)):
        job = jobs.DistillationJob(table, "forward_kl_topk", K, packed=packed, policy=policy, **sizes)
        unpatched = job.of_logits()
        of_verl, of_clamped = jobs.reference(unpatched, lambda p, q: truncated(p, q).clamp(min=0.0))
        if not policy:
            assert unpatched["loss"] == pytest.approx(of_verl.mean().item(), rel=1e-5)
            assert distance(unpatched["gradient"], of_clamped) < 1e-5
            assert unpatched["least"] == 0.0 and not unpatched["is_overwritten"]
            is_negative = jobs.reference(unpatched, truncated)[0] < 0
            assert 0.2 < is_negative.double().mean() < 0.8
            assert not unpatched["gradient"][unpatched["rows"]][is_negative].any()
            full, _ = jobs.reference(unpatched, partial(dense_divergence, "forward_kl"))
            assert abs(unpatched["loss"] - full.mean()) > 0.3 * full.mean()
        for patches in (["distillation"], ["distillation", "lean-loss"]):
            with applied(*patches):
                run = job.of_logits()
                of_deferred = job.of_logits(is_deferred=True) if "lean-loss" in patches else run
            losses, gradient = jobs.reference(run, with_tail("forward_kl"))
            assert (losses > 0).all()
            if not policy:
                assert run["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
                assert distance(run["gradient"], gradient) < 1e-5
                assert run["is_overwritten"]
            assert distance(of_deferred["gradient"], run["gradient"]) < 1e-5
            assert not of_deferred["made"]
        if policy:  # what the policy loss adds to the gradient is the same with the patch
            assert distance(run["gradient"] - gradient, unpatched["gradient"] - of_clamped) < 1e-4
    if torch.distributed.get_rank() == 0:
        [line] = [line for line in lines if "forward_kl_topk" in line]
        numbers = f"{losses.mean():.4g}", f"{of_verl.mean():.4g}"
        assert all(number in line for number in numbers), (line, numbers)


@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_metrics_are_those_of_verl(verl: list[str], ranks: int) -> None:
    """All that verl's function returns but the loss; masses are sums before the clamp, as since verl#7723."""
    jobs = prepare(verl)
    from tests.frameworks.loss_jobs import columns_of_rank, initialize

    initialize(tp=ranks)
    module = importlib.import_module("verl.trainer.distillation.megatron.losses")
    table = jobs.teacher_table(VOCABULARY).float()
    log_probs, ids = (torch.nested.nested_tensor([one[:8]], layout=torch.jagged) for one in table.topk(K, 1))
    student = (0.5 * table[:8] + table[1:9])[None, :, columns_of_rank(VOCABULARY)]

    def metrics(clamp: float | None) -> dict[str, Tensor]:
        words = jobs.distillation(loss_mode="forward_kl_topk", log_prob_min_clamp=clamp, topk=K)
        config = jobs.make_engine(*words)[1].keywords["distillation_config"]
        outputs = module.compute_forward_kl_topk(student.clone(), log_probs, ids, config, "thd")
        return {name: values.flatten()[:8] for name, values in outputs.items() if "losses" not in name}

    without_clamp = metrics(None)
    masses = {name: without_clamp[name] for name in ("student_mass", "teacher_mass")}
    for clamp in (None, -1.5):
        expected = metrics(clamp) | masses
        with applied("distillation"):
            patched = metrics(clamp)
        assert patched.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(patched[name].to(values.dtype), values, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_further_objectives(verl: list[str], ranks: int) -> None:
    """Importance weights are those of the policy that sampled.

    With them the first step is that of the reverse KL; the second has another value, by the KL of the step.
    """
    jobs = prepare(verl)
    from tests.frameworks.loss_jobs import distance

    table, old = jobs.teacher_table(VOCABULARY), jobs.teacher_table(VOCABULARY, seed=1)

    def make(name: str, k: int = K, **options: Any) -> Any:
        loss_mode = f"megatron_rl_patches.{name}_topk"
        return jobs.DistillationJob(table, loss_mode, k, tp=ranks, vocab_size=VOCABULARY, **options)

    def check(job: Any, formula: Any, *tables: Tensor) -> None:
        run = job.of_logits()
        others = [of_all[run["tokens"]] for of_all in tables]
        losses, gradient = jobs.reference(run, lambda p, q: formula(p, q, *others))
        assert run["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert distance(run["gradient"], gradient) < 1e-5

    weighted = "importance_weighted_reverse_kl"
    with applied("distillation"):
        for k in (K, 40):  # 40 ids are more than a rank of TP 2 has
            check(make("reverse_kl", k), with_tail("reverse_kl", k))
        check(make("jsd"), with_tail("jensen_shannon", beta=0.5))
        check(make("skewed_kl"), with_tail("skewed_forward_kl", beta=0.1))
        check(make(weighted, old=old), with_tail(weighted), old)
        reverse, first = (make(name).update(epochs=2) for name in ("reverse_kl", weighted))
    if reverse:  # on the rank that has them
        assert first["grad_norm"][0] == pytest.approx(reverse["grad_norm"][0], rel=1e-4)
        assert first["loss"][0] == pytest.approx(reverse["loss"][0], rel=1e-5)
        assert first["loss"][1] < reverse["loss"][1] * (1 - 1e-5)
    with pytest.raises(ValueError, match="has to be selected"):
        make("skewed_kl").of_logits()


@with_each_tp
@on_ranks(lambda ranks: ranks, timeout=300)
def test_no_logits(verl: list[str], ranks: int) -> None:
    """verl's worker trains on deferred logits, with the same losses, metrics and gradient norms."""
    jobs = prepare(verl)
    sizes, logits = jobs.sizes_of_large_logits(ranks)
    table = jobs.teacher_table(sizes["vocab_size"])
    for packed in (True, False):
        runs = []
        if not packed:  # verl pads the logits of its shorter sample, and not what its teacher said
            with pytest.raises(AssertionError):
                jobs.DistillationJob(table, "forward_kl_topk", K, packed=packed, **sizes).update()
        for patches in (("distillation",), ("distillation", "lean-loss", "lean-head")):
            with applied("reentrant-train", *patches, settings=Settings(lean_head_tile_bytes=2**16)):
                job = jobs.DistillationJob(table, "forward_kl_topk", K, packed=packed, **sizes)
                data = [job.batch(), job.batch()]
                with Sizes() as sizes_seen:
                    runs.append([job.update(batch) for batch in data])
            is_lean = "lean-head" in patches
            assert sizes_seen.largest < logits / 2 if is_lean else sizes_seen.largest >= logits
        for plain, lean in zip(*runs, strict=True):
            assert plain.keys() == lean.keys()
            for name, value in plain.items():
                assert lean[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (packed, name)


@pytest.mark.runs("top-k distillation", ranks=2)
@on_ranks(2, timeout=300)
def test_bad_input_is_refused_on_all_ranks(verl: list[str]) -> None:
    """One of two data-parallel or tensor-parallel ranks has it; no rank forwards anything."""
    jobs = prepare(verl)

    def check(tp: int, message: str, k: int = K, **spoilt: Any) -> None:
        job = jobs.DistillationJob(jobs.teacher_table(80), "forward_kl_topk", k, tp=tp, vocab_size=64)
        data = job.batch()
        ids, row = data["teacher_ids"].values(), int(data["input_ids"].offsets()[1]) - 3
        ids.copy_(torch.arange(ids.shape[1]).expand_as(ids))
        if torch.distributed.get_rank():
            for name, value in spoilt.items():
                if value is None:
                    del data[name]
                else:
                    data[name].values()[row, 1] = value
        with (
            applied("distillation"),
            mock.patch.object(job.engine, "train_batch") as train_batch,
            pytest.raises(InvalidInputError, match=message),
        ):
            job.update(data)
        assert not train_batch.called

    for tp in (1, 2):
        check(tp, "add up to nan", teacher_logprobs=torch.nan)
        check(tp, "names the ids 64", teacher_ids=64)
        check(tp, "topk is 65", k=65)
        check(tp, "has no teacher_logprobs", teacher_ids=None)
