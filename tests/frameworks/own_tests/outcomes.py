"""Plugin: what became of each test, and which sites were patched, into the file ``OWN_TESTS_OUTCOMES``."""

import json
import os
from pathlib import Path

import pytest

import megatron_rl_patches

#: Functions that compare with a relative tolerance of 0 and an absolute one of 1e-8, at values around 1.
EXACT = (
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_single_rank",
    "test_calculate_log_probs_and_entropy_matches_unfused_reference_vocab_parallel",
)
_outcomes: dict[str, str] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_runtest_setup(item: pytest.Function) -> None:
    is_relaxed = item.originalname in EXACT and "MEGATRON_RL_PATCHES" in os.environ
    os.environ["OWN_TESTS_ATOL"] = "5e-7" if is_relaxed else "0"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    applied = [site.target for site in megatron_rl_patches.status() if site.state == "applied"]
    record = {"outcomes": _outcomes, "applied": applied}
    Path(os.environ["OWN_TESTS_OUTCOMES"]).write_text(json.dumps(record))
