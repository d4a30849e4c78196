from __future__ import annotations

import multiprocessing

import pytest
from hypothesis import settings

from tests import releases

# Tests share cores with ranks that other tests spawn: how long an example takes says nothing.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")

# Ranks are forks of a process that has imported these: half of the suite's time would go into imports.
multiprocessing.set_forkserver_preload(["tests.real.tiny_gpt", "megatron.core.dist_checkpointing"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-core",
        metavar="VERSION",
        choices=list(releases.PLATFORMS),
        help="run with this release in place of the one that is installed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if release := config.getoption("--megatron-core"):
        releases.put_first(release, config.cache.mkdir("megatron-core"))
        # They warn of what they like.
        config.addinivalue_line("filterwarnings", "ignore")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Checkouts of hosts bring a Megatron of their own.
    method = "spawn" if item.get_closest_marker("hosts") else "forkserver"
    multiprocessing.set_start_method(method, force=True)
