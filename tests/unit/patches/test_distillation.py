"""``distillation``: slime's command line with it; ``tests/frameworks`` trains with it."""

import argparse
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
from pytest import MonkeyPatch

from megatron_rl_patches import PatchError, Settings, apply, revert
from megatron_rl_patches.engine import installer
from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.frameworks.distillation_arguments import LOSS_PATH, LOSS_TYPE
from megatron_rl_patches.frameworks.distillation_loss import placeholder_advantages, zero_reward

NAME = "distillation"
STAND_INS = Path(__file__).parents[2] / "frameworks" / "stand_in"
Parse = Callable[..., Any]


@pytest.fixture
def parse(monkeypatch: MonkeyPatch) -> Iterator[Parse]:
    """Parse slime's command line, with further values of its configuration file."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(installer, "installer", installer.Installer())
    monkeypatch.setattr(installer.installer.announcer, "done", True)

    def parse(loss_type: str = LOSS_TYPE, **values: Any) -> Any:
        arguments = importlib.import_module("slime.utils.arguments")
        parser = arguments.get_slime_extra_args_provider()(argparse.ArgumentParser())
        args = parser.parse_args(["--loss-type", loss_type])
        args.custom_config = values
        arguments.slime_validate_args(args)
        return args

    yield parse
    revert()
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name in ("math", "code"):
        (tmp_path / name).mkdir()
    teachers = {name: str(tmp_path / name) for name in ("math", "code")}
    return Settings(opd_top_k=3, opd_teachers=teachers)  # type: ignore[arg-type]


def test_the_loss_type_becomes_a_custom_loss(parse: Parse, settings: Settings) -> None:
    with pytest.raises(SystemExit):
        parse()
    apply(NAME, settings=settings)
    args = parse()
    assert (args.loss_type, args.custom_loss_function_path) == ("custom_loss", LOSS_PATH)
    others = parse("policy_loss")
    assert not [name for name in vars(others) if name.startswith("opd")]


FLAGS: dict[str, Any] = {
    **dict.fromkeys(("allgather_cp", "use_routing_replay", "use_indexer_replay"), True),
    "entropy_coef": 0.1,
    "lora_rank": 8,
    "lora_adapter_path": "/adapter",
    "multi_lora_n_adapters": 2,
}
OTHERS: list[tuple[str, Any, str]] = [
    ("enable_weights_backuper", False, "--disable-weights-backuper does not go with"),
    ("train_backend", "fsdp", "is for --train-backend megatron"),
    ("opd_beta", 3.0, "beta is 3.0"),
    ("opd_divergence", "kl", r"divergence must be one of \('reverse_kl'"),
    ("rollout_temperature", 0.0, "--rollout-temperature is 0.0, expected a positive number"),
]


def test_options_that_do_not_go_with_it(parse: Parse, settings: Settings) -> None:
    apply(NAME, settings=settings)
    flags = [(name, value, f"--{name.replace('_', '-')} does not go with") for name, value in FLAGS.items()]
    for option, value, message in flags + OTHERS:
        with pytest.raises(InvalidInputError, match=message):
            parse(**{option: value})
        parse("policy_loss", **{option: value})
        if option in FLAGS:
            parse(**{option: type(value)()})


def test_teachers_exist_and_have_this_vocabulary(parse: Parse, settings: Settings, tmp_path: Path) -> None:
    apply(NAME)
    with pytest.raises(InvalidInputError, match="MEGATRON_RL_PATCHES_OPD_TEACHERS=name=path"):
        parse()
    missing = str(tmp_path / "no such")
    apply(NAME, settings=Settings(opd_teachers=(("math", missing),)))
    with pytest.raises(InvalidInputError, match=f"'math': there is no folder {missing}"):
        parse()
    apply(NAME, settings=settings)
    for name, size in (("", 11), ("math", 11), ("code", 12)):
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(InvalidInputError, match=r"'code' .* has a vocabulary of 12"):
        parse(hf_checkpoint=str(tmp_path))
    # A file of the framework may override options, and is checked.
    assert parse(opd_divergence="forward_kl").opd_divergence == "forward_kl"
    with pytest.raises(PatchError, match="opd_top_k=0: expected at least 1"):
        parse(opd_top_k=0)


def test_helpers_for_a_run_without_rewards() -> None:
    assert asyncio.run(zero_reward(None, object())) == 0.0
    assert asyncio.run(zero_reward(None, [object()] * 2, evaluation=True)) == [0.0, 0.0]
    data = {"kl": [torch.ones(2), torch.ones(3)]}
    placeholder_advantages(SimpleNamespace(), data)
    assert [len(one) for one in data["advantages"]] == [2, 3] and not any(map(torch.any, data["returns"]))
