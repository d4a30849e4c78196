"""What one rank alone finds wrong is an error on every rank, and no rank waits."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_rl_patches import losses
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss, microbatch_layout
from megatron_rl_patches.frameworks.distillation_teachers import TeacherScorer
from tests.ranks import everywhere, on_ranks
from tests.references.sent_bytes import sent_bytes


def refused_alike(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InvalidInputError) as raised:
        call()
    first, second = everywhere(str(raised.value))
    # A rank that has nothing wrong names the one that has.
    assert re.sub(r"^rank \d+: ", "", first) == re.sub(r"^rank \d+: ", "", second)
    assert message in first


FAULTS: dict[str, str] = {
    "folder": "has no folder",
    "name": "samples name ['poetry'], the teachers are ['math']",
    "number": "samples name ['3'], the",
    "names": "the rollout has no source_names",
}


def check_names_and_folders_of_teachers(tmp_path: Path) -> None:
    here = dist.get_rank() == 1
    (tmp_path / "math").mkdir(exist_ok=True)

    forward = mock.Mock(side_effect=AssertionError("a rank has started a forward pass"))
    for fault, message in FAULTS.items():
        teachers = {"math": str(tmp_path / ("missing" if here and fault == "folder" else "math"))}
        other = {"name": "poetry", "number": 3}.get(fault, "math") if here else "math"
        rollout: dict[str, Any] = {} if here and fault == "names" else {"source_names": ["math", other]}
        args = SimpleNamespace(opd_teachers=teachers, opd_combine="route", opd_top_k="full")
        scorer = TeacherScorer(SimpleNamespace(args=args, weights_backuper=SimpleNamespace(backup_tags={})))
        refused_alike(message, scorer.scores_in(rollout, forward).__enter__)


def check_logits_that_are_made_on_the_last_stage() -> None:
    how = {"opd_combine": "mixture", "opd_top_k": "full", "opd_divergence": "reverse_kl"}
    args, switched = SimpleNamespace(opd_teachers={"math": "."}, **how), list[str]()
    weights = SimpleNamespace(backup_tags={"opd_math"})
    state = {"model": [torch.nn.Linear(1, 1)], "weights_backuper": weights, "_switch_model": switched.append}
    scorer = TeacherScorer(SimpleNamespace(args=args, **state))
    scorer.batch = {"total_lengths": [4], "response_lengths": [2]}

    def forward(function: Any) -> dict[str, Any]:
        if dist.get_rank() == 0:  # not the last pipeline stage
            return {}
        return dict(function(torch.zeros(1, 4, 8), args=args)[1])

    rollout: dict[str, Any] = {}
    groups = microbatch_layout.Groups(0, 1, None, None)
    with mock.patch.object(microbatch_layout, "groups_of", lambda: groups):
        refused_alike("not the product of hidden states", scorer.scores_in(rollout, forward).__enter__)
    assert switched == ["actor", "opd_math", "actor"] and not rollout


def check_teachers_that_disagree() -> None:
    """They are refused before a collective."""
    group = dist.group.WORLD

    def logits(rows: int, vocabulary: int) -> torch.Tensor:
        return losses.deferred_logits(torch.ones(rows, 3), torch.ones(vocabulary, 3), tp_group=group)

    # Without tensor parallelism the number of ids would say which columns of another padding to compare.
    for rows, vocabulary, num_ids in ((5, 8, None), (4, 12, None), (4, 12, 16)):
        teachers = [logits(4, 8), logits(rows, vocabulary)]
        message = rf"teacher 1 is \[{rows}, {vocabulary}\]"
        with sent_bytes() as sent, pytest.raises(InvalidInputError, match=message) as raised:
            losses.full_vocabulary_divergence(logits(4, 8), teachers, tp_group=group, vocab_size=num_ids)
        assert not sent
        first, second = everywhere(str(raised.value))
        assert first == second


def check_what_one_replica_cannot_average() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    mine, nothing = [torch.ones(2 + 2 * rank)], [[torch.ones(2)], []]
    count = partial(losses.mean_count, normalization="token", data_parallel_group=group)
    assert count(mine, 1) == 3
    refused_alike("loss_masks have the shapes []", lambda: count(nothing[rank], 1))
    refused_alike("num_microbatches is 0", lambda: count(mine, 1 - rank))
    loss, largest = torch.tensor([4.0 * rank, 2.0]), torch.tensor([1.0 + rank, 1.0])
    reports = [{"loss": loss, "ratio_max": largest}, {"loss": loss}]
    assert losses.average_metrics(reports[:1], group) == {"loss": 1, "ratio_max": 2}
    differ = "rank 1 of the group has ['loss'], rank 0 ['loss', 'ratio_max']"
    refused_alike(differ, lambda: losses.average_metrics(reports[rank:][:1], group))
    refused_alike("that of microbatch 1 has ['loss']", lambda: losses.average_metrics(reports, group))


def check_a_wrong_id_of_one_context_parallel_rank() -> None:
    ones, options = [torch.ones(6)], {"cp_group": dist.group.WORLD}
    cut = {"cp_rank": dist.get_rank(), "cp_size": 2}
    layout = losses.SequenceLayout.build([8], [6], qkv_format="bshd", max_seq_lens=[8], **cut)
    tokens, of_none, twice = torch.zeros(8, dtype=torch.int64), *torch.arange(3).repeat(2, 6, 1)
    tokens[4] = of_none[2, 1] = 5  # as many ids as there are; their rows are those of the second rank
    twice[2, 1] = twice[2, 0]
    logits = torch.randn(1, 4, 5, requires_grad=True)
    with pytest.raises(InvalidInputError):
        losses.make_loss_func([tokens], layout, losses.PolicyBatch(ones, ones), **options)(logits)
    for indices in (of_none, twice):
        teacher = losses.TopKDistribution(indices, torch.full((6, 3), -2.0), torch.full((6,), -1.0))
        batch = losses.DistillationBatch([[teacher]], ones)
        with pytest.raises(InvalidInputError):
            losses.make_distillation_loss_func(layout, batch, **options)(logits)


@on_ranks(2, cpu_backend=False, timeout=60)
def test_what_one_rank_alone_finds_wrong_is_an_error_on_all(tmp_path: Path) -> None:
    check_names_and_folders_of_teachers(tmp_path)
    check_logits_that_are_made_on_the_last_stage()
    check_teachers_that_disagree()
    check_what_one_replica_cannot_average()
    check_a_wrong_id_of_one_context_parallel_rank()


def test_of_one_id_a_filler_of_the_framework_is_no_teacher() -> None:
    """With k = 1 its one probability of one, at id 0, adds up to no more than it should."""
    indices = torch.tensor([[0], [3], [0], [0]])
    log_probs = torch.tensor([[0.0], [0.0], [-0.5], [-1e-7]])
    _, is_known = distillation_loss.with_tail(indices, log_probs)
    assert is_known.tolist() == [False, True, True, True]
    assert distillation_loss.with_tail(indices, log_probs, torch.full((4,), -torch.inf))[1].all()
