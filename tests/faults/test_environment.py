"""Whatever the variables say, a process that imports no framework runs on, with at most one complaint.

Processes are tried in an environment where the startup file is live; the parsing behind it, where a thousand
values cost no more than one process, in this one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import _megatron_rl_patches_startup as startup
from megatron_rl_patches import PatchError, Settings, doctor
from megatron_rl_patches.engine import api, installer, registry
from megatron_rl_patches.engine import settings as settings_module
from megatron_rl_patches.engine.settings import STRICT_VARIABLE, VARIABLE
from megatron_rl_patches.losses.logits.divergences import DIVERGENCES

from .environments import UNRELATED, Environment

VARIABLES = sorted(settings_module.variables())
INTERPRETER_OPTIONS = ("-I", "-E", "-s", "-B", "-OO", "-Werror", "-Xutf8=0", "-Xdev")

Variables = dict[str, str]

_LONGEST = 100_000  # Linux takes 128 KiB for one variable
_WORDS = (
    *("1", "0", "all", "none", "maybe", "-1", "1e999", "nan", "9" * 5000, "٣"),
    *("mine.model:train", "os.path:join", ":", "=", "a=/b", "-"),
    *DIVERGENCES,
)
_MODULES = sorted(sys.stdlib_module_names)


def _values(*words: str) -> st.SearchStrategy[str]:
    """Nearly right, wholly wrong, bytes of no encoding, and far too long."""
    word = st.sampled_from([*words, *(f"-{word}" for word in words[:5])]) | st.text(max_size=5)
    listed = st.lists(word, max_size=5).map(",".join)
    raw = st.binary(max_size=20).map(os.fsdecode)
    some = st.one_of(st.sampled_from(words), listed, raw, st.text())
    value = st.one_of(some, st.builds(lambda text: text * (_LONGEST // (4 * len(text) + 4)), some))
    return value.map(lambda text: text.replace("\0", "")).filter(_can_be_passed)


def _can_be_passed(value: str) -> bool:
    try:
        return len(os.fsencode(value)) < _LONGEST
    except UnicodeEncodeError:  # half a pair of surrogates: no environment holds it
        return False


def _environments(*words: str) -> st.SearchStrategy[Variables]:
    value = _values(*registry.patches(), *_WORDS, *words)
    others = {name: value for name in VARIABLES if name != VARIABLE}
    return st.fixed_dictionaries({VARIABLE: value}, optional=others)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment.make(tmp_path_factory.mktemp("environment") / "venv")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(), options=st.lists(st.sampled_from(INTERPRETER_OPTIONS), max_size=3))
def test_an_unrelated_process_never_hears_of_us(
    environment: Environment, variables: Variables, options: list[str]
) -> None:
    """Strict or not, and to the last line: nothing is said before a framework is imported."""
    assert environment.run(UNRELATED, variables, *options).complaint == ""


@pytest.fixture(scope="module")
def added() -> Iterator[mock.Mock]:
    """Nothing is put in place: what is tried is all before that."""
    with mock.patch.object(installer, "installer") as replaced:
        yield replaced.add


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variables=_environments(*_MODULES))
@example({VARIABLE: "nothing", STRICT_VARIABLE: "maybe"})
def test_reading_them_costs_one_line_at_most(
    added: mock.Mock, caplog: pytest.LogCaptureFixture, variables: Variables
) -> None:
    added.reset_mock()
    caplog.clear()
    with caplog.at_level(logging.WARNING), mock.patch.dict(os.environ, variables):
        assert startup._roots().issuperset(startup._ROOTS)
        if startup.is_strict():
            try:
                api.activate_from_environment(variables)
            except PatchError as error:
                assert len(str(error).splitlines()) == 1
        else:
            api.activate_from_environment(variables)
    assert len(caplog.messages) <= 1
    assert all(len(message.splitlines()) == 1 for message in caplog.messages)


@settings(max_examples=50)
@given(variables=_environments())
def test_the_doctor_sees_what_the_activation_sees(variables: Variables) -> None:
    try:
        chosen = Settings.from_environment(variables)
    except PatchError as error:
        assert str(error) in [problem.message for problem in doctor.choice_of(variables).problems]
    else:
        assert doctor.choice_of(variables).settings == chosen
