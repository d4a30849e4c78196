"""``distillation`` on the stand-ins for slime and miles, and real megatron-core, on one rank and on two."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_rl_patches import Settings, apply
from megatron_rl_patches.frameworks.distillation_loss import KEYS, opd_loss
from tests.frameworks.rollouts import states_of
from tests.ranks import everywhere, on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

NAME = "distillation"
K, TEMPERATURE = 24, 0.8
TOTALS, RESPONSES = [9, 7, 12], [4, 3, 6]
TEACHERS = ("math", "code")
SOURCES = ["math", "code", "math"]
MICROBATCHES = [[2], [0, 1]]


def _rollout() -> dict[str, Any]:
    from tests.references import tiny_gpt

    generator = torch.Generator().manual_seed(5)
    return {
        "tokens": [torch.randint(tiny_gpt.VOCABULARY, (total,), generator=generator) for total in TOTALS],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.ones(response, dtype=torch.int) for response in RESPONSES],
        "micro_batch_indices": MICROBATCHES,
        "source_names": list(SOURCES),
    }


def _arguments(framework: str) -> argparse.Namespace:
    """Of the framework's command line."""
    arguments = importlib.import_module(f"{framework}.utils.arguments")
    provider = getattr(arguments, f"get_{framework}_extra_args_provider")()
    options = ["--loss-type", "opd_loss", "--rollout-temperature", str(TEMPERATURE)]
    args = provider(argparse.ArgumentParser()).parse_args(options)
    getattr(arguments, f"{framework}_validate_args")(args)
    return args


class Student:
    """A job of a framework, its actor, and checkpoints of two teachers."""

    def __init__(self, framework: str, folder: Path, top_k: int | str = K, combine: str = "mixture") -> None:
        from tests.frameworks.jobs import JOBS

        # Of a checkpoint each rank has its own part.
        self.paths = {name: folder / name / str(torch.distributed.get_rank()) for name in TEACHERS}
        for path in self.paths.values():
            path.mkdir(parents=True, exist_ok=True)
        teachers = tuple((name, str(path)) for name, path in self.paths.items())
        chosen = {"opd_top_k": top_k, "opd_combine": combine, "opd_teachers": teachers}
        apply(NAME, "reentrant-train", settings=Settings(**chosen))
        job = cast("Any", JOBS[framework](tp=torch.distributed.get_world_size()))
        self.args, self.rollout = job.args, _rollout()
        vars(self.args).update(vars(_arguments(framework)), forward_step_func=self._forward_step)
        self.get_batch = importlib.import_module(job.homes[0]).get_batch
        self.losses: list[float] = []
        [self.chunk] = job.model
        self.probs = {"actor": self._probabilities()}
        self.actor = job.module.MegatronTrainRayActor(self.args, *job.state)
        self.own = self.weights()
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for name, path in self.paths.items():
            weights = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in self.own.items()}
            # What is whole on every rank must be the same there.
            for n, w in self.chunk.module.named_parameters():
                if not getattr(w, "tensor_model_parallel", False):
                    torch.distributed.broadcast(weights[n], 0)
            torch.save(weights, path / "weights.pt")
            self.chunk.module.load_state_dict(weights, strict=False)
            self.probs[name] = self._probabilities()
        self.chunk.module.load_state_dict(self.own, strict=False)
        self._options = {"witness_info": None, "attempt": 0} if framework == "miles" else {}

    def _forward_step(self, iterator: Any, chunk: Any) -> tuple[Any, Any]:
        import rl_framework

        batch = self.get_batch(iterator, ["tokens", "total_lengths", "response_lengths", "loss_masks"])

        def sum_of_sample_mean(x: torch.Tensor) -> Any:
            return sum(part.mean() for part in x.split(batch["response_lengths"]))

        def loss_of(logits: Any) -> Any:
            loss, metrics = opd_loss(self.args, batch, logits, sum_of_sample_mean)
            self.losses[-1] += float(metrics["loss"])
            return loss, metrics

        return rl_framework.logits_of(chunk, batch["tokens"]), loss_of

    def _probabilities(self) -> Any:
        """Of all response tokens, over the whole vocabulary."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
        from rl_framework import logits_of

        parts = []
        for indices in MICROBATCHES:
            tokens = torch.cat([self.rollout["tokens"][index] for index in indices])
            with torch.no_grad():
                logits = logits_of(self.chunk, tokens[None])
                logits = gather_from_tensor_model_parallel_region(logits)[0]
            samples = logits.split([TOTALS[index] for index in indices])
            parts += [rows[-RESPONSES[i] - 1 : -1] for i, rows in zip(indices, samples, strict=True)]
        return (torch.cat(parts).double() / TEMPERATURE).softmax(1)

    def dense_loss(self, top_k: int | str, combine: str) -> Any:
        """Sum over samples of the mean reverse KL, from whole distributions ``[n, V]``."""
        probs = self.probs
        if top_k != "full":
            ids = probs["actor"].topk(int(top_k), dim=1).indices
            top = {name: p.gather(1, ids) for name, p in probs.items()}
            probs = {name: torch.cat([p, 1 - p.sum(1, keepdim=True)], 1) for name, p in top.items()}

        def kl(q: Any) -> Any:
            return (probs["actor"] * (probs["actor"] / q).log()).sum(1)

        order = [*MICROBATCHES[0], *MICROBATCHES[1]]
        lengths = [RESPONSES[i] for i in order]
        teachers = [probs[name] for name in TEACHERS]
        if combine == "mixture":
            values = kl(sum(teachers) / len(teachers))
        elif combine == "average":
            values = sum(map(kl, teachers)) / len(teachers)
        else:
            parts = {name: kl(probs[name]).split(lengths) for name in TEACHERS}
            values = torch.cat([parts[SOURCES[sample]][place] for place, sample in enumerate(order)])
        return sum(part.mean() for part in values.split(lengths))

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.chunk.module.state_dict()
        return {name: weight.clone() for name, weight in state.items() if torch.is_tensor(weight)}

    def has_its_own_weights(self) -> bool:
        return all(torch.equal(weight, self.own[name]) for name, weight in self.weights().items())

    def train(self) -> None:
        self.losses.append(0.0)
        self.actor.train_actor(len(self.losses) - 1, self.rollout, **self._options)


@pytest.mark.parametrize(
    ("framework", "ranks", "top_k", "combine"),
    [
        ("slime", 2, "full", "average"),
        ("slime", 1, K, "route"),
        ("miles", 2, K, "mixture"),
        pytest.param("miles", 1, "full", "mixture", marks=pytest.mark.slow),
    ],
)
@on_ranks(lambda ranks: ranks)
def test_the_student_approaches_its_teachers(
    framework: str, ranks: int, top_k: int | str, combine: str, tmp_path: Path
) -> None:
    student = Student(framework, tmp_path, top_k, combine)
    for _ in range(4):
        student.train()
    assert set(states_of(framework, patch=NAME).values()) == {"applied"}
    losses = student.losses
    assert losses[0] == pytest.approx(float(student.dense_loss(top_k, combine)), rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert all(other == losses for other in everywhere(losses))
    assert not set(KEYS) & set(student.rollout)
    assert sorted(student.actor.weights_backuper.backup_tags) == ["actor", "opd_code", "opd_math"]


@on_ranks(1)
def test_what_happens_around_the_training(tmp_path: Path) -> None:
    """Nothing is left behind when it raises; in ``tests/unit/frameworks`` teachers are loaded."""
    student = Student("slime", tmp_path)
    args, seen = student.args, []

    def fail(iterator: Any, chunk: Any) -> None:
        seen.append(set(KEYS) & set(student.rollout))
        assert student.has_its_own_weights()
        raise ArithmeticError

    with mock.patch.object(args, "forward_step_func", fail):
        other_loss = mock.patch.object(args, "custom_loss_function_path", "another.loss")
        with other_loss, pytest.raises(ArithmeticError):
            student.train()
        assert list(student.actor.weights_backuper.backup_tags) == ["actor"]
        with pytest.raises(ArithmeticError):
            student.train()
    assert seen == [set(), set(KEYS)]
    assert student.rollout.keys() == _rollout().keys()
    # Weights that were dropped with the paused memory are put back first.
    with torch.no_grad():
        for parameter in student.chunk.module.parameters():
            parameter.zero_()
    student.train()
    assert student.losses[-1] == pytest.approx(float(student.dense_loss(K, "mixture")), rel=1e-4)
