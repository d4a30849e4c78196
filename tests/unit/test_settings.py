import copy
import dataclasses
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import FixtureRequest, LogCaptureFixture, MonkeyPatch

from megatron_rl_patches import Patch, PatchError, Settings, applied
from megatron_rl_patches.engine import installer, registry
from megatron_rl_patches.engine.api import activate_from_environment
from megatron_rl_patches.engine.settings import parse_selection, variables

DEFAULT = [patch.name for patch in registry.select()]
ALL = [patch.name for patch in registry.select(["all"])]
NO_LEAN_LOSS = [name for name in DEFAULT if name != "lean-loss"]


@pytest.mark.parametrize(
    ("value", "names", "unknown"),
    [
        *((value, [], []) for value in ("", "0", " Off ")),
        *((value, DEFAULT, []) for value in ("1", "TRUE", "Default", "all,-lean-head")),
        *((value, ALL, []) for value in ("all", "ALL,1", "all,-distillation")),
        ("all,distillation", [*ALL[:-2], "distillation", *ALL[-2:]], []),
        *((value, NO_LEAN_LOSS, []) for value in ("1,-lean-loss", "-lean-loss")),
        *((value, [], [value]) for value in ("os.system", "-lean-los", ",,,")),
        ("reentrant-train", ["reentrant-train"], []),
        (" reentrant-train , lean-loss ", ["reentrant-train", "lean-loss"], []),
        ("lean-los,reentrant-train", ["reentrant-train"], ["lean-los"]),
        ("1,lean-head", [*DEFAULT[:-2], "lean-head", *DEFAULT[-2:]], []),  # two of them are last
    ],
)
def test_the_grammar_of_the_variable(value: str, names: list[str], unknown: list[str]) -> None:
    patches, refused = parse_selection(value)
    assert ([patch.name for patch in patches], refused) == (names, unknown)
    # Only its own name selects it, as it is no repair.
    assert "distillation" not in [*DEFAULT, *ALL]


def test_is_a_frozen_value() -> None:
    settings = Settings(train_functions=["pkg.mod:train"], strict=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.strict = False  # type: ignore[misc]
    assert settings == Settings(train_functions=("pkg.mod:train",), strict=True) != Settings(strict=True)
    assert {settings: 1}[pickle.loads(pickle.dumps(copy.deepcopy(settings)))] == 1
    assert "train_functions=('pkg.mod:train',)" in repr(settings)
    assert settings != "another thing"


# --- types


@pytest.mark.parametrize(
    ("option", "expected", "values"),
    [
        ("strict", "True or False", ("1", 1)),
        ("train_functions", "a tuple of strings", ("my.model:train", [b"my.model:train"])),
        ("inference_roles", "a tuple of strings", ("teacher", None, [None])),
        ("opd_top_k", "an integer or 'full'", ("64", 64.0, True)),
        ("opd_combine", "'mixture' or 'average' or 'route'", ("mean",)),
        ("opd_divergence", "a string", (None,)),
        ("opd_teachers", "a tuple of pairs of strings", ([("a",)], [("a", "b", "")], ["ab"], {"a": 1}, "a")),
        ("opd_teacher_weights", "a tuple of numbers", (1.0, ["1"], [True])),
    ],
)
def test_a_value_of_another_type_is_refused(option: str, expected: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(PatchError) as refused:
            Settings(**{option: value})
        assert str(refused.value) == f"{option}={value!r}: expected {expected}"


def test_values_that_say_the_same_are_taken() -> None:
    assert Settings(inference_roles=iter(["judge"])).inference_roles == ("judge",)
    settings = Settings(opd_teachers={"a": Path("/a")}, opd_teacher_weights=[2])
    assert (settings.opd_teachers, settings.opd_teacher_weights) == ((("a", "/a"),), (2.0,))


TWO = {"opd_teachers": (("a", "/a"), ("b", "/b"))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": ("judge",)}, r"unknown option roles; known: strict, .*inference_roles"),
        *(
            ({"train_functions": (path,)}, "expected 'module:function'")
            for path in ("train", ".model:train", "my.model.train", "my.model:", "my model:train")
        ),
        *(
            ({**TWO, "opd_teacher_weights": weights}, "expected one each, not negative")
            for weights in ((-1.0, 2.0), (0.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0), (1.0,))
        ),
        ({"opd_top_k": 0}, "opd_top_k=0: expected at least 1, or full"),
        ({"finite_step_limit": -1}, "finite_step_limit is -1"),
        ({"self_ratio_limit": 0.0}, "self_ratio_limit is 0.0"),
        ({"opd_teachers": [("a", "/b"), ("a", "/c")]}, "expected distinct names"),
        ({"opd_teachers": [("a", "")]}, "each with a path"),
        ({**TWO, "opd_combine": "route", "opd_teacher_weights": (1.0, 1.0)}, "not for opd_combine=route"),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        Settings(**options)
    assert Settings(opd_top_k="full", opd_combine="route").opd_top_k == "full"


# --- variables


def test_from_the_environment() -> None:
    texts: dict[str, tuple[str, Any]] = {
        "strict": ("1", True),
        "train_functions": ("rl.model:train, rl.loop:A.fit,", ("rl.model:train", "rl.loop:A.fit")),
        "warn": ("0", False),
        "memory_phases": ("1", True),
        "verify": ("1", True),
        "finite_step_limit": ("3", 3),
        "inference_roles": ("teacher, judge", ("teacher", "judge")),
        "lean_head_tile_bytes": ("1024", 1024),
        "lean_head_keep_bytes": ("2048", 2048),
        "opd_top_k": (" 32 ", 32),
        "opd_combine": ("average", "average"),
        "opd_divergence": ("forward_kl", "forward_kl"),
        "opd_teachers": ("math=/t/math, code = /t/a=b", (("math", "/t/math"), ("code", "/t/a=b"))),
        "opd_teacher_weights": ("2,0.5", (2.0, 0.5)),
        "self_ratio_limit": ("0.5", 0.5),
        "self_ratio_every": ("1", True),
        "self_ratio_raises": ("1", True),
    }
    environ = {f"MEGATRON_RL_PATCHES_{name.upper()}": text for name, (text, _) in texts.items()}
    assert {*environ, "MEGATRON_RL_PATCHES", "MEGATRON_RL_PATCHES_ROOTS"} == set(variables())
    expected = Settings(**{name: value for name, (_, value) in texts.items()})
    assert Settings.from_environment(environ) == expected
    assert Settings.from_environment(dict.fromkeys(environ, " ")) == Settings()
    assert Settings.from_environment({"MEGATRON_RL_PATCHES_INFERENCE_ROLES": "None"}).inference_roles == ()
    for text, strict in (("1", True), (" Yes", True), ("0", False), ("OFF ", False)):
        assert Settings.from_environment({"MEGATRON_RL_PATCHES_STRICT": text}).strict is strict


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("STRICT", "maybe", "1 or 0"),
        ("OPD_TEACHERS", "/teachers/math", "pairs of strings, separated by commas"),
        ("OPD_TEACHER_WEIGHTS", "half", "numbers, separated by commas"),
    ],
)
def test_a_variable_that_does_not_parse_is_named(option: str, value: str, expected: str) -> None:
    with pytest.raises(PatchError) as refused:
        Settings.from_environment({f"MEGATRON_RL_PATCHES_{option}": value})
    assert str(refused.value) == f"MEGATRON_RL_PATCHES_{option}={value!r}: expected {expected}"


def test_a_bad_value_leaves_its_own_default_only() -> None:
    prefix = "MEGATRON_RL_PATCHES_"
    good = {f"{prefix}TRAIN_FUNCTIONS": "my_rl:train", f"{prefix}OPD_TEACHERS": "math=/teachers/math"}
    switches = {f"{prefix}{name}": "maybe" for name in ("STRICT", "WARN")}
    bad = {**switches, f"{prefix}OPD_TEACHER_WEIGHTS": "1,2"}
    settings, refused = Settings.without_bad_values({**bad, **good})
    assert settings == Settings(train_functions=["my_rl:train"], opd_teachers={"math": "/teachers/math"})
    assert {name: message.partition(": expected")[0] for name, message in refused.items()} == {
        **{name: f"{name}='maybe'" for name in switches},
        f"{prefix}OPD_TEACHER_WEIGHTS": "opd_teacher_weights=(1.0, 2.0) of the teachers ['math']",
    }


def test_a_value_that_is_good_beside_another_one_is_taken(monkeypatch: MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Options:
        smallest: int = 0
        largest: int = 1

        def __post_init__(self) -> None:
            if self.smallest > self.largest:
                raise ValueError("smallest exceeds largest")

    monkeypatch.setattr(registry, "patches", lambda: {"range": Patch("range", "", options=Options)})
    environ = {"MEGATRON_RL_PATCHES_SMALLEST": "5", "MEGATRON_RL_PATCHES_LARGEST": "9"}
    assert Settings.without_bad_values(environ) == (Settings(smallest=5, largest=9), {})


@pytest.mark.parametrize("strict", [False, True])
def test_a_bad_value_at_activation(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, strict: bool) -> None:
    monkeypatch.setattr(installer, "installer", installer.Installer())
    environ = {
        "MEGATRON_RL_PATCHES": "reentrant-train",
        "MEGATRON_RL_PATCHES_STRICT": str(int(strict)),
        "MEGATRON_RL_PATCHES_WARN": "maybe",
        "MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS": "mrp_nowhere.model:train",
    }
    message = "MEGATRON_RL_PATCHES_WARN='maybe': expected 1 or 0"
    with pytest.raises(PatchError, match=message) if strict else nullcontext():
        activate_from_environment(environ)
    assert strict or f"{message}. An unknown patch is not in place" in caplog.text
    assert strict != ("mrp_nowhere.model.train" in [site.target for site in installer.installer.status()])
    installer.installer.remove(["reentrant-train"])


# --- options of patches that other packages register


@dataclasses.dataclass(frozen=True)
class Loud:
    loudness: int = 3
    mood: dict[str, str] | str = "plain"

    def __post_init__(self) -> None:
        if self.mood in ("grim", "glum"):
            raise ValueError("be merry") if self.mood == "grim" else SystemExit


@dataclasses.dataclass(frozen=True)
class WithoutDefault:
    volume: int


def speak() -> Any:
    """Return nothing, unless "loud" is applied."""


def test_options_of_third_parties(
    monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, request: FixtureRequest
) -> None:
    """Options that cannot be are reported, and their patch is left out."""
    names = ("opd_top_k", "strict", "roots")
    taken = {name: dataclasses.make_dataclass("Taken", [(name, int, 3)]) for name in names}
    options = {"loud": Loud, "same": Loud, "without-default": WithoutDefault, "no-dataclass": str, **taken}
    patches = [Patch(name, "", options=declared) for name, declared in options.items()]
    patches[0].wrap(__name__, "speak")(lambda call: call.options)
    entries = [
        SimpleNamespace(name=patch.name, value="", load=lambda patch=patch: patch) for patch in patches
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    registry.patches.cache_clear()
    request.addfinalizer(registry.patches.cache_clear)
    assert options.keys() & registry.patches() == {"loud", "same"}
    messages = "\n".join(caplog.messages)
    assert all(f"an option named {name!r} exists already" in messages for name in taken)
    assert "options are declared as a dataclass" in messages
    assert len(caplog.messages) == 5
    assert (Settings().loudness, Settings(loudness=5).loudness) == (3, 5)
    assert "MEGATRON_RL_PATCHES_LOUDNESS" in variables()
    with pytest.raises(PatchError, match="loudness='5': expected an integer"):
        Settings(loudness="5")
    with pytest.raises(PatchError, match=r"^Loud\(mood='grim'\) raised ValueError: be merry$"):
        Settings(mood="grim")
    settings, refused = Settings.without_bad_values({"MEGATRON_RL_PATCHES_MOOD": "glum"})
    assert settings.mood == "plain"
    assert refused == {"MEGATRON_RL_PATCHES_MOOD": "Loud(mood='glum') raised SystemExit"}
    assert Settings(mood={"any": "thing"}).mood == {"any": "thing"}
    monkeypatch.setenv("MEGATRON_RL_PATCHES_LOUDNESS", "7")
    with applied("loud"):
        assert speak().loudness == 7
    with applied("loud", settings=Settings(loudness=9)):
        assert speak().loudness == 9
