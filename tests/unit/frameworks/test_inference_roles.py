"""What a role that only scores changes in a framework's functions, and what its model refuses."""

from __future__ import annotations

import copy
import logging
import random
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import ModelParallelConfig

from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.errors import InferenceOnlyError
from megatron_rl_patches.frameworks import inference_roles as roles
from megatron_rl_patches.inference.models.model import refuse_to_train
from megatron_rl_patches.patches.inference_only import InferenceOnlyOptions


class Chunk(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = torch.nn.Linear(2, 2)
        self.layer.config = config
        self.dropout = torch.nn.Dropout()


def build(model: str = "m", wrap_with_ddp: bool = True, use_torch_fsdp2: bool = False) -> tuple[str, bool]:
    return model, wrap_with_ddp


def get_model(*args: Any, global_args: Any = None, **kwargs: Any) -> Any:
    return roles.get_model(Call(build, args, kwargs), global_args)


def optimizer_of(model: Any, build: Any = lambda model_chunks: "optimizer") -> Any:
    return roles.get_megatron_optimizer(Call(build, (model,)))


def scheduler_of(build: Any = lambda: "scheduler") -> Any:
    return roles.get_optimizer_param_scheduler(Call(build))


def test_inside_the_model_has_no_ddp_and_then_no_optimizer() -> None:
    with roles.inference_role("ref") as scope:
        assert optimizer_of([]) == "optimizer"
        assert get_model("m") == ("m", False)
        optimizer, scheduler = optimizer_of([], lambda model_chunks: 1 / 0), scheduler_of(lambda: 1 / 0)
    assert scope.ddp_skipped
    optimizer.reload_model_params()
    assert not list(optimizer.chained_optimizers)
    scheduler.step(increment=7)
    assert (scheduler.num_steps, scheduler.state_dict()) == (0, {})
    assert roles._scope.get() is None
    with roles.inference_role("ref") as scope:  # a framework that leaves out DDP itself
        assert get_model("m", False) == ("m", False)
    assert scope.ddp_skipped


FSDP = SimpleNamespace(use_megatron_fsdp=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"wrap_with_ddp": True}, "the framework passes wrap_with_ddp itself"),
        ({"use_torch_fsdp2": True}, "its parameters are sharded (use_torch_fsdp2)"),
        ({"global_args": FSDP}, "its parameters are sharded (use_megatron_fsdp)"),
    ],
)
def test_what_says_otherwise_is_left_to_build_as_ever(options: dict[str, Any], why: str) -> None:
    with roles.inference_role("ref") as scope:
        assert get_model("m", **options) == ("m", True)
        assert (optimizer_of([]), scheduler_of()) == ("optimizer", "scheduler")
    assert (scope.ddp_skipped, scope.reason_skipped) == (False, why)


# --- initialize


def initialize(function: Any, args: Any, role: str = "ref") -> Any:
    options = InferenceOnlyOptions(inference_roles=("ref",))
    return roles.initialize_model_and_optimizer(Call(function, (args, role), options=options))


def test_initialize() -> None:
    random_state, torch_state = random.getstate(), torch.get_rng_state()
    miles, seen = SimpleNamespace(debug_disable_optimizer=False, other=1), []

    def framework(args: Any, role: str) -> tuple[Any, ...]:
        args.other = 2
        get_model("m")
        seen.append(args.debug_disable_optimizer)
        random.random()
        return [Chunk(ModelParallelConfig())], "optimizer", "scheduler", 7

    [chunk], *rest = initialize(framework, miles)
    assert rest == [None, None, 7]
    assert chunk.inference_only_role[0] == "ref"
    assert random.getstate() == random_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert initialize(framework, miles, "actor")[1:] == ("optimizer", "scheduler", 7)
    assert (seen, vars(miles)) == ([True, False], {"debug_disable_optimizer": False, "other": 2})
    # An option that the arguments inherit is not set.
    inheriting = type("Arguments", (), {"debug_disable_optimizer": False})()
    initialize(framework, inheriting)
    assert (seen[-1], vars(inheriting)) == (False, {"other": 2})


def test_a_framework_that_could_not_be_intercepted_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    built = [Chunk(ModelParallelConfig())], "optimizer", "scheduler", 7
    with caplog.at_level(logging.WARNING):
        assert initialize(lambda args, role: built, SimpleNamespace()) == built
    assert "role 'ref' was built for training, as without" in caplog.text
    assert "get_model was not called" in caplog.text
    refuse_to_train(built[0], "train")


# --- frozen roles


def test_a_frozen_role_refuses_to_train_and_still_loads_and_scores() -> None:
    policy = ModelParallelConfig(no_sync_func=len)
    model: list[Any] = [Chunk(policy), Chunk(policy)]
    roles.freeze_role(model, "judge")
    assert policy.no_sync_func is len
    methods = ("zero_grad_buffer", "no_sync", "finish_grad_sync", "enable_forward_pre_hook", "requires_grad_")
    for method, chunk in product(methods, (model[1], copy.deepcopy(model[0]))):
        with pytest.raises(InferenceOnlyError, match=rf"^{method}.* role 'judge'") as caught:
            getattr(chunk, method)()
        assert "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)" in str(caught.value)
        assert not any(parameter.requires_grad for parameter in chunk.parameters())
    with pytest.raises(InferenceOnlyError, match="get_megatron_optimizer"):
        optimizer_of([Chunk(None), model[1]])
    for given in (model, model[0], torch.nn.ModuleList(model)):
        with pytest.raises(InferenceOnlyError, match="train: "):
            refuse_to_train(given, "train")
    chunk = model[0]
    assert chunk.requires_grad_(False) is chunk
    chunk.load_state_dict({name: torch.ones_like(value) for name, value in chunk.state_dict().items()})
    chunk.eval()
    assert chunk.layer(torch.ones(2)).tolist() == [3, 3]


# --- loading


def arguments(**options: Any) -> SimpleNamespace:
    consumed = {"consumed_train_samples": 3, "consumed_valid_samples": 1, "skipped_train_samples": 0}
    of_loading = {"load": None, "finetune": False, "no_load_optim": False, "no_load_rng": False}
    return SimpleNamespace(**{**of_loading, **consumed, **options})


def load(args: Any, during: Any = lambda: None, iteration: int = 0) -> tuple[Any, dict[str, Any]]:
    """Load for a role, by a loader that leaves traces; return its result, and what it saw."""
    seen: dict[str, Any] = {}

    def loader(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load") -> Any:
        seen.update(vars(args), optimizer=optimizer, scheduler=opt_param_scheduler)
        args.load, args.consumed_train_samples, args.new = "elsewhere", 99, True
        random.random()
        during()
        return iteration, 0.5

    of_megatron = SimpleNamespace(get_args=lambda: args)
    modules = dict.fromkeys(("megatron.training", "megatron.training.global_vars"), of_megatron)
    with mock.patch.dict(sys.modules, modules), roles.inference_role("ref"):
        get_model("m")
        call = Call(loader, ("model", "optimizer"), {"opt_param_scheduler": "scheduler"})
        return roles.load_checkpoint(call), seen


def test_inside_it_loads_weights_alone_and_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").mkdir()
    (tmp_path / "iter_0000007" / "common.pt").touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    args = arguments(load=str(tmp_path))
    before, random_state = dict(vars(args)), random.getstate()
    result, seen = load(args)
    assert result == (7, 0.5)
    assert (seen["optimizer"], seen["scheduler"]) == (None, None)
    assert all(seen[name] is True for name in ("finetune", "no_load_optim", "no_load_rng"))
    assert seen["consumed_train_samples"] == seen["consumed_valid_samples"] == 0
    assert vars(args) == before
    assert random.getstate() == random_state
    with pytest.raises(ZeroDivisionError):
        load(args, during=lambda: 1 / 0)
    assert vars(args) == before


def test_an_iteration_that_cannot_be_read_is_the_loaders(tmp_path: Path) -> None:
    for path in (None, str(tmp_path)):
        assert load(arguments(pretrained_checkpoint=path), iteration=5)[0] == (5, 0.5)


@pytest.mark.parametrize("raises", [False, True])
def test_globals_of_megatron(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import num_microbatches_calculator as microbatches

    # A rampup is another class in each era of Megatron.
    calculator = SimpleNamespace(current_global_batch_size=2)
    monkeypatch.setattr(microbatches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    checkpointing = SimpleNamespace(_CHECKPOINT_VERSION=3.0, other=1)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", checkpointing)
    with suppress(OSError), roles.preserved_globals(arguments()):
        assert checkpointing._CHECKPOINT_VERSION is None
        checkpointing._CHECKPOINT_VERSION, checkpointing.other = 0, 2
        calculator.current_global_batch_size = 8
        if raises:
            raise OSError
    assert calculator.current_global_batch_size == 2
    assert vars(checkpointing) == {"_CHECKPOINT_VERSION": 3.0, "other": 2}
