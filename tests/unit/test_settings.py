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
        ("all,lean-loss", Selection(None, also=("lean-loss",))),
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


def test_distillation_from_the_environment() -> None:
    environ = {
        "MEGATRON_RL_PATCHES_OPD_TOP_K": " 32 ",
        "MEGATRON_RL_PATCHES_OPD_DIVERGENCE": "forward_kl",
        "MEGATRON_RL_PATCHES_OPD_TEACHERS": "math=/teachers/math, code = /teachers/a=b",
        "MEGATRON_RL_PATCHES_OPD_TEACHER_WEIGHTS": "2,0.5",
    }
    settings = Settings.from_environment(environ)
    assert (settings.opd_top_k, settings.opd_divergence) == (32, "forward_kl")
    assert dict(settings.opd_teachers) == {"math": "/teachers/math", "code": "/teachers/a=b"}
    assert settings.opd_teacher_weights == (2.0, 0.5)


def test_teachers_may_be_a_mapping() -> None:
    assert Settings(opd_teachers={"a": "/b"}).opd_teachers == (("a", "/b"),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TOP_K", "0", "opd_top_k=0: expected at least 1"),
        ("TOP_K", "many", "MEGATRON_RL_PATCHES_OPD_TOP_K: 'many': expected a number"),
        ("DIVERGENCE", "kl", "opd_divergence='kl': expected one of reverse_kl"),
        (
            "TEACHERS",
            "/teachers/math",
            "MEGATRON_RL_PATCHES_OPD_TEACHERS: '/teachers/math': expected name=path",
        ),
        ("TEACHERS", "a=/b,a=/c", "expected distinct names"),
        ("TEACHER_WEIGHTS", "1", "expected one each"),
        ("TEACHER_WEIGHTS", "half", "'half': expected a number"),
    ],
)
def test_bad_values_of_distillation(variable: str, value: str, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        Settings.from_environment({f"MEGATRON_RL_PATCHES_OPD_{variable}": value})


@pytest.mark.parametrize("weights", [(-1.0, 2.0), (0.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_weights_are_those_of_a_mixture(weights: tuple[float, ...]) -> None:
    with pytest.raises(PatchError, match="not negative"):
        Settings(opd_teachers=(("a", "/a"), ("b", "/b")), opd_teacher_weights=weights)


def test_a_bare_string_of_teachers_is_refused() -> None:
    with pytest.raises(PatchError, match="expected a tuple of pairs"):
        Settings(opd_teachers="math=/teachers/math")  # type: ignore[arg-type]
