"""``tests/typing/api.py``, which mypy checks, uses every public name."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

API = Path(__file__).parents[1] / "typing" / "api.py"


@pytest.mark.parametrize("package", ["", ".losses", ".inference", ".reentry", ".testing", ".hooks"])
def test_every_public_name_is_used(package: str) -> None:
    text = API.read_text().partition("\nModel = ")[2]  # after the imports
    names = set(import_module(f"megatron_rl_patches{package}").__all__)
    assert names - {"__version__"} <= set(re.findall(r"\w+", text))
