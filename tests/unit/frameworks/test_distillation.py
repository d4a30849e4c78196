"""Distillation in frameworks: slime's loss and verl's rows against float64, teachers that score and fit.

On several ranks, see tests/real and tests/faults; verl itself runs in ``test_real_verl_distillation.py``.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.frameworks import distillation_teachers, microbatch_layout, verl_distillation
from megatron_rl_patches.frameworks.distillation_arguments import check_vocabularies
from megatron_rl_patches.frameworks.distillation_loss import opd_loss
from megatron_rl_patches.frameworks.distillation_teachers import SOURCES, TeacherScorer
from megatron_rl_patches.frameworks.verl_distillation import MODES
from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.device_thread import device_thread

VOCABULARY, K, TEMPERATURE = 13, 4, 0.7
TOTALS, RESPONSES = [6, 4, 9], [3, 1, 7]
PADDING = 5


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_layout, "groups_of", lambda: microbatch_layout.Groups(0, 1, None, None))
    monkeypatch.setattr(verl_distillation, "tensor_parallel_group", lambda: None)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits_leaf() -> Tensor:
    return random(1, sum(TOTALS) + PADDING, VOCABULARY, seed=1).requires_grad_()


def responses_of(logits: Tensor) -> Tensor:
    samples = zip(logits[0, : sum(TOTALS)].split(TOTALS), RESPONSES, strict=True)
    return torch.cat([rows[len(rows) - response - 1 : -1] for rows, response in samples])


def batch(**changes: Any) -> dict[str, Any]:
    top = vocab_parallel_topk(random(sum(RESPONSES), VOCABULARY, seed=2), K)
    return {
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1]), torch.tensor([1, 1, 1, 0, 0, 1, 1])],
        "teacher_topk_indices": list(top.indices.split(RESPONSES)),
        "teacher_topk_log_probs": list(top.log_probs.float().split(RESPONSES)),
        **changes,
    }


def sum_of_sample_mean(masks: list[Tensor]) -> Any:
    def reduce(x: Tensor) -> Tensor:
        parts = zip(x.split(RESPONSES), masks, strict=True)
        means = ((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts)
        return sum(means)

    return reduce


def loss_of(logits: Tensor, microbatch: dict[str, Any], **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    args = SimpleNamespace(**{"rollout_temperature": TEMPERATURE, "allgather_cp": False, **changes})
    return opd_loss(args, microbatch, logits, sum_of_sample_mean(microbatch["loss_masks"]))


def buckets(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the ids, and of all others together."""
    others = log_probs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), others], 1)


def dense(logits: Tensor, microbatch: dict[str, Any], divergence: str = "reverse_kl") -> Tensor:
    """Over the whole vocabulary, with the stored tail of the teacher."""
    ids = torch.cat(microbatch["teacher_topk_indices"])
    p = buckets(torch.log_softmax(responses_of(logits) / TEMPERATURE, 1), ids)
    log_q = torch.cat(microbatch["teacher_topk_log_probs"]).double()
    q = torch.cat([log_q, torch.log1p(-log_q.exp().sum(1, keepdim=True))], 1)
    a, b = (p, q) if divergence == "reverse_kl" else (q, p)
    return sum_of_sample_mean(microbatch["loss_masks"])((a.exp() * (a - b)).sum(1))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_value_and_gradient_are_the_dense_ones(divergence: str) -> None:
    logits, microbatch = logits_leaf(), batch()
    loss, metrics = loss_of(logits, microbatch, opd_divergence=divergence)
    [gradient] = torch.autograd.grad(loss, logits)
    expected = dense(logits, microbatch, divergence)
    [expected_gradient] = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert set(metrics) == {"loss", "opd_student_tail", "opd_teacher_tail"}
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert torch.equal(metrics["loss"], loss.detach())


@pytest.mark.parametrize("divergence", [{}, {"opd_divergence": "jensen_shannon"}], ids=str)
def test_options_that_a_framework_lacks_have_their_defaults(divergence: dict[str, Any]) -> None:
    microbatch = batch()
    reduce = sum_of_sample_mean(microbatch["loss_masks"])
    loss, _ = opd_loss(SimpleNamespace(**divergence), microbatch, logits_leaf(), reduce)
    defaults = {"rollout_temperature": 1.0, "entropy_coef": 0.0, "opd_beta": 0.5}
    options = {"opd_divergence": "reverse_kl", **defaults, **divergence}
    assert torch.equal(loss, loss_of(logits_leaf(), microbatch, **options)[0])


def test_the_weights_are_those_of_several_teachers() -> None:
    samples = vocab_parallel_topk(responses_of(logits_leaf()).detach(), K)
    logits = random(2, sum(RESPONSES), VOCABULARY, seed=3)
    at_ids = [vocab_parallel_log_probs_at(one, samples.indices, with_tail=True) for one in logits]
    first, second = (TopKDistribution(samples.indices, *one).split(RESPONSES) for one in at_ids)

    def loss(*teachers: Any) -> Tensor:
        microbatch = batch(opd_teachers=list(zip(*teachers, strict=True)))
        return loss_of(logits_leaf(), microbatch, opd_teacher_weights=(3.0, 1.0))[0]

    torch.testing.assert_close(loss(first, second), 0.75 * loss(first) + 0.25 * loss(second))


def test_deferred_logits_are_not_materialized() -> None:
    leaf, microbatch = logits_leaf(), batch()
    logits = deferred_logits(leaf, torch.eye(VOCABULARY, dtype=torch.float64), tile_bytes=512)
    loss, _ = loss_of(logits, microbatch)
    expected, _ = loss_of(leaf, microbatch)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    gradients = [torch.autograd.grad(one, leaf)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert logits.is_deferred


def test_padded_batches() -> None:
    microbatch = batch(max_seq_lens=[10] * 3)
    packed = logits_leaf()
    padded = torch.zeros(3, 10, VOCABULARY, dtype=torch.float64)
    for sample, rows in enumerate(packed.detach()[0, : sum(TOTALS)].split(TOTALS)):
        padded[sample, : len(rows)] = rows
    loss, _ = loss_of(padded.requires_grad_(), microbatch, qkv_format="bshd")
    assert torch.equal(loss, loss_of(packed, microbatch)[0])


def test_the_tail_of_the_teacher() -> None:
    """One that is given is used; without one, probabilities that add up to one in float32 leave 1e-7."""
    log_probs = batch()["teacher_topk_log_probs"]
    tails = [torch.log1p(-values.double().exp().sum(1)).float() for values in log_probs]
    loss, known, other, no_cliff = (
        loss_of(logits_leaf(), batch(**changes))[0]
        for changes in (
            {},
            {"teacher_topk_tail": tails},
            {"teacher_topk_tail": [tail - 3 for tail in tails]},
            {"teacher_topk_log_probs": [values.log_softmax(1) for values in log_probs]},
        )
    )
    torch.testing.assert_close(known, loss)
    assert other > loss and no_cliff < 100


def test_what_the_teacher_did_not_score_does_not_count() -> None:
    """As OpenClaw-RL fills it up: log-probabilities of zero at the ids 0 to k - 1."""
    microbatch = batch()
    microbatch["teacher_topk_log_probs"][2][:3] = 0.0
    microbatch["teacher_topk_indices"][2][:3] = torch.arange(K)
    logits = logits_leaf()
    loss, metrics = loss_of(logits, microbatch)
    [gradient] = torch.autograd.grad(loss, logits)
    assert metrics["opd_teacher_tail"] < loss_of(logits, batch())[1]["opd_teacher_tail"]
    start = TOTALS[0] + TOTALS[1] + TOTALS[2] - RESPONSES[2] - 1
    assert not gradient[0, start : start + 3].any()
    assert gradient[0, start + 5 :].any()


def test_the_importance_ratio_needs_the_old_policy() -> None:
    microbatch, name = batch(), "importance_weighted_reverse_kl"
    with pytest.raises(InvalidInputError, match="needs opd_old in the batch"):
        loss_of(logits_leaf(), microbatch, opd_divergence=name)
    of_all = vocab_parallel_topk(responses_of(logits_leaf()).detach(), K, temperature=TEMPERATURE)
    samples = of_all.split(RESPONSES)
    both = {"opd_teachers": [(sample,) for sample in samples], "opd_old": samples}
    loss, _ = loss_of(logits_leaf(), {**microbatch, **both}, opd_divergence=name)
    assert loss == 0  # where they agree the advantage is zero


@pytest.mark.parametrize(
    ("changes", "of_batch", "message"),
    [
        ({"allgather_cp": True}, {}, "--allgather-cp does not go with opd_loss: teachers are scored in the"),
        (
            {"entropy_coef": 0.1},
            {},
            "--entropy-coef does not go with opd_loss: the loss has no entropy bonus",
        ),
        ({"opd_divergence": "kl"}, {}, "divergence must be one of"),
        ({}, {"teacher_topk_log_probs": None}, "--distill-topk"),
        ({}, {"teacher_topk_log_probs": [torch.zeros(3, K)] * 3}, r"are of \[3, 3, 3\] tokens"),
    ],
)
def test_refuses(changes: dict[str, Any], of_batch: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        loss_of(logits_leaf(), batch(**of_batch), **changes)


# --- the rows of verl, beside dense ones


def rows(seed: int) -> Tensor:
    return 2 * random(12, 40, seed=seed)


def of_verl(logits: Tensor, mode: str, floor: float | None = None, **changed: Tensor) -> dict[str, Tensor]:
    log_q, ids = rows(1).log_softmax(1).topk(K, 1)
    old = buckets(logits.detach().log_softmax(1), ids)
    columns = torch.cat([changed.get("log_q", log_q), *([old] if MODES[mode].needs_old else [])], 1)
    return verl_distillation._topk(logits * 1.0, columns, ids, MODES[mode], floor)


@pytest.mark.parametrize("name", MODES)
def test_all_buckets_count(name: str) -> None:
    """Each is zero where student and teacher agree; the first is the forward KL of the buckets."""
    logits = rows(2).requires_grad_()
    outputs = of_verl(logits, name)
    with device_thread():
        [gradient] = torch.autograd.grad(outputs["distillation_losses"].sum(), logits)
    assert gradient.abs().amax(1).min() > 0
    ids = rows(1).topk(K, 1).indices
    p, q = (buckets(x.log_softmax(1), ids) for x in (logits.detach(), rows(1)))
    of_ids = (q.exp() * (q - p))[:, :K].sum(1)
    torch.testing.assert_close(outputs["truncated_losses"].double(), of_ids, rtol=1e-5, atol=1e-6)
    if name == verl_distillation.FORWARD_KL:
        expected = (q.exp() * (q - p)).sum(1)
        torch.testing.assert_close(outputs["distillation_losses"].double(), expected, rtol=1e-5, atol=1e-6)
    agreed = of_verl(rows(1), name)["distillation_losses"]
    assert agreed.abs().max() < 1e-6


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_rows_that_no_teacher_scored_have_neither_loss_nor_gradient(value: float) -> None:
    log_q = rows(1).log_softmax(1).topk(K, 1).values
    log_q[4] = value
    logits = rows(2).requires_grad_()
    outputs = of_verl(logits, verl_distillation.FORWARD_KL, log_q=log_q)
    [gradient] = torch.autograd.grad(outputs["distillation_losses"].sum(), logits)
    assert all(values[4] == 0 and values.isfinite().all() for values in outputs.values())
    assert gradient.isfinite().all() and not gradient[4].any() and gradient[5].any()


def test_log_prob_min_clamp_bounds_ids_and_tail() -> None:
    logits = rows(2)
    clamped = of_verl(logits, verl_distillation.FORWARD_KL, floor=-2.0)["distillation_losses"]
    ids = rows(1).topk(K, 1).indices
    p, q = (buckets(x.log_softmax(1), ids).clamp(min=-2.0) for x in (logits, rows(1)))
    # The divergence of clamped values adds p - q of each bucket, as these no longer cancel.
    expected = (q.exp() * (q - p) - q.exp() + p.exp()).sum(1)
    torch.testing.assert_close(clamped.double(), expected, rtol=1e-5, atol=1e-6)


# --- the scoring of teachers, in an actor that swaps weights

TOKENS, SAMPLED, SWITCHED_BACK = [4, 6], [2, 3], ("switch", "actor")


class Actor:
    """An actor of slime: the weights that it holds decide what its model says."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        teachers = {name: str(folder / name) for name in ("math", "code")}
        for path in teachers.values():
            Path(path).mkdir()
        options = {"opd_top_k": K, "opd_combine": "route", "rollout_temperature": TEMPERATURE, "ckpt_step": 5}
        self.args = SimpleNamespace(**{"opd_teachers": teachers, **options, **changes})
        self.events: list[tuple[Any, ...]] = []
        self.weights = "actor"
        self.weights_backuper = SimpleNamespace(
            backup_tags=["actor"], backup=lambda tag: self.events.append(("backup", tag))
        )

    def _switch_model(self, tag: str) -> None:
        self.events.append(("switch", tag))
        self.weights = tag

    def load_other_checkpoint(self, tag: str, path: str) -> None:
        self.events.append(("load", path, self.args.ckpt_step))
        self.weights_backuper.backup_tags.append(tag)
        self.weights = tag

    def logits(self) -> Tensor:
        seed = ["actor", "opd_math", "opd_code"].index(self.weights)
        return torch.randn(1, sum(TOKENS), VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def log_probs(self) -> Tensor:
        """Of the rows that predict the responses."""
        return (self.logits()[0, [1, 2, 6, 7, 8]] / TEMPERATURE).log_softmax(1)


def score(actor: Actor, names: list[str] | None = None, non_loss_data: bool = False) -> dict[str, Any]:
    """Return the rollout data as the training sees it."""
    scorer = TeacherScorer(actor)
    rollout: dict[str, Any] = {"tokens": None, **({SOURCES: names} if names else {})}

    def forward(function: Callable[..., Any]) -> Any:
        scorer.batch = {"total_lengths": TOKENS, "response_lengths": SAMPLED, **rollout}
        result = function(actor.logits(), args=actor.args, non_loss_data=non_loss_data)
        return result if non_loss_data else result[1]

    before = set(rollout)
    with scorer.scores_in(rollout, forward):
        during = dict(rollout)
    assert set(rollout) == before
    return during


@pytest.mark.parametrize("non_loss_data", [False, True], ids=["slime", "miles"])
def test_each_sample_has_the_distribution_of_the_teacher_that_it_names(
    non_loss_data: bool, tmp_path: Path
) -> None:
    mine = Actor(tmp_path)
    during = score(mine, ["math", "code"], non_loss_data)

    ids = torch.cat([old.indices for old in during["opd_old"]])
    assert torch.equal(ids.sort(1).values, mine.log_probs().topk(K).indices.sort(1).values)
    paths = mine.args.opd_teachers
    loads = [("load", paths[name], None) for name in ("math", "code")]  # no iteration of the policy's
    assert mine.events == [SWITCHED_BACK, *loads, SWITCHED_BACK]
    assert mine.args.ckpt_step == 5
    for sample, (weights, rows) in enumerate((("opd_math", slice(0, 2)), ("opd_code", slice(2, 5)))):
        [teacher] = during["opd_teachers"][sample]
        mine.weights = weights
        expected = mine.log_probs()[rows].gather(1, ids[rows])
        torch.testing.assert_close(teacher.log_probs, expected)
        torch.testing.assert_close(teacher.tail_log_prob.exp(), 1 - expected.exp().sum(1))


def test_a_teacher_in_memory_is_not_read_from_disk_again(tmp_path: Path) -> None:
    mine = Actor(tmp_path)
    score(mine, ["math", "code"])
    (tmp_path / "code").rmdir()
    mine.events.clear()
    score(mine, ["math", "math"])
    tags = ("actor", "opd_math", "opd_code", "actor")
    assert mine.events == [("switch", tag) for tag in tags]


def test_the_actor_is_back_after_a_teacher_that_cannot_be_loaded(tmp_path: Path) -> None:
    mine: Any = Actor(tmp_path, opd_combine="average")
    mine.load_other_checkpoint = lambda tag, path: 1 / 0
    with pytest.raises(ZeroDivisionError):
        score(mine)
    assert mine.events[-1] == SWITCHED_BACK


def test_miles_is_made_to_keep_a_copy_of_the_actor(tmp_path: Path) -> None:
    mine: Any = Actor(tmp_path, opd_combine="average")
    mine._enable_weight_backup = False
    score(mine)
    assert mine.with_opd_teacher and mine.events[0] == ("backup", "actor")


def test_a_microbatch_has_the_distributions_that_are_known_so_far() -> None:
    def get_batch(data_iterator: Any, keys: list[str]) -> dict[str, Any]:
        return {key: data_iterator.rollout_data[key] for key in keys}

    iterator = SimpleNamespace(rollout_data={"tokens": 1, "opd_old": 2, "rewards": 3})
    call = Call(get_batch, (iterator, ["tokens"]))
    assert distillation_teachers.get_batch(call) == {"tokens": 1}
    scorer = TeacherScorer(None)
    with distillation_teachers.scorer.enter(scorer):
        assert distillation_teachers.get_batch(call) == scorer.batch == {"tokens": 1, "opd_old": 2}


# --- vocabularies of teachers, as checkpoints say that may be damaged or hostile


def huggingface(folder: Path, size: int, nested: bool = False) -> str:
    folder.mkdir()
    config = {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    return str(folder)


def megatron(root: Path, rows: int) -> str:
    from torch.distributed import checkpoint

    folder = root / "iter_0000005"
    folder.mkdir(parents=True)
    weights = {"embedding.word_embeddings.weight": torch.zeros(rows, 2), "output": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.save(weights, checkpoint_id=folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return str(root)


def test_the_same_vocabulary_padded_or_not(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", 1000)
    nested = huggingface(tmp_path / "hf", 1000, nested=True)
    most = megatron(tmp_path / "most", 1000 + 2047)  # as much padding as a checkpoint may have to load
    check_vocabularies({"hf": nested, "padded": megatron(tmp_path / "megatron", 1024), "most": most}, student)


def test_another_vocabulary(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", 1000)
    (tmp_path / "empty").mkdir()
    for teacher, message in (
        (huggingface(tmp_path / "other", 1001), "'math' .* has a vocabulary of 1001, the student .* 1000"),
        (megatron(tmp_path / "fewer", 999), "'math' .* has a vocabulary of 999"),
        (megatron(tmp_path / "more", 1000 + 2048), "'math' .* has a vocabulary of 3048"),
        (str(tmp_path / "empty"), "cannot be loaded: .*empty"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            check_vocabularies({"math": teacher}, student)


@pytest.mark.parametrize(
    "text", ["[1000]", "{", '"text"', '{"vocab_size": "1000"}', '{"text_config": 3}', "\x00"]
)
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    student, teacher = (huggingface(tmp_path / name, 1000) for name in ("student", "teacher"))
    Path(teacher, "config.json").write_text(text)
    for models in (({"math": teacher}, student), ({"math": student}, teacher)):
        with pytest.raises(CheckpointError, match=r"teacher/config\.json is damaged"):
            check_vocabularies(*models)


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("touched"),)


def sized(size: object) -> bytes:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    entry = TensorStorageMetadata(TensorProperties(), size, [])  # type: ignore[arg-type]
    return pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data={}))


@pytest.mark.parametrize(
    "index",
    [pickle.dumps(Hostile()), sized(None), sized(torch.Size())],
    ids=["hostile", "no size", "a scalar"],
)
def test_a_damaged_or_hostile_index_is_named(
    index: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    student = huggingface(tmp_path / "student", 1000)
    teacher = megatron(tmp_path / "teacher", 1024)
    (tmp_path / "teacher" / "iter_0000005" / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        check_vocabularies({"math": teacher}, student)
    assert not (tmp_path / "touched").exists()
