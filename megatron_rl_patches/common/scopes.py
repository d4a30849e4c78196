"""Changes that last as long as a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object, module or class, which every thread sees, and restore them at the end."""
    before = snapshot(owner, *attributes)
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        restore(owner, before)


def snapshot(owner: Any, *names: str) -> dict[str, Any]:
    """Return the owner's own attributes, for :func:`restore`; inherited ones count as absent."""
    own = getattr(owner, "__dict__", {})
    return {name: own.get(name, _ABSENT) for name in names}


def restore(owner: Any, values: dict[str, Any]) -> None:
    """Set attributes to the values that :func:`snapshot` returned, and delete those that were absent."""
    for name, value in values.items():
        if value is not _ABSENT:
            setattr(owner, name, value)
        elif name in getattr(owner, "__dict__", {}):
            delattr(owner, name)


class Scope(Generic[T]):
    """A value that functions further down the same call see, and other threads do not."""

    def __init__(self, name: str) -> None:
        self._variable: ContextVar[T | None] = ContextVar(f"megatron_rl_patches_{name}", default=None)

    def get(self) -> T | None:
        """Return the value of the innermost :meth:`enter`; outside of any, ``None``."""
        return self._variable.get()

    @contextmanager
    def enter(self, value: T) -> Iterator[T]:
        """Make ``value`` the current one for the length of the block."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)
