from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl_patches import MegatronRLPatchesError, PatchError, Settings
from megatron_rl_patches.settings import Selection, parse_selection

KNOWN = ("reentrant-train", "lean-loss")


@pytest.mark.parametrize(
    ("value", "selection"),
    [
        ("", Selection(())),
        ("0", Selection(())),
        (" Off ", Selection(())),
        ("1", Selection(None)),
        ("TRUE", Selection(None)),
        ("all", Selection(None)),
        ("reentrant-train", Selection(("reentrant-train",))),
        (" reentrant-train , lean-loss ", Selection(("reentrant-train", "lean-loss"))),
        ("all,-lean-loss", Selection(None, ("lean-loss",))),
        ("-lean-loss", Selection(None, ("lean-loss",))),
        ("lean-los,reentrant-train", Selection(("reentrant-train",), (), ("lean-los",))),
        ("os.system", Selection((), (), ("os.system",))),
        (",,,", Selection((), (), (",,,",))),
    ],
)
def test_the_grammar_of_the_variable(value: str, selection: Selection) -> None:
    assert parse_selection(value, KNOWN) == selection


@given(st.text())
def test_any_value_parses(value: str) -> None:
    selection = parse_selection(value, KNOWN)
    assert set(selection.names or ()) <= set(KNOWN)
    assert set(selection.exclude) <= set(KNOWN)


def test_from_environment() -> None:
    environ = {
        "MEGATRON_RL_PATCHES_STRICT": "1",
        "MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS": "my_rl.model:train, my_rl.loop:Trainer.fit,",
    }
    assert Settings.from_environment(environ) == Settings(
        strict=True, train_functions=("my_rl.model:train", "my_rl.loop:Trainer.fit")
    )
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize(
    ("value", "roles"),
    [
        ("", Settings().inference_roles),
        ("teacher, judge", ("teacher", "judge")),
        ("none", ()),
    ],
)
def test_roles_from_the_environment(value: str, roles: tuple[str, ...]) -> None:
    environ = {"MEGATRON_RL_PATCHES_INFERENCE_ROLES": value}
    assert Settings.from_environment(environ).inference_roles == roles


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().strict = True  # type: ignore[misc]


@pytest.mark.parametrize("path", ["train", "model:train", "my.model.train", "my.model:", "my model:train"])
def test_a_train_function_must_name_module_and_function(path: str) -> None:
    with pytest.raises(PatchError, match=r"expected 'package\.module:function'"):
        Settings(train_functions=(path,))


def test_a_bare_string_of_train_functions_is_refused() -> None:
    with pytest.raises(PatchError, match="expected a tuple"):
        Settings(train_functions="my.model:train")  # type: ignore[arg-type]


def test_a_bare_string_of_roles_is_refused() -> None:
    with pytest.raises(PatchError, match="expected a tuple of names of roles"):
        Settings(inference_roles="teacher")  # type: ignore[arg-type]


def test_a_bad_switch_is_named() -> None:
    with pytest.raises(MegatronRLPatchesError, match="MEGATRON_RL_PATCHES_STRICT='maybe': expected 1 or 0"):
        Settings.from_environment({"MEGATRON_RL_PATCHES_STRICT": "maybe"})
