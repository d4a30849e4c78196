"""``distillation`` on the stand-in for slime, and real megatron-core, on one rank and on two."""

import argparse
import importlib
from itertools import chain
from pathlib import Path
from typing import Any
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


class Student:
    """A job of slime, its actor, and checkpoints of two teachers."""

    def __init__(self, folder: Path, top_k: int | str, combine: str) -> None:
        from tests.frameworks.jobs import SlimeJob

        # Of a checkpoint each rank has its own part.
        paths = {name: folder / name / str(torch.distributed.get_rank()) for name in TEACHERS}
        for path in paths.values():
            path.mkdir(parents=True)
        teachers = tuple((name, str(path)) for name, path in paths.items())
        settings = Settings(opd_top_k=top_k, opd_combine=combine, opd_teachers=teachers)  # type: ignore[arg-type]
        apply(NAME, "reentrant-train", settings=settings)
        job: Any = SlimeJob(tp=torch.distributed.get_world_size())
        self.model = importlib.import_module(job.homes[0])
        self.args, self.rollout = job.args, _rollout()
        arguments = importlib.import_module("slime.utils.arguments")
        parser = arguments.get_slime_extra_args_provider()(argparse.ArgumentParser())
        words = ["--loss-type", "opd_loss", "--rollout-temperature", str(TEMPERATURE)]
        arguments.slime_validate_args(args := parser.parse_args(words))
        vars(self.args).update(vars(args), forward_step_func=self._forward_step)
        self.losses: list[float] = []
        [self.chunk] = job.model
        self.probs = {"actor": self._probabilities()}
        self.actor = job.module.MegatronTrainRayActor(self.args, *job.state)
        self.own = self.weights()
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for name, path in paths.items():
            weights = {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in self.own.items()}
            # What is whole on every rank must be the same there.
            for n, w in self.chunk.module.named_parameters():
                if not getattr(w, "tensor_model_parallel", False):
                    torch.distributed.broadcast(weights[n], 0)
            torch.save(weights, path / "weights.pt")
            self.chunk.module.load_state_dict(weights, strict=False)
            self.probs[name] = self._probabilities()
        self.chunk.module.load_state_dict(self.own, strict=False)

    def _forward_step(self, iterator: Any, chunk: Any) -> tuple[Any, Any]:
        keys = ["tokens", "total_lengths", "response_lengths", "loss_masks"]
        batch = self.model.get_batch(iterator, keys)

        def sum_of_sample_mean(x: torch.Tensor) -> Any:
            return sum(part.mean() for part in x.split(batch["response_lengths"]))

        def loss_of(logits: Any) -> Any:
            loss, metrics = opd_loss(self.args, batch, logits, sum_of_sample_mean)
            self.losses[-1] += float(metrics["loss"])
            return loss, metrics

        return self.model.logits_of(chunk, batch["tokens"]), loss_of

    def _probabilities(self) -> Any:
        """Of all response tokens, over the whole vocabulary."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        parts = []
        for indices in MICROBATCHES:
            tokens = torch.cat([self.rollout["tokens"][index] for index in indices])
            with torch.no_grad():
                logits = self.model.logits_of(self.chunk, tokens[None])
                logits = gather_from_tensor_model_parallel_region(logits)[0]
            samples = logits.split([TOTALS[index] for index in indices])
            parts += [rows[-RESPONSES[i] - 1 : -1] for i, rows in zip(indices, samples, strict=True)]
        return (torch.cat(parts).double() / TEMPERATURE).softmax(1)

    def divergences(self, top_k: int | None = None) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the dense reverse KL to each teacher, of the tokens of each sample."""
        probs = self.probs
        if top_k is not None:
            ids = probs["actor"].topk(top_k, dim=1).indices
            top = {name: p.gather(1, ids) for name, p in probs.items()}
            probs = {name: torch.cat([p, 1 - p.sum(1, keepdim=True)], 1) for name, p in top.items()}
        p = probs["actor"]
        lengths = [RESPONSES[i] for i in chain(*MICROBATCHES)]
        return {name: (p * (p / probs[name]).log()).sum(1).split(lengths) for name in TEACHERS}

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.chunk.module.state_dict()
        return {name: weight.clone() for name, weight in state.items() if torch.is_tensor(weight)}

    def train(self) -> None:
        self.losses.append(0.0)
        self.actor.train_actor(len(self.losses) - 1, self.rollout)


@on_ranks(2)
def test_the_student_approaches_its_teachers(tmp_path: Path) -> None:
    student = Student(tmp_path, "full", "average")
    student.args.ckpt_step = 5  # of the policy's checkpoint, not of a teacher's
    for _ in range(3):
        student.train()
    assert student.actor.loaded == [("opd_math", None), ("opd_code", None)] and student.args.ckpt_step == 5
    assert set(states_of("slime", patch=NAME).values()) == {"applied"}
    losses = student.losses
    dense = sum(
        float(of_sample.mean()) for samples in student.divergences().values() for of_sample in samples
    )
    assert losses[0] == pytest.approx(dense / len(TEACHERS), rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert everywhere(losses) == [losses] * 2
    assert not set(KEYS) & set(student.rollout)
    assert sorted(student.actor.weights_backuper.backup_tags) == ["actor", "opd_code", "opd_math"]


@on_ranks(1)
def test_a_mixture_has_the_mean_of_the_teachers_probabilities(tmp_path: Path) -> None:
    student = Student(tmp_path, K, "mixture")
    student.train()
    student.probs |= dict.fromkeys(TEACHERS, sum(student.probs[name] for name in TEACHERS) / len(TEACHERS))
    dense = sum(float(of_sample.mean()) for of_sample in student.divergences(K)["math"])
    assert student.losses == [pytest.approx(dense, rel=1e-4)]


@on_ranks(1)
def test_what_happens_around_the_training(tmp_path: Path) -> None:
    """Nothing is left behind when it raises."""
    student = Student(tmp_path, K, "route")
    args, seen, own = student.args, [], student.model.forward_only

    def fail(iterator: Any, chunk: Any) -> None:
        seen.append(set(KEYS) & set(student.rollout))
        assert all(torch.equal(weight, student.own[name]) for name, weight in student.weights().items())
        raise ArithmeticError

    with mock.patch.object(student.actor.weights_backuper, "backup", side_effect=ArithmeticError):
        with pytest.raises(ArithmeticError):  # when the weights of a teacher are in the model
            student.train()
        assert all(torch.equal(weight, student.own[name]) for name, weight in student.weights().items())
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

    def forward_only_of_miles(*state: Any, rollout_id: int) -> Any:
        assert rollout_id == len(student.losses) - 1
        return own(*state)

    args.collect_non_loss_data = True  # as miles has it
    with mock.patch.object(student.model, "forward_only", forward_only_of_miles):
        student.train()
    divergences = student.divergences(K)
    order = enumerate(chain(*MICROBATCHES))
    dense = sum(float(divergences[SOURCES[sample]][place].mean()) for place, sample in order)
    assert student.losses[-1] == pytest.approx(dense, rel=1e-4)
    # miles keeps no copy of a model that it never swaps: here it is made to.
    student.actor._enable_weight_backup = False
    with mock.patch.object(student.actor.weights_backuper, "backup") as backup:
        student.train()
    assert student.actor.with_opd_teacher and backup.mock_calls[0] == mock.call("actor")
