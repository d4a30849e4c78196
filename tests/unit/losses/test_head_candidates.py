"""The benchmark of the output layer names the heads of others that do not run, with the reason."""

from __future__ import annotations

import pytest

from benchmarks.candidates import calls
from benchmarks.head_candidates import OTHERS
from benchmarks.page import left_out


def test_a_head_that_cannot_be_loaded_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("NEMO_RL_DIR", "SKYRL_DIR", "AREAL_DIR", "TRL_DIR", "TRL_BEFORE_DIR")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)

    reasons: dict[str, str] = {}
    loaded = calls(OTHERS, lambda head: pytest.fail("no head is called"), reasons)

    assert not loaded
    assert list(reasons) == [candidate.name for candidate in OTHERS]
    for variable in variables:
        assert f"{variable} not set" in left_out(reasons)
