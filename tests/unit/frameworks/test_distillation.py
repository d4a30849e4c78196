"""Distillation in frameworks: slime's loss and verl's rows against float64, and which teachers fit.

On several ranks, and with teachers that score, see ``test_distillation.py`` in tests/frameworks, tests/real
and tests/faults; verl itself runs in ``test_real_verl_distillation.py``.
"""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.frameworks import microbatch_layout, verl_distillation
from megatron_rl_patches.frameworks.distillation_arguments import check_vocabularies
from megatron_rl_patches.frameworks.distillation_loss import opd_loss
from megatron_rl_patches.frameworks.verl_distillation import MODES
from megatron_rl_patches.losses import (
    TopKDistribution,
    deferred_logits,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from tests.device_thread import device_thread
from tests.references.dense import buckets, dense_divergence, random
from tests.worlds.files import write

VOCABULARY, K, TEMPERATURE = 13, 4, 0.7
TOTALS, RESPONSES = [6, 4, 9], [3, 1, 7]
PADDING = 5


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatch_layout, "groups_of", lambda: microbatch_layout.Groups(0, 1, None, None))
    monkeypatch.setattr(verl_distillation, "tensor_parallel_group", lambda: None)


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


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_value_and_gradient_are_the_dense_ones(divergence: str) -> None:
    """With the defaults of options that a framework lacks, and the stored tail; logits may be deferred."""
    leaf, microbatch = logits_leaf(), batch()
    logits, changes = leaf, {} if divergence == "reverse_kl" else {"opd_divergence": divergence}
    if divergence == "forward_kl":
        logits = deferred_logits(leaf, torch.eye(VOCABULARY, dtype=torch.float64), tile_bytes=512)
    loss, metrics = loss_of(logits, microbatch, **changes)
    assert divergence != "forward_kl" or logits.is_deferred
    ids = torch.cat(microbatch["teacher_topk_indices"])
    log_p = buckets(torch.log_softmax(responses_of(leaf) / TEMPERATURE, 1), ids)
    log_q = torch.cat(microbatch["teacher_topk_log_probs"]).double()
    log_q = torch.cat([log_q, torch.log1p(-log_q.exp().sum(1, keepdim=True))], 1)
    reduce = sum_of_sample_mean(microbatch["loss_masks"])
    expected = reduce(dense_divergence(divergence, log_p, log_q, beta=0.5))
    gradients = [torch.autograd.grad(one, leaf)[0] for one in (loss, expected)]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert set(metrics) == {"loss", "opd_student_tail", "opd_teacher_tail"}
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())
    assert torch.equal(metrics["loss"], loss.detach())


def test_the_weights_are_those_of_several_teachers() -> None:
    samples = vocab_parallel_topk(responses_of(logits_leaf()).detach(), K)
    logits = random(2, sum(RESPONSES), VOCABULARY, seed=3)
    at_ids = [vocab_parallel_log_probs_at(one, samples.indices, with_tail=True) for one in logits]
    first, second = (TopKDistribution(samples.indices, *one).split(RESPONSES) for one in at_ids)

    def loss(*teachers: Any) -> Tensor:
        microbatch = batch(opd_teachers=list(zip(*teachers, strict=True)))
        return loss_of(logits_leaf(), microbatch, opd_teacher_weights=(3.0, 1.0))[0]

    torch.testing.assert_close(loss(first, second), 0.75 * loss(first) + 0.25 * loss(second))


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
        ({"entropy_coef": 0.1}, {}, "--entropy-coef does not go with opd_loss: the loss has no entropy"),
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
    log_q, logits = rows(1).log_softmax(1).topk(K, 1).values, rows(2).requires_grad_()
    log_q[4] = value
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


# --- vocabularies of teachers, as checkpoints say that may be damaged


def huggingface(folder: Path, config: Any) -> str:
    return str(write(folder, {"config.json": config if isinstance(config, str) else json.dumps(config)}))


def megatron(root: Path, size: Any) -> str:
    """A checkpoint whose index has an embedding of this size."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    files = {"metadata.json": json.dumps({"sharded_backend": "torch_dist"})}
    folder = write(root / "iter_0000005", files)
    entry = TensorStorageMetadata(TensorProperties(), size, [])
    index = Metadata({"embedding.word_embeddings.weight": entry}, storage_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return str(write(root, {"latest_checkpointed_iteration.txt": "5"}))


def test_the_vocabulary_is_the_students_padded_or_not(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", {"vocab_size": 1000})
    nested = huggingface(tmp_path / "nested", {"text_config": {"vocab_size": 1000}})
    most = 1000 + 2047  # as much padding as a checkpoint may have to load
    sizes = {name: torch.Size([size, 2]) for name, size in (("least", 1000), ("most", most))}
    teachers = {name: megatron(tmp_path / name, size) for name, size in sizes.items()}
    check_vocabularies({"nested": nested, **teachers}, student)
    (tmp_path / "empty").mkdir()
    for teacher, message in (
        (huggingface(tmp_path / "other", {"vocab_size": 1001}), "vocabulary of 1001, the student .* 1000"),
        (megatron(tmp_path / "fewer", torch.Size([999, 2])), "'math' .* has a vocabulary of 999"),
        (megatron(tmp_path / "more", torch.Size([most + 1, 2])), "'math' .* has a vocabulary of 3048"),
        (str(tmp_path / "empty"), "cannot be loaded: .*empty"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            check_vocabularies({"math": teacher}, student)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", {"vocab_size": 1000})
    for text in ("[1000]", "{", '"text"', '{"vocab_size": "1000"}', '{"text_config": 3}', "\0"):
        teacher = huggingface(tmp_path / "teacher", text)
        for models in (({"math": teacher}, student), ({"math": student}, teacher)):
            with pytest.raises(CheckpointError, match=r"teacher/config\.json is damaged"):
                check_vocabularies(*models)
    for number, size in enumerate((None, torch.Size())):
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            check_vocabularies({"math": megatron(tmp_path / f"{number}", size)}, student)
