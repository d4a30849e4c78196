import os
import signal
import warnings
from importlib import import_module
from pathlib import Path

# Before torch: two tests at a time, with a thread per core each, would spin more than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests import layers, recording, releases

# No deadline for an example, as tests share cores with ranks that other tests spawn.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")


def pytest_addoption(parser: pytest.Parser) -> None:
    recording.add_option(parser)
    releases.add_option(parser)
    layers.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    releases.configure(config)
    layers.configure(config)
    recording.configure(config)
    # A shell starts background processes with SIGINT ignored, and ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is ``nightly``; give ranks the layers of their test, and new interpreters."""
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # Megatron warns a lot
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if params.get("layers") == "transformer_engine":
                item.add_marker(pytest.mark.ranks(transformer_engine=True))
            if item.get_closest_marker("frameworks"):  # checkouts come with a Megatron of their own
                item.add_marker(pytest.mark.ranks(fresh=True))


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Import Megatron, which warns of what is not installed, before a module that imports it."""
    places = ("real", "faults", "gpu", "unit/frameworks", "unit/inference", "unit/losses")
    if any(f"/tests/{place}" in module_path.as_posix() for place in places):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("tests.references.tiny_gpt")
