"""What a role that only scores changes in a framework's functions, and what its model refuses.

That nothing else changes is tested on slime's stand-in, in ``tests/frameworks``.
"""

import copy
import logging
import sys
from itertools import product
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


def test_an_option_of_miles_leaves_out_the_optimizer_of_a_role() -> None:
    args, seen = SimpleNamespace(debug_disable_optimizer=False), []

    def framework(args: Any, role: str) -> tuple[Any, ...]:
        get_model("m")
        seen.append(args.debug_disable_optimizer)
        return [Chunk(ModelParallelConfig())], "optimizer", "scheduler", 7

    assert initialize(framework, args)[1:] == (None, None, 7)
    assert initialize(framework, args, "actor")[1:] == ("optimizer", "scheduler", 7)
    assert (seen, vars(args)) == ([True, False], {"debug_disable_optimizer": False})
    # An option that the arguments inherit is not set.
    inheriting = type("Arguments", (), {"debug_disable_optimizer": False})()
    initialize(framework, inheriting)
    assert (seen[-1], vars(inheriting)) == (False, {})


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


@pytest.mark.parametrize("path", [None, "a folder without a checkpoint"])
def test_an_iteration_that_cannot_be_read_is_the_loaders(path: Any) -> None:
    """Arguments that the loader has changed are put back, also when it raises."""
    flags = dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), False)
    args = SimpleNamespace(load=None, pretrained_checkpoint=path, **flags)
    before = dict(vars(args))

    def loader(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load") -> Any:
        assert (optimizer, opt_param_scheduler, args.no_load_rng) == (None, None, True)
        args.load, args.new = "elsewhere", True
        return 5 if ddp_model else 1 / 0, 0.5

    def load(ddp_model: str) -> Any:
        call = Call(loader, (ddp_model, "optimizer"), {"opt_param_scheduler": "scheduler"})
        modules = dict.fromkeys(("megatron.training", "megatron.training.global_vars"), global_vars)
        with mock.patch.dict(sys.modules, modules), roles.inference_role("ref"):
            get_model("m")
            return roles.load_checkpoint(call)

    global_vars = SimpleNamespace(get_args=lambda: args)
    assert load("model") == (5, 0.5)
    assert vars(args) == before
    with pytest.raises(ZeroDivisionError):
        load("")
    assert vars(args) == before
