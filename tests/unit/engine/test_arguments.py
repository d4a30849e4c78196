"""Adapters get one call, with its arguments by the names that the framework gives them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches.engine.call import Call, adapter_at


def target(model: Any, *rest: Any, steps: int = 1, **more: Any) -> tuple[Any, ...]:
    return model, rest, steps, more


class Framework:
    def method(self, model: Any, steps: int = 1) -> tuple[Any, ...]:
        return model, steps


def call_of(function: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(function, getattr(function, "__self__", None), args, kwargs)


def test_arguments_by_name_with_defaults() -> None:
    call = call_of(target, "m", 2, other=3)
    assert call.arguments == {"model": "m", "rest": (2,), "steps": 1, "more": {"other": 3}}
    assert call_of(Framework().method, "m").arguments == {"model": "m", "steps": 1}
    assert call_of(Framework().method, "m").changed == ["model"]
    with pytest.raises(TypeError, match="model"):
        call_of(target)["model"]


def test_a_call_runs_the_function_as_it_was_called_or_with_a_change() -> None:
    call = call_of(target, "m", 2, other=3)
    assert call() == ("m", (2,), 1, {"other": 3})
    assert call(steps=5) == ("m", (2,), 5, {"other": 3})
    assert call(model="n") == ("n", (2,), 1, {"other": 3})
    assert call() == ("m", (2,), 1, {"other": 3})


def test_methods_of_two_instances_have_two_signatures() -> None:
    class Other:
        def method(self, chunks: Any) -> None: ...

    assert call_of(Framework().method, "m")["model"] == call_of(Other().method, "m")["chunks"] == "m"


def test_an_adapter_is_imported_when_it_is_first_called() -> None:
    later = adapter_at("no_such_module:adapter")
    with pytest.raises(ModuleNotFoundError):
        later(call_of(target, "m"))
    assert adapter_at("builtins:repr")(call_of(target, "m")).startswith("<")
