"""``bench_head`` names the heads of others that do not run, with the reason."""

from __future__ import annotations

import pytest

from benchmarks._head_candidates import OTHERS, load_heads
from benchmarks.bench_head import Beside, render_beside


def test_a_head_that_cannot_be_loaded_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("NEMO_RL_DIR", "SKYRL_DIR", "AREAL_DIR", "TRL_DIR", "TRL_BEFORE_DIR")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)

    heads, missing = load_heads(OTHERS)

    assert not heads
    assert list(missing) == [candidate.name for candidate in OTHERS]
    page = "\n".join(render_beside(Beside(missing=missing)))
    for variable in variables:
        assert f"{variable} not set" in page
