from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from pytest import MonkeyPatch


@pytest.fixture
def rerun(monkeypatch: MonkeyPatch) -> Any:
    """Megatron's module of the rerun state machine, which does not exist yet."""
    module: Any = ModuleType("megatron.core.rerun_state_machine")
    module._GLOBAL_RERUN_STATE_MACHINE = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
