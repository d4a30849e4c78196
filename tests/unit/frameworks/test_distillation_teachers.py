"""The scoring of teachers in an actor that swaps weights; on real ranks, see ``tests/faults``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss, distillation_teachers
from megatron_rl_patches.frameworks.distillation_teachers import SOURCES, TeacherScorer

TOTALS, RESPONSES, VOCABULARY, K, TEMPERATURE = [4, 6], [2, 3], 7, 3, 0.5
SWITCHED_BACK = ("switch", "actor")


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
        return torch.randn(1, sum(TOTALS), VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def log_probs(self) -> Tensor:
        """Of the rows that predict the responses."""
        rows = torch.tensor([1, 2, 6, 7, 8])
        return (self.logits()[0, rows] / TEMPERATURE).log_softmax(1)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation_loss, "_parallel_state", lambda: (0, 1, None))


@pytest.fixture
def actor(tmp_path: Path) -> Callable[..., Actor]:
    return functools.partial(Actor, tmp_path)


def score(actor: Actor, names: list[str] | None = None, non_loss_data: bool = False) -> dict[str, Any]:
    """Return the rollout data as the training sees it."""
    scorer = TeacherScorer(actor)
    rollout: dict[str, Any] = {"tokens": None, **({SOURCES: names} if names else {})}

    def forward(function: Callable[..., Any]) -> Any:
        scorer.batch = {"total_lengths": TOTALS, "response_lengths": RESPONSES, **rollout}
        result = function(actor.logits(), args=actor.args, non_loss_data=non_loss_data)
        return result if non_loss_data else result[1]

    before = set(rollout)
    with scorer.scores_in(rollout, forward):
        during = dict(rollout)
    assert set(rollout) == before
    return during


@pytest.mark.parametrize("non_loss_data", [False, True], ids=["slime", "miles"])
def test_each_sample_has_the_distribution_of_the_teacher_that_it_names(
    actor: Callable[..., Actor], non_loss_data: bool
) -> None:
    mine = actor()
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


def test_a_teacher_in_memory_is_not_read_from_disk_again(actor: Callable[..., Actor], tmp_path: Path) -> None:
    mine = actor()
    score(mine, ["math", "code"])
    (tmp_path / "code").rmdir()
    mine.events.clear()
    score(mine, ["math", "math"])
    tags = ("actor", "opd_math", "opd_code", "actor")
    assert mine.events == [("switch", tag) for tag in tags]


@pytest.mark.parametrize(
    ("names", "message"),
    [(None, f"the rollout has no {SOURCES}"), (["math", "art"], r"samples name \['art'\]")],
)
def test_samples_must_name_a_teacher(
    actor: Callable[..., Actor], names: list[str] | None, message: str
) -> None:
    mine = actor()
    with pytest.raises(InvalidInputError, match=message):
        score(mine, names)
    assert not mine.events


def test_the_actor_is_back_after_a_teacher_that_cannot_be_loaded(actor: Callable[..., Actor]) -> None:
    mine: Any = actor(opd_combine="average")
    mine.load_other_checkpoint = lambda tag, path: 1 / 0
    with pytest.raises(ZeroDivisionError):
        score(mine)
    assert mine.events[-1] == SWITCHED_BACK


def test_miles_is_made_to_keep_a_copy_of_the_actor(actor: Callable[..., Actor]) -> None:
    mine: Any = actor(opd_combine="average")
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
