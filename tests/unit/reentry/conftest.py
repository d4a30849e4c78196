from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's module of the rerun state machine, which does not exist yet."""
    module: Any = ModuleType("megatron.core.rerun_state_machine")
    module._GLOBAL_RERUN_STATE_MACHINE = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
