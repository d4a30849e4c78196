from __future__ import annotations

import multiprocessing
import signal

import pytest
from hypothesis import settings

from tests import recording, releases

# Tests share cores with ranks that other tests spawn: how long an example takes says nothing.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")

# Ranks are forks of a process that has imported these: half of the suite's time would go into imports.
multiprocessing.set_forkserver_preload(["tests.real.tiny_gpt", "megatron.core.dist_checkpointing"])


def pytest_addoption(parser: pytest.Parser) -> None:
    recording.add_option(parser)
    releases.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    releases.configure(config)
    recording.configure(config)
    # Shells start what runs in the background with SIGINT ignored, and ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Checkouts of hosts bring a Megatron of their own.
    method = "spawn" if item.get_closest_marker("hosts") else "forkserver"
    multiprocessing.set_start_method(method, force=True)
