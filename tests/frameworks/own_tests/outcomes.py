"""Plugin: what became of each test, and which sites were patched, into the file ``OWN_TESTS_OUTCOMES``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import megatron_rl_patches

_outcomes: dict[str, str] = {}


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _outcomes[report.nodeid] = "failed"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    applied = [site.target for site in megatron_rl_patches.status() if site.state == "applied"]
    record = {"outcomes": _outcomes, "applied": applied}
    Path(os.environ["OWN_TESTS_OUTCOMES"]).write_text(json.dumps(record))
