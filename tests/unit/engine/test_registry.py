"""The registered patches, and selecting among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.errors import PatchError

from .conftest import Engine


def test_the_built_in_patches_are_the_files() -> None:
    folder = Path(registry.__file__).parent.parent / "patches"
    files = {path.stem.replace("_", "-") for path in folder.glob("[!_]*.py")}
    assert {patch.name for patch in registry._built_in()} == files


def test_one_name_to_exclude_may_be_a_string(engine: Engine) -> None:
    for name in ("tagging", "other"):
        engine[name] = Patch(name, "")
    assert registry.select([], exclude="other") == [engine["tagging"]]


def test_unknown_names(engine: Engine) -> None:
    engine["tagging"], engine["other"] = Patch("tagging", ""), Patch("other", "")
    with pytest.raises(PatchError) as caught:
        registry.select(["a"], exclude=["b"])
    assert str(caught.value) == "unknown patch 'a', 'b'; known: tagging, other"
