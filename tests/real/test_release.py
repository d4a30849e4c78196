"""Mocks have the public methods of the release, and ranks import the one that ``--megatron-core`` names."""

import inspect
from importlib import metadata
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer

from megatron_rl_patches.errors import InvalidInputError
from megatron_rl_patches.testing import MockDDP, MockModule, MockOptimizer
from tests.ranks import on_ranks


def public(real: type) -> set[str]:
    return {name for name in dir(real) if not name.startswith("_")}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def lacking(real: Any, mock: Any) -> set[str]:
    """Return the parameters of the real function that the mock does not take."""
    taken = parameters(mock)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return set()
    return {name for name, p in parameters(real).items() if p.kind is not p.VAR_POSITIONAL} - taken.keys()


@pytest.mark.parametrize(
    ("real", "mock"), [(DistributedDataParallel, MockDDP), (ChainedOptimizer, MockOptimizer([MockDDP()]))]
)
def test_public_methods_and_their_parameters(real: type, mock: Any) -> None:
    # A chained optimizer is that of several; of one it is said to be that one.
    assert public(real) - {"optimizer"} <= set(dir(mock))
    own = public(real) - public(torch.nn.Module)
    methods = [name for name in own if inspect.isfunction(getattr(real, name))]
    assert methods
    for name in [*methods, *({"state_dict", "load_state_dict", "forward"} & vars(real).keys())]:
        method = getattr(mock, name)
        assert lacking(getattr(real, name), method) <= {"self"}, name


def test_the_constructor() -> None:
    real, mock = parameters(DistributedDataParallel), parameters(MockDDP)
    assert real.keys() <= mock.keys()
    in_order = [name for name, parameter in mock.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert in_order[:4] == list(real)[:4] == ["config", "ddp_config", "module", "disable_bucketing"]
    with pytest.raises(InvalidInputError, match=r"expected MockDDP\(config, ddp_config, module\)"):
        MockDDP(MockModule())


@pytest.fixture
def release(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("--megatron-core") or metadata.version("megatron-core")


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(1, fresh=lambda fresh: fresh)
def test_ranks_import_the_release_of_the_option(release: str, fresh: bool) -> None:
    assert megatron.core.__version__.partition("+")[0] == release
