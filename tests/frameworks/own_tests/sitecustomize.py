"""First on the path of a framework's own tests, and of the ranks that these spawn.

Packages that are not installed are stubs. ``OWN_TESTS_ATOL`` is the least absolute tolerance of
``torch.testing.assert_close``, where a test gives one.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any


def _install_stubs() -> None:
    # By its file: ``tests`` is the framework's here.
    file = Path(__file__).parents[1] / "import_stubs.py"
    spec = importlib.util.spec_from_file_location("_import_stubs", file)
    assert spec is not None and spec.loader is not None
    import_stubs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(import_stubs)
    # torch asks whether triton is there, and then for all that is in it.
    import_stubs.install(import_stubs.PACKAGES.replace("triton", ""))


def _relax() -> None:
    import torch.testing

    assert_close = torch.testing.assert_close

    def relaxed(*args: Any, **options: Any) -> None:
        if options.get("atol") is not None:
            options["atol"] = max(options["atol"], float(os.environ["OWN_TESTS_ATOL"]))
        assert_close(*args, **options)

    torch.testing.assert_close = relaxed


_install_stubs()
_relax()
