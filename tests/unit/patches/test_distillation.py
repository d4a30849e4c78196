"""``distillation`` on a framework in slime's shape: from the command line to the gradient."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl_patches import PatchError, Settings, apply, revert, status
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks import distillation_loss as framework_distillation
from megatron_rl_patches.frameworks.distillation_arguments import LOSS_PATH, LOSS_TYPE
from megatron_rl_patches.frameworks.distillation_loss import KEYS, placeholder_advantages, zero_reward

from . import slime_like

NAME = "distillation"
VOCABULARY, K, TEMPERATURE = 11, 3, 0.8
TOTALS, RESPONSES = [5, 7, 4], [3, 4, 2]
WEIGHTS = (3.0, 1.0)


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """``framework("utils.arguments")`` imports a module of the framework; the engine is the test's own."""
    slime_like.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "slime"}
    monkeypatch.setattr(installer, "installer", installer.Installer())
    monkeypatch.setattr(installer.installer.announcer, "done", True)
    monkeypatch.setattr(framework_distillation, "_parallel_state", lambda: (0, 1, None))
    yield lambda module: importlib.import_module(f"slime.{module}")
    revert()
    for name in list(sys.modules):
        if name.partition(".")[0] == "slime":
            del sys.modules[name]
    sys.modules.update(before)


def language_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for seed, name in enumerate(("math", "code"), 1):
        (tmp_path / name).mkdir()
        torch.save(language_model(seed).state_dict(), tmp_path / name / "model.pt")
    teachers = {name: str(tmp_path / name) for name in ("math", "code")}
    return Settings(opd_top_k=K, opd_teachers=teachers, opd_teacher_weights=WEIGHTS)  # type: ignore[arg-type]


def rollout() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "tokens": [torch.randint(VOCABULARY, (total,), generator=generator) for total in TOTALS],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.ones(response, dtype=torch.int) for response in RESPONSES],
        "micro_batch_indices": [[2, 0], [1]],  # as dynamic batches are: not in order
    }


def actor_of(framework: Callable[[str], Any], args: Any, lr: float = 0.1, is_last_stage: bool = True) -> Any:
    args.is_last_stage = is_last_stage
    student = language_model(0)
    actor_class = framework("backends.megatron_utils.actor").MegatronTrainRayActor
    return actor_class(args, student, torch.optim.SGD(student.parameters(), lr=lr))


def parse(framework: Callable[[str], Any], *argv: str) -> Any:
    return framework("utils.arguments").parse_args(list(argv))


def mixture(
    student: torch.nn.Module, data: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, and mixed log-probabilities with the tail, of all response tokens; densely, sample by sample."""
    inputs = torch.cat([tokens[-n - 1 : -1] for tokens, n in zip(data["tokens"], RESPONSES, strict=True)])
    with torch.no_grad():
        ids = torch.topk(student(inputs), K, dim=1).indices
        probs = [(language_model(seed)(inputs) / TEMPERATURE).softmax(1) for seed in (1, 2)]
    q = sum(weight / sum(WEIGHTS) * p for weight, p in zip(WEIGHTS, probs, strict=True)).gather(1, ids)
    return inputs, ids, torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)


def dense_loss(student: torch.nn.Module, inputs: Any, ids: Any, q: Any) -> torch.Tensor:
    """Sum over samples of the mean reverse KL of k + 1 buckets."""
    p = (student(inputs) / TEMPERATURE).softmax(1).gather(1, ids)
    p = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
    kl = (p * (p / q).log()).sum(1)
    return torch.stack([part.mean() for part in kl.split(RESPONSES)]).sum()


def test_from_the_command_line_to_the_gradient(framework: Callable[[str], Any], settings: Settings) -> None:
    apply(NAME, settings=settings)
    args = parse(framework, "--loss-type", LOSS_TYPE)
    assert (args.loss_type, args.custom_loss_function_path) == ("custom_loss", LOSS_PATH)
    actor, data = actor_of(framework, args), rollout()
    data["micro_batch_indices"] = [[2, 0, 1]]
    student = language_model(0)
    expected = dense_loss(student, *mixture(student, data))
    expected.backward()
    [weight] = student.parameters()
    actor.train_actor(0, data)
    [trained] = actor.model[0].parameters()
    torch.testing.assert_close(actor.steps[0]["loss"], expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(trained, weight - 0.1 * weight.grad, rtol=1e-6, atol=1e-7)


def test_rollout_after_rollout_the_student_approaches_the_mixture(
    framework: Callable[[str], Any], settings: Settings
) -> None:
    apply(NAME, settings=settings)
    actor = actor_of(framework, parse(framework, "--loss-type", LOSS_TYPE), lr=0.5)
    for number in range(150):
        actor.train_actor(number, rollout())
    losses = [float(step["loss"]) for step in actor.steps]
    assert sum(losses[-10:]) < 0.05 * sum(losses[:10])
    assert actor.loaded == ["opd_math", "opd_code"]  # once
    assert not {key for keys in actor.logged for key in keys} & set(KEYS)


@pytest.mark.parametrize("is_last_stage", [True, False])
def test_nothing_is_left_behind_also_when_training_fails(
    framework: Callable[[str], Any], settings: Settings, is_last_stage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(NAME, settings=settings)
    actor = actor_of(framework, parse(framework, "--loss-type", LOSS_TYPE), is_last_stage=is_last_stage)
    data, seen = rollout(), []

    def fail(args: Any, data_iterator: Any, model: Any, optimizer: Any) -> None:
        seen.append((sorted(set(KEYS) & set(data)), actor._active_model_tag))
        seen.append(torch.equal(model[0].weight, language_model(0).weight))
        raise ArithmeticError

    monkeypatch.setattr(framework("backends.megatron_utils.model"), "train_one_step", fail)
    with pytest.raises(ArithmeticError):
        actor.train_actor(0, data)
    assert seen == [(sorted(KEYS) if is_last_stage else [], "actor"), True]
    assert set(data) == set(rollout())


def test_a_teacher_that_cannot_be_read_leaves_the_actors_weights(
    framework: Callable[[str], Any], settings: Settings, tmp_path: Path
) -> None:
    apply(NAME, settings=settings)
    actor = actor_of(framework, parse(framework, "--loss-type", LOSS_TYPE))
    (tmp_path / "code" / "model.pt").unlink()
    with pytest.raises(FileNotFoundError):
        actor.train_actor(0, rollout())
    assert torch.equal(actor.model[0].weight, language_model(0).weight)


def test_weights_that_were_dropped_with_the_paused_memory_are_put_back_first(
    framework: Callable[[str], Any], settings: Settings
) -> None:
    apply(NAME, settings=settings)
    args = parse(framework, "--loss-type", LOSS_TYPE)
    actor, paused = actor_of(framework, args), actor_of(framework, args)
    with torch.no_grad():
        paused.model[0].weight.zero_()
    for one in (actor, paused):
        one.train_actor(0, rollout())
    assert paused.steps == actor.steps
    assert torch.equal(paused.model[0].weight, actor.model[0].weight)


def test_an_actor_that_keeps_no_copy_of_its_weights_begins_to(
    framework: Callable[[str], Any], settings: Settings
) -> None:
    apply(NAME, settings=settings)
    args = parse(framework, "--loss-type", LOSS_TYPE)
    actor, without = actor_of(framework, args), actor_of(framework, args)

    class Miles(type(without)):  # type: ignore[misc]
        with_opd_teacher = False

        @property
        def _enable_weight_backup(self) -> bool:
            return self.with_opd_teacher

        def _switch_model(self, target_tag: str) -> None:
            if self._enable_weight_backup:
                super()._switch_model(target_tag)

    without.__class__ = Miles
    without.weights_backuper.images.clear()
    for number in range(2):
        for one in (actor, without):
            one.train_actor(number, rollout())
    assert without.steps == actor.steps


def test_other_losses_are_not_touched(framework: Callable[[str], Any], settings: Settings) -> None:
    apply(NAME, settings=settings)
    path = f"{__name__}.other_loss"
    args = parse(framework, "--loss-type", "custom_loss", "--custom-loss-function-path", path)
    assert not [name for name in vars(args) if name.startswith("opd")]
    actor = actor_of(framework, args)
    actor.train_actor(0, rollout())
    assert actor.loaded == []


def other_loss(args: Any, batch: dict[str, Any], logits: Any, reduce: Any) -> Any:
    assert not set(KEYS) & set(batch)
    return logits.sum(), {}


def test_the_iteration_of_a_teacher_is_its_own(framework: Callable[[str], Any], settings: Settings) -> None:
    apply(NAME, settings=settings)
    args = parse(framework, "--loss-type", LOSS_TYPE)
    args.ckpt_step = 7
    actor = actor_of(framework, args)
    load, seen = actor.load_other_checkpoint, []

    def watched(tag: str, path: str) -> None:
        seen.append(args.ckpt_step)
        load(tag, path)

    actor.load_other_checkpoint = watched
    actor.train_actor(0, rollout())
    assert seen and set(seen) == {None}
    assert args.ckpt_step == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--disable-weights-backuper"], "--disable-weights-backuper does not go with"),
        (["--allgather-cp"], "--allgather-cp does not go with"),
        (["--use-routing-replay"], "--use-routing-replay does not go with"),
        (["--entropy-coef", "0.1"], "--entropy-coef does not go with"),
    ],
)
def test_options_that_do_not_go_with_it(
    framework: Callable[[str], Any], settings: Settings, argv: list[str], message: str
) -> None:
    apply(NAME, settings=settings)
    with pytest.raises(InvalidInputError, match=message):
        parse(framework, "--loss-type", LOSS_TYPE, *argv)
    parse(framework, *argv)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("use_indexer_replay", True),
        ("lora_rank", 8),
        ("lora_adapter_path", "/adapter"),
        ("multi_lora_n_adapters", 2),
    ],
)
def test_options_of_miles_that_do_not_go_with_it(
    framework: Callable[[str], Any],
    settings: Settings,
    option: str,
    value: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply(NAME, settings=settings)
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, option, value)
    name = option.replace("_", "-")
    with pytest.raises(InvalidInputError, match=f"--{name} does not go with"):
        parse(framework, "--loss-type", LOSS_TYPE)
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, option, type(value)())
    parse(framework, "--loss-type", LOSS_TYPE)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("train_backend", "fsdp", "is for --train-backend megatron"),
        ("opd_beta", 3.0, "beta is 3.0"),
        ("opd_divergence", "kl", r"divergence must be one of \('reverse_kl'"),
        ("rollout_temperature", 0.0, "--rollout-temperature is 0.0, expected a positive number"),
    ],
)
def test_values_that_fit_no_run(
    framework: Callable[[str], Any],
    settings: Settings,
    option: str,
    value: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apply(NAME, settings=settings)
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, option, value)
    with pytest.raises(InvalidInputError, match=message):
        parse(framework, "--loss-type", LOSS_TYPE)


def test_teachers_must_be_given_and_exist(framework: Callable[[str], Any], tmp_path: Path) -> None:
    apply(NAME)
    with pytest.raises(InvalidInputError, match="MEGATRON_RL_PATCHES_OPD_TEACHERS=name=path"):
        parse(framework, "--loss-type", LOSS_TYPE)
    missing = str(tmp_path / "no such")
    apply(NAME, settings=Settings(opd_teachers=(("math", missing),)))
    with pytest.raises(InvalidInputError, match=f"'math': there is no folder {missing}"):
        parse(framework, "--loss-type", LOSS_TYPE)


def test_a_teacher_of_another_vocabulary_is_refused(
    framework: Callable[[str], Any], settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(NAME, settings=settings)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11}))
    for name, size in (("math", 11), ("code", 12)):
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, "hf_checkpoint", str(tmp_path))
    with pytest.raises(InvalidInputError, match=r"'code' .* has a vocabulary of 12"):
        parse(framework, "--loss-type", LOSS_TYPE)


def test_a_file_of_the_framework_may_override_and_is_checked(
    framework: Callable[[str], Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(NAME, settings=settings)
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, "opd_divergence", "forward_kl")
    assert parse(framework, "--loss-type", LOSS_TYPE).opd_divergence == "forward_kl"
    monkeypatch.setitem(framework("utils.arguments").CUSTOM_CONFIG, "opd_top_k", 0)
    with pytest.raises(PatchError, match="opd_top_k=0: expected at least 1"):
        parse(framework, "--loss-type", LOSS_TYPE)


def test_without_the_patch_the_loss_type_is_unknown(framework: Callable[[str], Any]) -> None:
    apply()
    with pytest.raises(SystemExit):
        parse(framework, "--loss-type", LOSS_TYPE)


def test_only_its_name_selects_it() -> None:
    names = [patch.name for patch in registry.select(())]
    assert NAME not in names and "reentrant-train" in names
    assert NAME in [patch.name for patch in registry.select((), (), (NAME,))]
    assert [patch.name for patch in registry.select((NAME,))] == [NAME]
    assert registry.patches()[NAME].explicit


@pytest.mark.parametrize(
    ("variable", "selected"),
    [("1", False), ("all", False), (NAME, True), (f"all,{NAME}", True), (f"all,-{NAME}", False)],
)
def test_the_variable(
    framework: Callable[[str], Any], variable: str, selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rl_patches import activation
    from megatron_rl_patches.doctor import choice_of

    monkeypatch.setattr(activation, "installer", installer.installer)
    activation.activate_from_environment({"MEGATRON_RL_PATCHES": variable})
    assert (NAME in {site.patch for site in status()}) is selected
    choice = choice_of({"MEGATRON_RL_PATCHES": variable})
    assert (NAME in choice.patches) is selected and not choice.problems
    assert ("lean-loss" in choice.patches) is (variable != NAME)


def test_check_says_that_only_its_name_selects_it() -> None:
    from typer.testing import CliRunner

    from megatron_rl_patches.cli.commands import app

    lines = CliRunner().invoke(app, ["check"]).stdout.splitlines()
    explicit = [line.partition(" ")[0] for line in lines if " (only where it is named): " in line]
    assert explicit == [NAME]


def test_helpers_for_a_run_without_rewards() -> None:
    assert asyncio.run(zero_reward(None, object())) == 0.0
    assert asyncio.run(zero_reward(None, [object()] * 2, evaluation=True)) == [0.0, 0.0]
    data = {"kl": [torch.ones(2), torch.ones(3)]}
    placeholder_advantages(SimpleNamespace(), data)
    assert [len(one) for one in data["advantages"]] == [2, 3] and not any(map(torch.any, data["returns"]))
