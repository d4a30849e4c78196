import gc
import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from pytest import MonkeyPatch


@pytest.fixture
def frozen() -> Iterator[None]:
    """What is there already is no garbage: collections take a fraction of the time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def nothing_reported() -> Iterator[None]:
    from megatron_rl_patches.reentry import training_warnings

    training_warnings.messages.clear()
    yield
    training_warnings.messages.clear()


@pytest.fixture
def one_process(monkeypatch: MonkeyPatch) -> None:
    """Let this process count parameters, as a child does for ``estimate``: its imports take seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of what is not installed
        from megatron.core.ssm import gated_delta_net
        from megatron.core.transformer import multi_latent_attention

        from megatron_rl_patches.inference.memory import parameters

    def run(command: list[str], input: str, **options: Any) -> Any:
        with mock.patch.object(sys, "stdin", io.StringIO(input)), redirect_stdout(io.StringIO()) as stdout:
            parameters.main()
        return SimpleNamespace(returncode=0, stdout=stdout.getvalue())

    monkeypatch.setattr(parameters.subprocess, "run", run)
    # What the child changes is put back.
    for module, name in ((multi_latent_attention, "HAVE_TE"), (gated_delta_net, "HAVE_FLA")):
        monkeypatch.setattr(module, name, getattr(module, name))
    for absent in ("apex", "transformer_engine"):
        monkeypatch.setitem(sys.modules, absent, None)


@pytest.fixture
def rerun(monkeypatch: MonkeyPatch) -> Any:
    """Megatron's module of the rerun state machine, which does not exist yet."""
    module: Any = ModuleType("megatron.core.rerun_state_machine")
    module._GLOBAL_RERUN_STATE_MACHINE = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
