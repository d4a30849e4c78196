"""Adapters bind the arguments of a call by the names that the framework gives them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl_patches.frameworks.arguments import bind, call


def target(model: Any, *rest: Any, steps: int = 1, **more: Any) -> tuple[Any, ...]:
    return model, rest, steps, more


class Framework:
    def method(self, model: Any, steps: int = 1) -> tuple[Any, ...]:
        return model, steps


def test_bind() -> None:
    assert bind(target, ("m",), {}).arguments == {"model": "m"}
    whole = bind(target, ("m", 2), {"other": 3}, defaults=True).arguments
    assert whole == {"model": "m", "rest": (2,), "steps": 1, "more": {"other": 3}}
    assert bind(Framework().method, ("m",), {}, defaults=True).arguments == {"model": "m", "steps": 1}
    with pytest.raises(TypeError, match="model"):
        bind(target, (), {})


def test_call_with_changes_leaves_the_binding_as_it_was() -> None:
    bound = bind(target, ("m", 2), {"other": 3})
    assert call(target, bound, steps=5) == ("m", (2,), 5, {"other": 3})
    assert call(target, bound, model="n") == ("n", (2,), 1, {"other": 3})
    assert call(target, bound) == ("m", (2,), 1, {"other": 3})


def test_methods_of_two_instances_have_two_signatures() -> None:
    class Other:
        def method(self, chunks: Any) -> None: ...

    assert bind(Framework().method, ("m",), {}).arguments == {"model": "m"}
    assert bind(Other().method, ("m",), {}).arguments == {"chunks": "m"}
